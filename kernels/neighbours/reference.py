"""Neighbouring blocks are the blocks of a rolled map: the definition."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pair = tuple[int, int]


class Neighbour(NamedTuple):
    """A block beside another, and the part of it that counts.

    Attributes:
      lag: its distance in blocks, (down, right); down is not negative.
      rows, columns: (start, stop) of the part, in pixels of the block.
    """

    lag: Pair
    rows: Pair
    columns: Pair


def neighbour_products(x: jax.Array, stride: Pair, which: Sequence[Neighbour]) -> jax.Array:
    """Products of a block's entries with its neighbours' and with 1: [B, H, W, C] -> [B, entries, others + 1].

    All share one matrix product: one wide product is faster than many narrow ones.  Positions come last, so neighbours
    are joined by copies of whole maps.
    """
    (b, h, w, channels), (sh, sw) = x.shape, stride
    planes = x.reshape(b, h // sh, sh, w // sw, sw, channels).transpose(0, 2, 4, 5, 1, 3)
    beside = (jnp.roll(planes[:, slice(*rows), slice(*columns)], (-i, -j), (4, 5)) for (i, j), rows, columns in which)
    own, *beside = (jax.lax.collapse(jax.lax.collapse(a, 4), 1, 4) for a in (planes, *beside))
    return products(own, beside)


def products(own: jax.Array, beside: Sequence[jax.Array]) -> jax.Array:
    """Products of entries with all others and with 1, summed over positions: [B, entries, n] and more of them."""
    joined = jnp.concatenate([*beside, jnp.ones_like(own[:, :1])], 1)
    # Two phases often differ by less than TF32 or bfloat16 resolves.
    return jnp.einsum("bin,bjn->bij", own, joined, precision=jax.lax.Precision.HIGHEST)
