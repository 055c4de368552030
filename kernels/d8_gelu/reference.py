"""GELU of an octic field in plain jnp: the definition."""

import jax
import jax.numpy as jnp

from kernels.gelu import exact_gelu
from kernels.pointwise import FOURIER


def d8_gelu(lines: jax.Array, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The GELU of the field's values on the group.  Sums and the GELU are in at least float32.

    The transforms are matrix products on one stacked array: with sums of eight arrays, XLA:CPU fuses the eight GELUs
    into each of the eight outputs and computes them eight times.
    """
    components = jnp.concatenate([lines, *jnp.split(planes, 2, axis=-1)])
    matrix, wide = FOURIER.astype(lines.dtype), jnp.promote_types(lines.dtype, jnp.float32)
    values = jnp.einsum("ri,i...->r...", matrix, components, preferred_element_type=wide)
    y = exact_gelu(values).astype(lines.dtype)
    y = jnp.einsum("ri,r...->i...", matrix, y, preferred_element_type=wide).astype(lines.dtype)
    y_lines, *copies = jnp.split(y, [4, 6])
    return y_lines, jnp.concatenate(copies, axis=-1)
