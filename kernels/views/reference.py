"""Hashes of views by few additions, and their comparison word by word."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Odd numbers, a row for each word.  Their sums and differences have few factors of two, so strips of two kinds of
# pixels differ too.
FACTORS = np.array(
    [[0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], [0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09]], np.uint32
)
JOINED = FACTORS.shape[1]  # strips per step; with 2 it takes twice the time


@jax.jit  # traced once for all maps of a shape
def greatest_view(energies: jax.Array, pixels: jax.Array) -> jax.Array:
    """The position [B] of the largest energy with the greatest hash of its view."""
    energies = jax.lax.collapse(energies, 1)
    return greatest(jax.lax.collapse(blocks(pixels), 2), energies == energies.max(1, keepdims=True))


def greatest(hashes: jax.Array, among: jax.Array) -> jax.Array:
    """The index of the greatest hash where `among` [B, n] is true; ties go to the first: [B, 2, n] -> [B]."""
    for word in (0, 1):
        words = hashes[:, word]
        among = among & (words == jnp.where(among, words, 0).max(1, keepdims=True))
    return among.argmax(1).astype(jnp.int32)


def blocks(hashes: jax.Array) -> jax.Array:
    """Hashes of blocks that wrap around both axes, one from each position: [B, 2, H, W] -> [B, 2, H, W]."""
    for axis in (3, 2):
        size, length = hashes.shape[axis], 1
        while length < size:
            length *= JOINED
        # Repeat the map beyond its end, so the next strip is a slice instead of a roll.
        around = jnp.concatenate([hashes] * -(-(size + length - 1) // size), axis)
        hashes = jax.lax.slice_in_dim(around, 0, size + length - 1, axis=axis)
        step = 1
        while step < length:
            rest = hashes.shape[axis] - (JOINED - 1) * step
            parts = (jax.lax.slice_in_dim(hashes, j * step, j * step + rest, axis=axis) for j in range(JOINED))
            hashes = mixed(functools.reduce(operator.add, map(operator.mul, parts, FACTORS.T[:, :, None, None])))
            step *= JOINED
    return hashes


def mixed(words: Any) -> Any:
    """A permutation of 32-bit words that makes each bit depend on all bits."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> 15)
