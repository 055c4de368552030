"""The first linear map of an octic MLP with its GELU: the TPU kernel in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.d8_gelu.reference import d8_gelu
from equivit.kernels.isotypic_linear import linear
from equivit.kernels.octic_linear_gelu import octic_feed_forward, octic_linear_gelu
from equivit.kernels.octic_linear_gelu.reference import octic_linear_gelu as reference
from equivit.kernels.octic_linear_gelu.tpu import WEIGHT_BYTES
from experiments.benchmarks.field_shapes import AWKWARD, REALISTIC
from tests.kernels.comparison import (
    SHAPES,
    SMALL,
    assert_near,
    draw,
    draw_arguments,
    shrink_memory,
    value_and_gradient,
    widen,
)

interpreted = functools.partial(octic_linear_gelu, implementation="interpret")


@pytest.mark.parametrize("shape, dtype", SHAPES, ids=lambda value: getattr(value, "name", value))
def test_values_are_the_reference_s(shape, dtype, monkeypatch):
    shrink_memory(shape, monkeypatch)
    arguments = draw_arguments(shape, dtype)
    # Products are summed in float32 in another order: 1e-6 of a value near 10.  In bfloat16 the kernel's GELU sees
    # those sums: the results are rounded once, as if all had been computed in float32.
    assert_near(jax.jit(interpreted)(*arguments), jax.jit(reference)(*widen(arguments)), absolute=2e-5)


# Differentiation uses the kernels of `d8_gelu`; `d8_gelu_test` runs them at all shapes.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [SMALL, AWKWARD[1]], ids=lambda shape: shape.name)
def test_gradients_are_those_of_plain_xla(shape, dtype):
    arguments, gradient = draw_arguments(shape, dtype), draw(shape.field(shape.hidden), dtype, seed=9)
    # Both put the gradient at the hidden field, the same but for its last rounding, into the same products.  Sums over
    # rows in bfloat16 amplify that; XLA:CPU's own are off by up to 4 % in some versions, so float32 is no measure.
    share = {"float32": 2e-6, "bfloat16": 3e-2}[dtype]
    ours, plain = (value_and_gradient(op, arguments, gradient)[2:] for op in (interpreted, octic_linear_gelu))
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=share * np.abs(b).max(), rtol=0)


def test_gradients_of_plain_xla_are_the_reference_s():
    arguments, gradient = draw_arguments(SMALL, "float32"), draw(SMALL.field(SMALL.hidden), "float32", seed=9)
    expected = value_and_gradient(reference, arguments, gradient)
    for a, b in zip(value_and_gradient(octic_linear_gelu, arguments, gradient), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()), rtol=0)


def test_the_gradient_of_a_wider_bias_is_summed_in_its_type():
    """Over 10,000 tokens; the tolerance is for the rounding of each token's gradient to bfloat16."""
    random = np.random.default_rng(0)
    shapes = [(4, 2, 5000, 4), (2, 2, 5000, 8), (4, 4, 8), (8, 16), (4, 8, 4), (16, 8), (4, 2, 5000, 4)]
    lines, planes, *weights, gradient = (jnp.asarray(random.normal(size=shape), "bfloat16") for shape in shapes)
    bias = jnp.asarray(random.normal(size=8), "float32")

    def loss(bias, *arrays):
        lines, planes, *weights, gradient = arrays
        y, _ = octic_feed_forward((lines, planes), (tuple(weights[:2]), bias), (tuple(weights[2:]), None))
        return jnp.sum(y * gradient, dtype="float32")

    arrays, slope = (lines, planes, *weights, gradient), jax.jit(jax.grad(loss))
    exact = slope(bias, *(a.astype("float32") for a in arrays))
    ours, rounded = slope(bias, *arrays), slope(bias.astype("bfloat16"), *arrays)
    ours, rounded = (
        float(jnp.abs(found.astype("float32") - exact).max() / jnp.abs(exact).max()) for found in (ours, rounded)
    )
    assert ours < 5e-3 and rounded > 1e-2, (ours, rounded)


def test_a_bias_or_a_weight_in_the_wrong_place_is_caught():
    lines, planes, w_lines, w_planes, bias = arguments = [np.asarray(a) for a in draw_arguments(SMALL, "float32")]
    results, f = jax.jit(interpreted)(*arguments), SMALL.hidden
    of, gelu = jax.jit(reference), jax.jit(d8_gelu)
    h_lines, h_planes = map(np.asarray, jax.jit(linear)((lines, planes), ((w_lines, w_planes), None)))
    on_another = h_lines + bias * (np.arange(4) == 1)[:, None, None, None].astype(np.float32)
    wrong = {
        "bias on another irrep": gelu(on_another, h_planes),
        "no bias": gelu(h_lines, h_planes),
        "irreps of the weights": of(lines, planes, w_lines[::-1], w_planes, bias),
        "copies of E": of(lines, planes, w_lines, np.roll(w_planes, f, axis=1), bias),
        "rows of E": of(lines, planes[::-1], w_lines, w_planes, bias),
    }
    for name, other in wrong.items():
        assert max(np.abs(a - b).max() for a, b in zip(results, other, strict=True)) > 0.1, name


def test_lines_call_for_each_set_of_weights_under_vmap():
    field = draw(SMALL.field(SMALL.channels), "float32")
    weights = [draw_arguments(SMALL, "float32", seed)[2:] for seed in (3, 4)]
    stacked = [jnp.stack(ws) for ws in zip(*weights, strict=True)]
    op = functools.partial(interpreted, *field)
    expected = [jnp.stack(ys) for ys in zip(*(reference(*field, *ws) for ws in weights), strict=True)]
    assert_near(jax.jit(jax.vmap(op))(*stacked), expected, absolute=2e-5)


def test_mixed_types_promote():
    lines, planes, *weights = draw_arguments(SMALL, "float32")
    field = (lines.astype(jnp.bfloat16), planes.astype(jnp.bfloat16))
    results = octic_linear_gelu(*field, *weights)
    assert_near(results, reference(*widen(field), *weights))


def test_bad_arguments_are_named():
    lines, planes, w_lines, w_planes, bias = draw_arguments(SMALL, "float32")
    with pytest.raises(ValueError, match="octic_linear_gelu: implementation='fast' is not one of 'auto', 'reference'"):
        octic_linear_gelu(lines, planes, w_lines, w_planes, bias, implementation="fast")
    with pytest.raises(ValueError, match="octic_linear_gelu: .* are not the shapes of an octic field"):
        octic_linear_gelu(planes, lines, w_lines, w_planes, bias)
    with pytest.raises(ValueError, match=r"C=24 channels and this bias, \(4, 24, 40\) and \(48, 80\)"):
        octic_linear_gelu(lines, planes, w_lines, w_planes.T, bias)


def test_weights_beyond_the_budget_have_no_fused_kernel():
    shape = REALISTIC[-1]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (*shape.field(shape.channels), *shape.weights())]
    assert sum(2 * a.size for a in arrays[2:]) > WEIGHT_BYTES
    with pytest.raises(ValueError, match="implementation='interpret' has no kernel for bfloat16"):
        jax.eval_shape(interpreted, *arrays)
    assert [a.shape for a in jax.eval_shape(octic_linear_gelu, *arrays)] == [*shape.field(shape.hidden)]
