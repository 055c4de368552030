"""Random octic fields, and how far two results may lie apart."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.field_shapes import Shape

# Float32: the kernels' GELU is within 5e-7 of the exact one, the transform back sums eight values weighted 0.35, and
# values near 10 are rounded in steps of 1e-6.  Measured: 2e-6.
ABSOLUTE = 5e-6
# Of half a step of the type, by which the result is rounded.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def draw(shapes, dtype, seed=0, scale=2.0):
    """Normal arrays; at scale 2 a GELU is tried from its flat to its straight end."""
    generator = np.random.default_rng(seed)
    return tuple(_put(scale * generator.standard_normal(shape), dtype) for shape in shapes)


def draw_arguments(shape: Shape, dtype, seed=0):
    """Arguments of `octic_linear_gelu` whose hidden field has deviation 2, and a bias that matters."""
    field = draw(shape.field(shape.channels), dtype, seed)
    deviations = (shape.channels**-0.5, (2 * shape.channels) ** -0.5, 1.0)
    weights = draw(shape.weights(), "float32", seed + 1, 1.0)
    return (*field, *(_put(np.asarray(w) * d, dtype) for w, d in zip(weights, deviations, strict=True)))


def draw_branch(shape: Shape, dtype, seed=0):
    """Arguments of `octic_mlp`: fields and hidden fields of deviation 2 or so, and a branch as large as its input."""
    c, f = shape.channels, shape.hidden
    deviations = (1, 1, 1, c**-0.5, (2 * c) ** -0.5, 1, f**-0.5, (2 * f) ** -0.5, 1, 1, 1)
    weights = draw(shape.mlp_branch(), "float32", seed + 1, 1.0)
    weights = [_put(np.asarray(w) * d, dtype) for w, d in zip(weights, deviations, strict=True)]
    return (*draw(shape.field(c), dtype, seed), *weights)


def widen(arrays):
    """The same values in float32, in which the reference has no rounding to speak of."""
    return tuple(_put(np.asarray(a), "float32") for a in arrays)


def _put(array, dtype):
    """Cast by numpy: JAX would compile a program for each shape."""
    return jax.device_put(array.astype(jnp.dtype(dtype)))


def value_and_gradient(op, arrays, cotangents):
    """Results and gradients of all arguments, one after the other, from one compiled program."""

    def both(arrays, cotangents):
        results, pullback = jax.vjp(op, *arrays)
        return (*results, *pullback(cotangents))

    return jax.jit(both)(arrays, cotangents)


def assert_near(actual, expected, absolute=ABSOLUTE):
    """Equal up to `absolute` and to one rounding to the type of the result."""
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        rounding = ROUNDING[a.dtype.name]
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rounding, atol=absolute)
