"""Gathers as products with one-hot matrices, for the matrix units of TPUs."""

import math

import jax
import jax.numpy as jnp

DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16")))


@jax.jit  # traced once for all maps of a shape
def gather(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Rows and columns of each map: [B, H, W, ...] at [B, h] and [B, w] -> [B, h, w, ...].

    It is exact for finite maps: every sum has one term that is not zero, and at the highest precision a product by 1
    keeps all bits of a number.
    """
    (b, height, width, *rest), exact = x.shape, jax.lax.Precision.HIGHEST
    of_rows, of_columns = (
        (places[..., None] % size == jnp.arange(size)).astype(x.dtype)
        for places, size in ((rows, height), (columns, width))
    )
    flat = x.reshape(b, height, width, math.prod(rest))
    picked = jnp.einsum("bih,bhwc->biwc", of_rows, flat, precision=exact)
    picked = jnp.einsum("bjw,biwc->bijc", of_columns, picked, precision=exact)
    return picked.reshape(b, rows.shape[1], columns.shape[1], *rest)
