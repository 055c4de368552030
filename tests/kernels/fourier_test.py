"""The Fourier transform of stacked arrays: the matrix product that it is, all its derivatives, and their programs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from equivit.kernels.d8_gelu import fourier
from equivit.kernels.pointwise import FOURIER
from tests.drawing import normal

TRANSFORMS = {  # the transform, and the axis of FOURIER that it sums over
    "to_regular": (functools.partial(fourier.to_regular, dtype=jnp.float32), 1),
    "to_isotypic": (fourier.to_isotypic, 0),
}
transforms = pytest.mark.parametrize(("transform", "axis"), TRANSFORMS.values(), ids=TRANSFORMS)
SHAPE = (8, 2, 5, 3)
# The matrix, the array, the result and its cotangent are each rounded to the type; of eight terms, some cancel.
TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-2}


def product(axis, x):
    """The definition, in float32."""
    return jnp.tensordot(FOURIER.astype(np.float32), x.astype(jnp.float32), ((axis,), (0,)), precision="highest")


def derivatives(f, x, dy):
    """The value, a forward derivative and a gradient, for one and for two at once; and a gradient of a gradient."""
    y, pull = jax.vjp(f, x)
    dy = dy.astype(y.dtype)
    several = [jax.vmap(lambda x: jax.jvp(f, (x,), (x / 2,)), i, i)(jnp.stack([x, x / 4], i)) for i in (1, 2, x.ndim)]
    pulled = jax.vmap(pull, 2, 2)(jnp.stack([dy, dy / 2], 2))
    second = jax.grad(lambda x: jnp.square(jax.grad(lambda x: (f(x).astype(jnp.float32) ** 3).sum())(x)).sum())(x)
    return y, jax.jvp(f, (x,), (x / 2,)), pull(dy), several, pulled, second / 256


@pytest.mark.parametrize("dtype", TOLERANCE)
@transforms
def test_values_and_derivatives_are_those_of_a_product(transform, axis, dtype):
    x, dy = (normal(*SHAPE, seed=i).astype(dtype) for i in range(2))
    found = jax.jit(functools.partial(derivatives, transform))(x, dy)
    known = jax.jit(functools.partial(derivatives, functools.partial(product, axis)))(x, dy)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        scale = max(1, float(jnp.abs(b).max()))
        np.testing.assert_allclose(np.float32(a) / scale, np.float32(b) / scale, rtol=0, atol=TOLERANCE[dtype])


@transforms
def test_outside_of_jit_it_is_the_same(transform, axis):
    x, dy = normal(*SHAPE), normal(*SHAPE, seed=1)
    compiled = jax.jit(lambda x: jax.vjp(transform, x)[1](dy))(x)
    chex.assert_trees_all_close(jax.vjp(transform, x)[1](dy), compiled, atol=TOLERANCE["float32"])


def test_types():
    x = normal(*SHAPE).astype(jnp.bfloat16)
    y, pull = jax.vjp(functools.partial(fourier.to_regular, dtype=jnp.float32), x)
    assert y.dtype == jnp.float32 and pull(y)[0].dtype == jnp.bfloat16
    y, pull = jax.vjp(fourier.to_isotypic, x)
    assert y.dtype == pull(y)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@transforms
def test_no_axis_of_a_gradient_moves(transform, axis, platform):
    def transposes(f):
        def gradient(x):
            return jax.grad(lambda x: jnp.square(f(x)).sum())(x)

        x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        return jax.export.export(jax.jit(gradient), platforms=[platform])(x).mlir_module().count("stablehlo.transpose")

    assert transposes(transform) == 0 < transposes(functools.partial(product, axis))


@transforms
def test_within_shard_map_the_gradient_stays_on_its_device(transform, axis):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x, over = normal(8, 4, 5), PartitionSpec(None, "data")

    def gradient(x):
        return jax.grad(lambda x: (transform(x) ** 3).sum())(x)

    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=over, out_specs=over))(x)
    # Products of other sizes may sum in another order.
    np.testing.assert_allclose(found, gradient(x), rtol=1e-5, atol=1e-5)
