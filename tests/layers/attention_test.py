"""Attention on head vectors in parts, the switch between implementations, and the copies around it."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import models
from equivit.layers import attention
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import normal


def heads(seed, *shape, dtype=jnp.float32):
    return normal(*shape, dtype=dtype, seed=seed)


def by_the_book(q, k, v):
    """In float64, with NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


# A sum over 11 tokens of entries near 1: a few roundings of the type.
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 3e-2)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("cuts", [[], [8], [4, 5, 20]])
def test_parts_are_one_head_vector(batch, cuts, dtype, tolerance):
    q, k, v = heads(0, *batch, 3, 7, 24, dtype=dtype), *(heads(i, *batch, 3, 11, 24, dtype=dtype) for i in (1, 2))
    parts = attention.attend(*(tuple(jnp.split(x, cuts, axis=-1)) for x in (q, k, v)))
    assert [part.shape[-1] for part in parts] == np.diff([0, *cuts, 24]).tolist()
    assert {part.dtype for part in parts} == {jnp.dtype(dtype)}
    whole = jnp.concatenate(parts, -1).astype(jnp.float32)
    chex.assert_trees_all_close(whole, by_the_book(q, k, v), rtol=0, atol=tolerance)


@pytest.mark.parametrize("cuts", [[], [4, 5, 20]])
def test_weights_are_what_values_are_weighed_with(cuts):
    q, k, v = heads(0, 2, 3, 7, 24), *(heads(i, 2, 3, 11, 24) for i in (1, 2))
    weights = attention.attention_weights(*(tuple(jnp.split(x, cuts, axis=-1)) for x in (q, k)))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    chex.assert_trees_all_close(weights @ v, by_the_book(q, k, v), rtol=0, atol=2e-6)


def test_large_logits_stay_finite():
    q = 1e3 * heads(0, 2, 5, 8)
    (y,) = attention.attend((q,), (q,), (q,))
    (gradient,) = jax.grad(lambda q: attention.attend((q,), (q,), (q,))[0].sum(), argnums=(0,))(q)
    chex.assert_tree_all_finite((y, gradient))


def test_the_gradient_is_that_of_the_formula():
    q, k, v = (heads(i, 2, 5, 8) for i in range(3))

    def plain(q, k, v):
        return jnp.square(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / math.sqrt(8)) @ v).sum()

    def ours(q, k, v):
        return sum(
            jnp.square(part).sum() for part in attention.attend(*(tuple(jnp.split(x, 2, -1)) for x in (q, k, v)))
        )

    expected = jax.grad(plain, argnums=(0, 1, 2))(q, k, v)
    chex.assert_trees_all_close(jax.grad(ours, argnums=(0, 1, 2))(q, k, v), expected, atol=1e-5)


def test_parts_are_copied_only_for_their_gradients_which_then_take_the_products_of_a_single_part():
    def operations(parts, differentiated):
        def loss(q, k, v):
            return sum(jnp.square(y).sum() for y in attention.attend(q, k, v))

        x = (jax.ShapeDtypeStruct((2, 3, 7, 24 // parts), jnp.float32),) * parts
        f = jax.grad(loss, argnums=(0, 1, 2)) if differentiated else attention.attend
        text = jax.jit(f).lower(x, x, x).as_text()
        return [text.count(f"stablehlo.{name} ") for name in ("dot_general", "concatenate")]

    assert operations(3, differentiated=False) == [2 * 3, 0]
    assert operations(1, differentiated=True) == [2 + 4, 0]
    products, copies = operations(3, differentiated=True)
    assert products == 2 + 4 and copies


@pytest.mark.parametrize(
    ("dtype", "cuts", "takes"),
    [("bfloat16", [40], True), ("float16", [], True), ("float32", [], False), ("bfloat16", [2], True)],
)
def test_what_cudnn_takes(dtype, cuts, takes):
    q = tuple(jnp.split(heads(0, 2, 5, 80, dtype=dtype), cuts, axis=-1))
    assert attention.cudnn_takes(q, q, q) is takes


@pytest.mark.parametrize("channels", [12, 136])
def test_cudnn_does_not_take_other_heads(channels):
    q, v = ((heads(0, 2, 5, number, dtype="bfloat16"),) for number in (channels, 64))
    assert not attention.cudnn_takes(q, q, q)
    assert attention.cudnn_takes(v, v, v) and not attention.cudnn_takes((q[0][..., :8],) * 2, v, v)


def test_no_images_are_left_to_the_plain_products():
    q = (jnp.zeros((0, 2, 5, 64), jnp.bfloat16),)
    assert not attention.cudnn_takes(q, q, q) and attention.attend(q, q, q)[0].shape == (0, 2, 5, 64)


def test_a_machine_without_a_gpu_lowers_plain_products_for_cuda():
    q = (jax.ShapeDtypeStruct((2, 3, 7, 64), jnp.bfloat16),)
    text = jax.jit(attention.attend).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "cudnn" not in text and "dot_general" in text


def test_the_cudnn_branch_concerns_cuda_only(monkeypatch):
    """The switch as on a machine with a GPU; the fused kernel itself needs one, and is stood in for."""
    monkeypatch.setattr(attention, "_has_cudnn", lambda: True)
    monkeypatch.setattr(attention, "_cudnn", lambda q, k, v: tuple(jnp.cosh(part) for part in v))
    q = (jax.ShapeDtypeStruct((2, 3, 7, 64), jnp.bfloat16),)
    traced = jax.jit(lambda q: attention.attend(q, q, q)).trace(q)
    assert "cosh" in traced.lower(lowering_platforms=("cuda",)).as_text()
    for platform in ("cpu", "tpu"):
        assert "cosh" not in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def cudnn(monkeypatch):
    """In cuDNN's place the XLA implementation, which takes any number of tokens; returns the numbers it was given."""
    tokens, plain = [], jax.nn.dot_product_attention

    def standing_in(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        tokens.append((q.shape[1], k.shape[1]))
        return plain(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", standing_in)
    return tokens


def test_the_layout_for_cudnn(cudnn):
    """Tokens before heads, one batch axis, parts side by side."""
    q, k, v = (tuple(jnp.split(heads(i, 2, 3, 4, 7, 24), [8], axis=-1)) for i in range(3))
    expected = attention.attend(q, k, v, implementation="xla")
    chex.assert_trees_all_close(attention.attend(q, k, v, implementation="cudnn"), expected, atol=1e-6)
    assert cudnn == [(7, 7)]


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (6, 7), (7, 8), (6, 8)])
def test_cudnn_is_differentiated_at_even_numbers_of_tokens_only(cudnn, queries, keys):
    """JAX refuses others, as 197 are; a token that fills up has no weight, though its logit of 0 would have one."""
    q, k, v, g = ((heads(i, 2, 3, n, 24),) for i, n in enumerate((queries, keys, keys, queries)))

    def gradients(implementation):
        y, pull = jax.vjp(functools.partial(attention.attend, implementation=implementation), q, k, v)
        return y, pull(g)

    chex.assert_trees_all_close(gradients("cudnn"), gradients("xla"), atol=2e-6)
    assert cudnn == [(queries + queries % 2, keys + keys % 2)]


def test_an_unknown_implementation():
    q = (heads(0, 2, 5, 8),)
    with pytest.raises(ValueError, match="implementation='flash' is not one of auto, xla, cudnn"):
        attention.attend(q, q, q, implementation="flash")


# Copies of the optimised program, forward: q, k and v are each brought into place, and the result back; the layers
# between fields do so for each of their leaves and put nothing side by side.  (Concatenating the components of a head
# took 22 copies in the octic layer, 8 in the flip layer, and three concatenations of the whole field in each.)
@pytest.mark.parametrize(
    ("family", "name", "group", "copies"),
    [("plain", "vit_ti16", None, 4), ("D8", "octic_vit_ti16", OCTIC, 8), ("D2", "flip_vit_ti16", FLIP, 4)],
)
def test_no_more_copies_than_needed(family, name, group, copies):
    options = dict(family=family, width=384, num_heads=6, depth=1, image_size=(32, 32), num_classes=None)
    layer = jax.eval_shape(lambda: models.create(name, **options).blocks[0].attention)
    x = jax.ShapeDtypeStruct((8, 196, 384), jnp.float32)
    if group is not None:
        x = jax.eval_shape(lambda x: fields.from_dense(x, group), x)
    text = jax.jit(lambda layer, x: layer(x)).lower(layer, x).compile().as_text()
    counts = {op: len(re.findall(rf"= \w+\[[\d,]+\]\S* {op}\(", text)) for op in ("copy", "transpose", "concatenate")}
    assert counts["copy"] <= copies and counts["transpose"] <= copies and counts["concatenate"] == 0


@pytest.mark.parametrize(("platform", "prescribed"), [("cpu", 2), ("tpu", 0), ("cuda", 0)])
def test_heads_and_their_gradient_are_turned_in_order_on_a_cpu(platform, prescribed):
    x = heads(0, 2, 3, 5, 8)

    def loss(x):
        return jnp.sum(jnp.sin(attention.side_by_side(x)))

    lowered = jax.jit(jax.value_and_grad(loss)).trace(x).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("LayoutConstraint") == prescribed

    def known(x):
        return jnp.sum(jnp.sin(jnp.swapaxes(x, -2, -3).reshape(2, 5, 24)))

    many = heads(1, 2, 4, 3, 5, 8)
    chex.assert_trees_all_equal(jax.grad(loss)(x), jax.grad(known)(x))
    chex.assert_trees_all_equal(*(jax.vmap(jax.grad(function), 1, 1)(many) for function in (loss, known)))
