"""GELU of an octic field in plain jnp: the definition."""

import jax
import jax.numpy as jnp

from equivit.kernels.d8_gelu import fourier
from equivit.kernels.gelu import exact_gelu


def d8_gelu(lines: jax.Array, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The GELU of the field's values on the group.  Sums and the GELU are in at least float32.

    The transforms are matrix products on one stacked array: with sums of eight arrays, XLA:CPU fuses the eight GELUs
    into each of the eight outputs and computes them eight times.
    """
    components = jnp.concatenate([lines, *jnp.split(planes, 2, axis=-1)])
    values = fourier.to_regular(components, jnp.promote_types(lines.dtype, jnp.float32))
    y = fourier.to_isotypic(exact_gelu(values).astype(lines.dtype))
    y_lines, *copies = jnp.split(y, [4, 6])
    return y_lines, jnp.concatenate(copies, axis=-1)
