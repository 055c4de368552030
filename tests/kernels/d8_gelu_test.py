"""The GELU of an octic field: its mathematics, and the TPU kernel in interpret mode against the reference."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels import pointwise
from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.d8_gelu.reference import d8_gelu as reference
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC
from tests.kernels.comparison import (
    ABSOLUTE,
    SHAPES,
    SMALL,
    assert_near,
    draw,
    shrink_memory,
    value_and_gradient,
    widen,
)

interpreted = functools.partial(d8_gelu, implementation="interpret")


def test_the_fast_transforms_are_the_group_s_fourier_pair():
    np.testing.assert_allclose(pointwise.FOURIER, OCTIC.fourier, atol=1e-15)
    np.testing.assert_allclose(np.stack(pointwise.to_isotypic(np.eye(8))), OCTIC.fourier.T, atol=1e-15)


def test_gelu_and_its_derivative_are_within_1e_6_of_the_exact_ones():
    x = np.unique(np.concatenate([np.linspace(-12, 12, 200_001), [-1e30, -1e4, 1e4, 1e30]]).astype(np.float32))
    cumulated = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(float)])
    density = np.exp(-0.5 * np.minimum(x.astype(float) ** 2, 1e4)) / math.sqrt(2 * math.pi)
    # Of large results, half a step of float32.
    np.testing.assert_allclose(pointwise.gelu(jnp.asarray(x)), x * cumulated, atol=1e-6, rtol=2.0**-24)
    np.testing.assert_allclose(pointwise.gelu_gradient(jnp.asarray(x)), cumulated + x * density, atol=1e-6)


@pytest.mark.parametrize("shape, dtype", SHAPES, ids=lambda value: getattr(value, "name", value))
def test_values_and_gradients_are_the_reference_s(shape, dtype, monkeypatch):
    shrink_memory(shape, monkeypatch)
    field, gradient = draw(shape.field(shape.hidden), dtype), draw(shape.field(shape.hidden), dtype, seed=1)
    expected = value_and_gradient(reference, widen(field), widen(gradient))
    assert_near(value_and_gradient(interpreted, field, gradient), expected)


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_plain_implementations_are_the_reference_in_any_type(implementation):
    for dtype in ("float32", "bfloat16", "float16"):
        field, gradient = draw(SMALL.field(8), dtype), draw(SMALL.field(8), dtype, seed=1)
        op = functools.partial(d8_gelu, implementation=implementation)
        results = value_and_gradient(op, field, gradient)
        for a, b in zip(results, value_and_gradient(reference, field, gradient), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a, b, atol=ABSOLUTE)


def test_it_commutes_with_the_group():
    field = Isotypic(*draw(SMALL.field(SMALL.channels), "float32"))
    op = jax.jit(lambda x: Isotypic(*interpreted(x.lines, x.planes)))
    y = op(field)
    for g in OCTIC.elements:
        moved, expected = op(fields.act_on_channels(g, field)), fields.act_on_channels(g, y)
        assert_near(jax.tree.leaves(moved), jax.tree.leaves(expected))
    mirrored = op(jax.tree.map(jnp.negative, field))  # not of the group
    assert all(np.abs(a + b).mean() > 0.1 for a, b in zip(*map(jax.tree.leaves, (y, mirrored)), strict=True))


def test_a_kernel_that_mixes_up_components_is_caught():
    x = jnp.stack(draw([(37, 24)] * 8, "float32"))
    y = np.asarray(fields.to_components(Isotypic(*interpreted(*_arrays(x)))))
    for i in range(8):
        for j in range(i):
            swapped = np.arange(8)
            swapped[[i, j]] = j, i
            wrong = np.asarray(fields.to_components(Isotypic(*reference(*_arrays(x[swapped])))))[swapped]
            assert np.abs(wrong - y).max() > 0.1, (i, j)


def _arrays(components):
    field = fields.from_components(components[:, None])
    return field.lines, field.planes


@pytest.mark.parametrize("implementation", ["auto", "xla", "interpret"])
def test_an_empty_batch(implementation):
    field = draw([(4, 0, 5, 8), (2, 0, 5, 16)], "float32")
    results = value_and_gradient(functools.partial(d8_gelu, implementation=implementation), field, field)
    assert [a.shape for a in results] == [a.shape for a in (*field, *field)]


def test_only_the_input_is_kept_for_the_derivative():
    field = draw(SMALL.field(SMALL.channels), "float32")
    kept = jax.vjp(d8_gelu, *field)[1]
    assert sum(a.nbytes for a in jax.tree.leaves(kept)) == sum(a.nbytes for a in field)


def test_bad_arguments_are_named():
    lines, planes = draw(SMALL.field(8), "float32")
    with pytest.raises(ValueError, match="d8_gelu: implementation='triton' is not one of 'auto', 'reference', 'xla'"):
        d8_gelu(lines, planes, implementation="triton")
    with pytest.raises(
        ValueError, match=r"\(2, 3, 37, 8\) are not the shapes of an octic field.*planes must be \(2, 3, 37, 16\)"
    ):
        d8_gelu(lines, planes[..., :8])
    with pytest.raises(ValueError, match="are not the shapes of an octic field"):
        d8_gelu(lines[0], planes)
    with pytest.raises(ValueError, match="lines are float32 and planes bfloat16; a field has one dtype"):
        d8_gelu(lines, planes.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"implementation='tpu' has no kernel for float16\[4, 3, 37, 8\]"):
        d8_gelu(lines.astype(jnp.float16), planes.astype(jnp.float16), implementation="tpu")
    with pytest.raises(ValueError, match=r"implementation='gpu' has no kernel for float32\[4, 3, 37, 5\]"):
        d8_gelu(lines[..., :5], planes[..., :10], implementation="gpu")
