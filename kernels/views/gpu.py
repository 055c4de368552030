"""Hashes of views with each step over a whole map, and their comparison in one pass, for GPUs."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.views.reference import FACTORS, JOINED, mixed


@jax.jit  # traced once for all maps of a shape
def greatest_view(energies: jax.Array, pixels: jax.Array) -> jax.Array:
    """The position [B] of the largest energy with the greatest hash of its view."""
    hashes = jax.lax.collapse(_blocks(pixels), 2)
    energies = jax.lax.collapse(energies, 1)
    places = jax.lax.broadcasted_iota(jnp.int32, energies.shape, 1)
    keys = (energies, hashes[:, 0], hashes[:, 1], places)
    least = (jnp.array(-1, energies.dtype), np.uint32(0), np.uint32(0), np.int32(0))
    return jax.lax.reduce(keys, least, _greater, (1,))[3]


def _greater(one, other):
    """The greater of two tuples of keys, compared in order; of equals the one with the first place, the last key."""
    above = one[3] <= other[3]
    for a, b in zip(one[2::-1], other[2::-1], strict=True):
        above = (a > b) | (a == b) & above
    return tuple(jnp.where(above, a, b) for a, b in zip(one, other, strict=True))


def _blocks(hashes: jax.Array) -> jax.Array:
    """The hashes of `reference.blocks`, [B, 2, H, W] -> [B, 2, H, W].

    Each step rolls the map instead of reading a copy that repeats beyond its end.  Instructions, not bytes, seem to
    bound it on an H200, and 16 strips in half as many steps would take more of them.
    """
    for axis in (3, 2):
        size, length = hashes.shape[axis], 1
        while length < size:
            strips = (jnp.roll(hashes, -j * length, axis) for j in range(JOINED))
            hashes = mixed(functools.reduce(operator.add, map(operator.mul, strips, FACTORS.T[:, :, None, None])))
            length *= JOINED
    return hashes
