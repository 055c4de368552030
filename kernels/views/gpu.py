"""Hashes of views in few passes over memory, and their comparison in one, for GPUs."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.views.reference import mixed

JOINED = 16  # strips per step: two steps span 256 pixels
# Odd numbers, for each strip and word.
FACTORS = np.asarray(mixed(np.arange(1, 2 * JOINED + 1, dtype=np.uint32)) | 1).reshape(JOINED, 2)


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
    """Hashes of blocks that wrap around both axes, one from each position: [B, 2, H, W] -> [B, 2, H, W].

    Each step reads and writes the map once, so it joins as many strips as two steps need at 256 pixels.
    """
    for axis in (3, 2):
        size, length = hashes.shape[axis], 1
        while length < size:
            strips = (jnp.roll(hashes, -start, axis) for start in range(0, min(JOINED * length, size), length))
            hashes = mixed(functools.reduce(operator.add, map(operator.mul, strips, FACTORS[:, :, None, None])))
            length *= JOINED
    return hashes
