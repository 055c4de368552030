"""A whole MLP branch in one operation: the TPU kernel in interpret mode against the reference."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import Weights, octic_mlp
from equivit.kernels.octic_branch.tpu import MAPS
from equivit.kernels.pointwise import SCALE, double_gelu
from experiments.benchmarks.field_shapes import Shape
from tests.kernels.comparison import assert_near, draw_branch, value_and_gradient, widen

NORM = Norm(1e-5, 0.5)
SMALL = Shape("odd tokens", (3,), 37, 16, 256)
SHAPES = [
    SMALL,
    Shape("no batch", (), 33, 8, 128),
    Shape("two batch axes", (2, 3), 7, 8, 128),
    Shape("two blocks of an image", (2,), 301, 8, 128),
    *(Shape(f"{tokens} tokens", (2,), tokens, 8, 128) for tokens in (256, 257)),
    *(Shape(f"{tokens} tokens, products turned", (1,), tokens, 136, 128) for tokens in (129, 256)),
]


@functools.partial(jax.jit, static_argnames=("implementation", "norm"))
def branch(lines, planes, *weights, implementation="interpret", norm=NORM):
    return octic_mlp(lines, planes, Weights(*weights), norm, implementation=implementation)


reference = functools.partial(branch, implementation="xla")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_values_are_the_reference_s(shape):
    """Sums of up to 256 products in another order: 4e-7 of values near 10 are measured."""
    arrays = draw_branch(shape, "float32")
    assert_near(branch(*arrays), reference(*arrays), absolute=1e-5)


@pytest.mark.parametrize("field", ["bfloat16", "float32"])
def test_products_in_bfloat16_lose_less_than_plain_xla_s(field):
    """Both round the factors of the products; the kernel's steps in between and its GELU add less than XLA's do.

    With a field and vectors in float32, as in mixed precision, only the products are in bfloat16.
    """
    lines, planes, *weights = draw_branch(SMALL, field)
    w = Weights(*weights)
    w = w._replace(**{name: getattr(w, name).astype(jnp.bfloat16) for name in MAPS})
    arrays = (lines, planes, *w)
    exact = reference(*widen(arrays))
    for ours, plain, truth in zip(branch(*arrays), reference(*arrays), exact, strict=True):
        assert ours.dtype == plain.dtype == field
        ours, plain = (np.asarray(y, np.float32) - truth for y in (ours, plain))
        assert 0 < np.square(ours).mean() <= np.square(plain).mean()


def test_gradients_are_the_reference_s():
    arrays = draw_branch(SMALL, "float32")
    gradient = draw_branch(SMALL, "float32", seed=9)[:2]
    expected = value_and_gradient(reference, arrays, gradient)
    for a, b in zip(value_and_gradient(branch, arrays, gradient), expected, strict=True):
        # The GELU's kernels are within 5e-7; sums over 111 rows and 256 channels, in another order.
        np.testing.assert_allclose(a, b, atol=4e-6 * float(jnp.abs(b).max()), rtol=0)


def test_a_parameter_in_the_wrong_place_is_caught():
    lines, planes, *weights = draw_branch(SMALL, "float32")
    results = [np.asarray(y) for y in branch(lines, planes, *weights)]
    w = Weights(*map(np.asarray, weights))
    wrong = {
        "irreps of the norm": w._replace(norm_lines=w.norm_lines[::-1]),
        "bias of the norm": w._replace(norm_bias=0 * w.norm_bias),
        "first bias": w._replace(first_bias=0 * w.first_bias),
        "second bias": w._replace(second_bias=0 * w.second_bias),
        "copies of E, hidden": w._replace(first_planes=np.roll(w.first_planes, SMALL.hidden, axis=1)),
        "copies of E, out": w._replace(second_planes=np.roll(w.second_planes, SMALL.channels, axis=1)),
        "irreps of the second map": w._replace(second_lines=w.second_lines[::-1]),
        "irreps of the layer scale": w._replace(scale_lines=w.scale_lines[::-1]),
        "copies of the layer scale": w._replace(scale_planes=w.scale_planes[::-1]),
    }
    for name, other in wrong.items():
        found = reference(lines, planes, *other)
        assert max(np.abs(a - b).max() for a, b in zip(results, found, strict=True)) > 0.1, name
    found = reference(lines, np.asarray(planes)[::-1], *weights)
    assert np.abs(results[1] - found[1]).max() > 0.1, "rows of E"
    found = reference(lines, planes, *weights, norm=Norm(1e-5, 2.0))
    assert np.abs(results[0] - found[0]).max() > 0.1, "weight of E in the norm"


def test_eight_devices_equal_one():
    arrays = draw_branch(Shape("small", (8,), 5, 8, 128), "float32")
    expected = reference(*arrays)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    batch, whole = (NamedSharding(mesh, p) for p in (PartitionSpec(None, ("data", "fsdp")), PartitionSpec()))
    with jax.set_mesh(mesh):
        assert "shard_map" in str(branch.trace(*arrays).jaxpr)
        shardings = (batch,) * 2 + (whole,) * len(Weights._fields)
        found = jax.jit(branch, in_shardings=shardings)(*arrays)
        assert found[0].sharding.spec == PartitionSpec(None, ("data", "fsdp"))
        assert_near(found, expected, absolute=1e-5)


def test_widths_without_a_kernel():
    """A name insists; under `using` the branch consists of several operations."""
    arrays = draw_branch(Shape("hidden", (2,), 5, 8, 96), "float32")
    with pytest.raises(ValueError, match="octic_mlp: implementation='interpret' has no kernel for float32"):
        jax.eval_shape(branch, *arrays)
    with kernels.using("interpret"):
        traced = jax.jit(functools.partial(branch, implementation="auto")).trace(*arrays)
    assert "octic_linear_gelu" in str(traced.jaxpr) and "name=octic_mlp" not in str(traced.jaxpr)
    assert_near(traced.lower().compile()(*arrays), reference(*arrays), absolute=1e-5)


def test_bad_arguments_are_named():
    lines, planes, *weights = draw_branch(SMALL, "float32")
    w = Weights(*weights)
    with pytest.raises(ValueError, match="octic_mlp: implementation='fast' is not one of 'auto', 'reference', 'xla'"):
        octic_mlp(lines, planes, w, NORM, implementation="fast")
    with pytest.raises(ValueError, match=r"octic_mlp: second_lines \(4, 16, 256\) must be \(4, 256, 16\), for .* C=16"):
        octic_mlp(lines, planes, w._replace(second_lines=w.first_lines), NORM)


def test_the_gelu_for_products_in_bfloat16():
    x = np.linspace(-12, 12, 200_001)
    exact = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    found = SCALE / 2 * np.asarray(double_gelu(jnp.asarray(x / SCALE, jnp.float32), SCALE), np.float64)
    error = np.abs(found - exact) - 2.0**-22 * np.abs(x)  # besides the argument's and the result's rounding
    assert 2e-5 < error.max() < 2.6e-5
