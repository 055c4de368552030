"""Random octic fields, and how far two results may lie apart."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.tpu import blocks
from experiments.benchmarks.field_shapes import AWKWARD, REALISTIC, Shape

# Blocks with an eighth of the memory (`shrink_memory`): several in both types, the last one not full.
RAGGED = Shape("ragged blocks", (1,), 262, 8, 136)
# Shapes for the TPU kernels by tiles, each with a type.  How axes are merged does not depend on the type; what a block
# or a tile holds does.  Last, an image of ViT-B, two blocks in float32, and of ViT-S, with a tile half full.
_NO_BATCH, _TWO_AXES, _ONE_TOKEN, SMALL, _ROW_MORE, _ = AWKWARD
SHAPES = [(_NO_BATCH, "float32"), (_TWO_AXES, "bfloat16"), (_ONE_TOKEN, "float32")]
SHAPES += [(shape, dtype) for shape in (SMALL, _ROW_MORE, RAGGED) for dtype in ("float32", "bfloat16")]
SHAPES += [(dataclasses.replace(REALISTIC[i], batch=(1,)), dtype) for i, dtype in ((1, "float32"), (0, "bfloat16"))]

# Float32: the kernels' GELU is within 5e-7 of the exact one, the transform back sums eight values weighted 0.35, and
# values near 10 are rounded in steps of 1e-6.  Measured: 2e-6.
ABSOLUTE = 5e-6
# Of half a step of the type, by which the result is rounded.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def shrink_memory(shape, monkeypatch):
    """Leave the kernels an eighth of the memory if the shape is RAGGED."""
    if shape == RAGGED:
        monkeypatch.setattr(blocks, "VMEM_BYTES", blocks.VMEM_BYTES // 8)


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


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(op, arrays, cotangents):
    """Results and gradients of all arguments, one after the other, from one compiled program."""
    results, pullback = jax.vjp(op, *arrays)
    return (*results, *pullback(cotangents))


def assert_near(actual, expected, absolute=ABSOLUTE):
    """Equal up to `absolute` and to one rounding to the type of the result."""
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        rounding = ROUNDING[a.dtype.name]
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rounding, atol=absolute)
