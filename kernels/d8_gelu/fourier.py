"""The Fourier transform of the group along the first axis of stacked arrays [8, ...], by one matrix product.

JAX transposes a product to one with the axes in another order, for which XLA:CPU copies the whole array.  So the
transpose is given: the inverse transform, with the axes in place.  In bfloat16 that saves a fifth of a training step of
D8(ViT-S).
"""

import functools

import jax
import jax.numpy as jnp

from equivit.derivatives import linear
from equivit.kernels.pointwise import FOURIER

# Axes of the matrix, [value, component], and of the array.
AXES = {"regular": "ri,i...->r...", "isotypic": "ri,r...->i..."}
INVERSE = {"regular": "isotypic", "isotypic": "regular"}


def to_regular(components: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Eight components to the eight values on the group; the matrix has their dtype, the result `dtype`."""
    return _transformed("regular", components.dtype, jnp.dtype(dtype), components)


def to_isotypic(values: jax.Array) -> jax.Array:
    """Eight values on the group to their components, in the same dtype."""
    return _transformed("isotypic", values.dtype, values.dtype, values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _transformed(to, matrix, dtype, x):
    wide = jnp.promote_types(x.dtype, dtype)
    return jnp.einsum(AXES[to], FOURIER.astype(matrix), x, preferred_element_type=wide).astype(dtype)


@_transformed.defjvp
def _(to, matrix, dtype, primals, tangents):
    (x,), (slope,) = primals, tangents
    before = x.dtype

    def along(_, slope):
        return _transformed(to, matrix, dtype, slope)

    def back(_, slope):
        return _transformed(INVERSE[to], matrix, before, slope)

    return _transformed(to, matrix, dtype, x), linear(along, back, (), slope)
