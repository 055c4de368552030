"""Attention of octic fields by the Hopper kernels: where it runs, values and gradients in the GPU interpreter."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equivit import kernels
from equivit.kernels.hopper import heads, irreps
from equivit.kernels.isotypic_attention import gpu as isotypic_attention_gpu
from equivit.kernels.isotypic_attention import isotypic_attention
from equivit.kernels.isotypic_attention.reference import isotypic_attention as plain_attention
from tests.kernels.comparison import draw, value_and_gradient, widen


def described_attention(*batch):
    """Field, qkv and proj of four heads of 16 channels in each line."""

    def described(*shapes):
        return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    maps = (described((4, 64, n * 64), (128, n * 128), (n * 64,)) for n in (3, 1))
    return described((4, *batch, 9, 64), (2, *batch, 9, 128)), *((maps[:2], maps[2]) for maps in maps)


def test_attention_of_a_field_has_kernels_on_one_device_alone():
    assert isotypic_attention_gpu.supported(*described_attention(8), 4)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert not isotypic_attention_gpu.supported(*described_attention(8), 4)


def field_attention(field, qkv, proj):
    with kernels.using("gpu"):
        return isotypic_attention(field, qkv, proj, 4)


def test_kernels_of_attention_see_the_rows_of_one_set_of_weights(monkeypatch):
    """Under vmap, both kernels of each direction see all rows; with several weights, the two without weights do."""
    rows = []

    def seeing(kernel):
        def called(*arrays, **options):
            rows.append(max(arrays[0].shape[:2]))
            return kernel(*arrays, **options)

        return called

    def gradients(*arguments):
        y, pull = jax.vjp(field_attention, *arguments)
        return pull(y)

    for module in (heads, irreps):
        monkeypatch.setattr(module, "forward", seeing(module.forward))
    arguments = described_attention(3, 2)
    several = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), arguments[1:])
    for axes, arrays, wide in (((1, None, None), arguments, 4), ((1, 0, 0), (arguments[0], *several), 2)):
        rows.clear()
        jax.eval_shape(jax.vmap(gradients, in_axes=axes, out_axes=(1, 0, 0)), *arrays)
        assert set(rows) == {18, 54} and rows.count(54) == wide
    each = jax.vmap(field_attention, in_axes=(1, None, None))  # of several fields, with each of several weights
    assert jax.eval_shape(jax.vmap(each, in_axes=(None, 0, 0)), arguments[0], *several)[0].shape == (3, 3, 4, 2, 9, 64)


def test_attention_of_an_empty_field_is_plain():
    arguments = described_attention(0)
    assert not isotypic_attention_gpu.supported(*arguments, 4)
    assert [y.shape for y in jax.eval_shape(field_attention, *arguments)] == [a.shape for a in arguments[0]]


def test_attention_under_vmap_is_the_reference_s(interpreter):
    parts = enumerate(described_attention(2))
    field, *maps = (draw([a.shape for a in jax.tree.leaves(part)], "bfloat16", i, 0.3) for i, part in parts)
    maps = [((lines, planes), bias) for lines, planes, bias in maps]
    expected, found = (
        jax.jit(jax.vmap(attend, (1, None, None), 1))(field, *maps)
        for attend in (functools.partial(plain_attention, heads=4), field_attention)
    )
    for a, b in zip(widen(found), widen(expected), strict=True):
        assert float(jnp.abs(a - b).max()) < 0.03 * float(jnp.abs(b).max())


@pytest.mark.parametrize("batch, width, number", [((2,), 64, 4), pytest.param((1, 2), 80, 8, id="10 channels")])
def test_attention_and_its_gradients_are_the_reference_s(batch, width, number, interpreter, monkeypatch):
    """By the heads of the kernel, whose order a wrong permutation would betray."""
    tokens = 11
    field = draw([(4, *batch, tokens, width), (2, *batch, tokens, 2 * width)], "bfloat16", scale=1.0)
    qkv = draw([(4, width, 3 * width), (2 * width, 6 * width)], "bfloat16", 1, width**-0.5)
    proj = draw([(4, width, width), (2 * width, 2 * width)], "bfloat16", 2, width**-0.5)
    biases, slopes = draw([(3 * width,), (width,)], "float32", 3), draw([a.shape for a in field], "bfloat16", 4)
    arrays = (*field, *qkv, *proj, *biases)

    def on(attention, lines, planes, q_lines, q_planes, p_lines, p_planes, q_bias, p_bias):
        return attention((lines, planes), ((q_lines, q_planes), q_bias), ((p_lines, p_planes), p_bias), number)

    def both(attention):
        return value_and_gradient(functools.partial(on, attention), arrays, slopes)

    expected, found = both(plain_attention), both(isotypic_attention_gpu.attention)
    errors = [
        float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(widen(found), widen(expected), strict=True)
    ]
    assert max(errors) < 0.03  # queries and logits are rounded at other places
    if width // number % 8:
        monkeypatch.setattr(irreps, "arranged", lambda field, c, axis=-1: field)
        wrong = jax.jit(functools.partial(on, isotypic_attention_gpu.attention))(*arrays)
        assert float(jnp.abs(wrong[0].astype(float) - expected[0]).max()) > 0.1
