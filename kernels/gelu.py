"""The exact GELU, x (1 + erf(x / sqrt(2))) / 2, whose backward pass recomputes erf from x."""

import math

import jax
import jax.numpy as jnp

from equivit.derivatives import with_pullback
from equivit.kernels.dispatch import stored


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
    """The GELU of an array of any shape, in its dtype."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@exact_gelu.defjvp
def _(primals, tangents):
    return exact_gelu(*primals), jax.jvp(_mirrored, primals, tangents)[1]


def _mirrored(x: jax.Array) -> jax.Array:
    """The same values, bit for bit, as erf is odd; otherwise XLA would store erf for the backward pass."""
    return 0.5 * x * (1 - jax.lax.erf(-x * math.sqrt(0.5)))


def _pullback(arrays, slope):
    """The gradient in the dtype of x: the sum for a bias would otherwise read it in float32, from a second array."""
    (x,) = arrays
    wide = jnp.promote_types(x.dtype, jnp.float32)
    (gradient,) = jax.vjp(_mirrored, x.astype(wide))[1](slope.astype(wide))
    return (stored(gradient.astype(x.dtype)),)


def gelu(x: jax.Array) -> jax.Array:
    """The GELU in at least float32, of an array of any shape, in its dtype; the backward pass stores x alone."""
    return _gelu(x)  # a function, so that models that hold it can be pickled


@with_pullback(_pullback)
def _gelu(x: jax.Array) -> jax.Array:
    with jax.named_scope("activation"):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)
