"""Attention head by head, the switch between implementations, and the copies around it."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import models
from equivit.kernels import gpus
from equivit.kernels.attention import attend, gpu, self_attention, side_by_side, weights
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
def test_values_are_those_of_the_formula(batch, dtype, tolerance):
    q, k, v = heads(0, *batch, 3, 7, 24, dtype=dtype), *(heads(i, *batch, 3, 11, 24, dtype=dtype) for i in (1, 2))
    y = attend(q, k, v)
    assert y.dtype == jnp.dtype(dtype)
    chex.assert_trees_all_close(y.astype(jnp.float32), by_the_book(q, k, v), rtol=0, atol=tolerance)


def test_weights_are_what_values_are_weighed_with():
    q, k, v = heads(0, 2, 3, 7, 24), *(heads(i, 2, 3, 11, 24) for i in (1, 2))
    w = weights(q, k)
    np.testing.assert_allclose(w.sum(-1), 1, rtol=1e-6)
    chex.assert_trees_all_close(w @ v, by_the_book(q, k, v), rtol=0, atol=2e-6)


def test_a_bias_is_added_to_the_logits_and_a_scale_replaces_the_root():
    q, k, v, bias = heads(0, 2, 3, 7, 24), *(heads(i, 2, 3, 11, 24) for i in (1, 2)), heads(3, 3, 7, 11)
    expected = jax.nn.softmax(0.5 * q @ jnp.swapaxes(k, -1, -2) + bias) @ v
    chex.assert_trees_all_close(attend(q, k, v, bias, scale=0.5), expected, rtol=0, atol=2e-6)


def test_large_logits_stay_finite():
    q = 1e3 * heads(0, 2, 5, 8)
    chex.assert_tree_all_finite((attend(q, q, q), jax.grad(lambda q: attend(q, q, q).sum())(q)))


def test_values_that_many_tokens_share_stay_finite_in_float16():
    """The mean of 4096 values of 100; their sum is beyond 65504."""
    q, v = jnp.zeros((1, 1, 1, 8), jnp.float16), jnp.full((1, 1, 4096, 8), 100, jnp.float16)
    np.testing.assert_array_equal(attend(q, jnp.zeros_like(v), v), np.full(q.shape, 100))


def test_the_gradient_is_that_of_the_formula():
    q, k, v = (heads(i, 2, 5, 8) for i in range(3))

    def plain(q, k, v):
        return jnp.square(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / math.sqrt(8)) @ v).sum()

    def ours(q, k, v):
        return jnp.square(attend(q, k, v)).sum()

    expected = jax.grad(plain, argnums=(0, 1, 2))(q, k, v)
    chex.assert_trees_all_close(jax.grad(ours, argnums=(0, 1, 2))(q, k, v), expected, atol=1e-5)


@pytest.mark.parametrize(("dtype", "takes"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_what_cudnn_takes(dtype, takes):
    q = heads(0, 2, 5, 80, dtype=dtype)
    assert gpu.supported(q, q, q) is takes


@pytest.mark.parametrize("channels", [12, 136])
def test_cudnn_does_not_take_other_heads(channels):
    q, v = (heads(0, 2, 5, number, dtype="bfloat16") for number in (channels, 64))
    assert not gpu.supported(q, q, q)
    assert gpu.supported(v, v, v) and not gpu.supported(q[..., :8], v, v)


def test_no_images_are_left_to_the_plain_products():
    q = jnp.zeros((0, 2, 5, 64), jnp.bfloat16)
    assert not gpu.supported(q, q, q) and attend(q, q, q).shape == (0, 2, 5, 64)


def test_a_machine_without_a_gpu_lowers_plain_products_for_cuda():
    q = jax.ShapeDtypeStruct((2, 3, 7, 64), jnp.bfloat16)
    text = jax.jit(attend).trace(q, q, q).lower(lowering_platforms=("cuda",)).as_text()
    assert "cudnn" not in text and "dot_general" in text


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_a_described_gpu_has_cudnn(capability):
    """Without a GPU, for gradients too; outside of the context the machine decides again."""
    q = jax.ShapeDtypeStruct((2, 3, 8, 64), jnp.bfloat16)

    def text():
        gradient = jax.jit(jax.grad(lambda q: attend(q, q, q).astype(jnp.float32).sum()))
        return gradient.trace(q).lower(lowering_platforms=("cuda",)).as_text()

    with gpus.lowering_for(gpus.Gpu(capability, 91000)):
        assert "__cudnn$fmhaSoftmaxBackward" in text()
    assert "cudnn" not in text()


def test_the_cudnn_branch_concerns_cuda_only(monkeypatch):
    """The switch as on a machine with a GPU; the fused kernel itself needs one, and is stood in for."""
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "attend", lambda q, k, v: jnp.cosh(v))
    q = jax.ShapeDtypeStruct((2, 3, 7, 64), jnp.bfloat16)
    traced = jax.jit(lambda q: attend(q, q, q)).trace(q)
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
    """Tokens before heads, one batch axis."""
    q, k, v = (heads(i, 2, 3, 4, 7, 24) for i in range(3))
    chex.assert_trees_all_close(gpu.attend(q, k, v), attend(q, k, v, implementation="xla"), atol=1e-6)
    assert cudnn == [(7, 7)]


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (6, 7), (7, 8), (6, 8)])
def test_cudnn_is_differentiated_at_even_numbers_of_tokens_only(cudnn, queries, keys):
    """JAX refuses others, as 197 are; a token that fills up has no weight, though its logit of 0 would have one."""
    q, k, v, g = (heads(i, 2, 3, n, 24) for i, n in enumerate((queries, keys, keys, queries)))

    def gradients(function):
        y, pull = jax.vjp(function, q, k, v)
        return y, pull(g)

    found, expected = (jax.jit(functools.partial(gradients, function))() for function in (gpu.attend, attend))
    chex.assert_trees_all_close(found, expected, atol=2e-6)
    assert cudnn == [(queries + queries % 2, keys + keys % 2)]


@pytest.mark.parametrize(("tokens", "differentiated_at"), [(7, 8), (8, 8)])
@pytest.mark.parametrize("biased", [True, False])
def test_self_attention_around_cudnn(cudnn, monkeypatch, tokens, differentiated_at, biased):
    """A token that makes their number even has no weight, though its key is not 0 if there is a bias."""
    x, maps = heads(0, 2, 3, tokens, 20), (heads(1, 20, 72) / 5, heads(2, 24, 12) / 5)
    biases = (heads(3, 72), heads(4, 12)) if biased else (None, None)
    qkv, proj = zip(maps, biases, strict=True)
    arguments = (x, qkv, proj)

    def around(x, qkv, proj):
        return gpu.self_attention(3, x, qkv, proj)

    def plain(x, qkv, proj):
        return self_attention(x, qkv, proj, 3)

    chex.assert_trees_all_close(*(jax.jit(f)(*arguments) for f in (around, plain)), rtol=1e-6, atol=2e-6)
    assert cudnn == [(tokens, tokens)]
    gradients = (jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2))) for f in (around, plain))
    found, expected = (gradient(*arguments) for gradient in gradients)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=2e-5)  # sums over 42 tokens
    assert cudnn[-1] == (differentiated_at, differentiated_at)


def test_self_attention_takes_cudnn_where_it_is(monkeypatch):
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "self_attention", lambda heads, x, qkv, proj: jnp.cosh(x))

    def lowered(dtype, platform):
        x, *maps = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 7, 128), (128, 384), (128, 128)))
        traced = jax.jit(lambda x, qkv, proj: self_attention(x, (qkv, None), (proj, None), 2)).trace(x, *maps)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "cosh" in lowered(jnp.bfloat16, "cuda")
    assert "cosh" not in lowered(jnp.float32, "cuda") + lowered(jnp.bfloat16, "cpu")


def test_an_unknown_implementation():
    q = heads(0, 2, 5, 8)
    with pytest.raises(ValueError, match="attend: implementation='flash' is not one of 'auto', 'reference', 'xla'"):
        attend(q, q, q, implementation="flash")
    with pytest.raises(ValueError, match=r"attend: implementation='gpu' has no kernel for float32\[2, 5, 8\]"):
        attend(q, q, q, implementation="gpu")


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
    joined = 3 if group is OCTIC else 0  # the lines and planes of q, of k and of v
    assert counts["copy"] <= copies and counts["transpose"] <= copies and counts["concatenate"] <= joined


def test_heads_side_by_side():
    x = heads(0, 2, 3, 5, 8)
    np.testing.assert_array_equal(side_by_side(x), jnp.swapaxes(x, -2, -3).reshape(2, 5, 24))
