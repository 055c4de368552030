"""GELU of an octic field: to the eight values on the group, exact GELU, and back, in one pass.

Shapes: one [4, *B, N, C] and two [2, *B, N, 2C] -> the same.  Source: octic ViTs, Section 3.2.3 and Appendix A.
"""

import jax
import jax.numpy as jnp
import numpy as np


def reference(one: jax.Array, two: jax.Array, fourier: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Plain jnp; this defines what is right.

    The transforms are matrix products on one stacked array: written as sums of eight arrays, XLA:CPU fuses the eight
    GELUs into each of the eight outputs and computes them eight times.
    """
    copies = jnp.split(two, 2, axis=-1)
    q = fourier.astype(one.dtype)
    values = jax.nn.gelu(jnp.einsum("ri,i...->r...", q, jnp.concatenate([one, *copies])), approximate=False)
    y = jnp.einsum("ri,r...->i...", q, values)
    return y[:4], jnp.concatenate([y[4:6], y[6:8]], axis=-1)


def d8_gelu(one: jax.Array, two: jax.Array, fourier: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """GELU of an octic field; `fourier` is the group's matrix Q [8, 8], regular = Q isotypic."""
    return reference(one, two, fourier)
