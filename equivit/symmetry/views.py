"""Hashes of a map as seen from each of its positions, to compare views without sorting.

The view of a position is its map, a torus, rolled until that position comes first.  Its hash has 64 bits, in two words:
equal views have equal hashes, and different views collide with a probability of about 2^-64.  A shifted map has the
same hashes, shifted.  All arithmetic is on integers, so neither the order of terms nor the device matters, and no step
depends on the content.

Hashes of pixels are combined to hashes of strips of 4, 16, 64, ... pixels, each from four neighbouring strips, until a
strip spans the axis; strips are combined to blocks likewise.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group

# Odd numbers, a row for each word.  Their sums and differences have few factors of two, so strips of two kinds of
# pixels differ too.
FACTORS = np.array(
    [[0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], [0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09]], np.uint32
)
JOINED = FACTORS.shape[1]  # strips per step; with 2 it takes twice the time


def view_hashes(x: jax.Array) -> jax.Array:
    """The hash of each position's view: [B, H, W, C] -> [B, 2, H, W] uint32.

    NaN counts as 0, as -0 does.
    """
    return _blocks(_pixels(x))


def oriented_hashes(x: jax.Array, stride: tuple[int, int], group: Group) -> jax.Array:
    """An orientation-independent hash of each phase of patches: [B, H, W, C] -> [B, 2, sh, sw] uint32.

    The hash combines the views from the first pixel of each patch, in each orientation of the map under the group.
    Phases with the same set of views have the same hash.  Hashes are thus equivariant to rotations, mirrors and shifts.

    Args:
      stride: (rows, columns) of the patches.
    """
    pixels, (b, height, width, _), (sh, sw) = _pixels(x), x.shape, stride
    seen = {g: fields.act_on_grid(g, pixels, (2, 3)) for g in group.elements}
    # Only views of one shape are comparable: for non-square maps, take the wide ones.
    seen = {g: view for g, view in seen.items() if group is not OCTIC or view.shape[2] <= view.shape[3]}
    hashes = jax.lax.map(_blocks, jnp.stack(list(seen.values())))  # all at once would exceed the cache
    steps = (sh, sw) if hashes.shape[3:] == (height, width) else (sw, sh)
    h, w = (size // step for size, step in zip(hashes.shape[3:], steps, strict=True))
    by_view = hashes.reshape(len(seen), b, 2, h, steps[0], w, steps[1]).sum((3, 5), dtype=jnp.uint32)
    back = (fields.act_on_torus(group.inverse(g), sums, (2, 3)) for g, sums in zip(seen, by_view, strict=True))
    return functools.reduce(operator.add, back)


def greatest(hashes: jax.Array, among: jax.Array) -> jax.Array:
    """The index of the greatest hash where `among` [B, n] is true; ties go to the first: [B, 2, n] -> [B]."""
    for word in (0, 1):
        words = hashes[:, word]
        among = among & (words == jnp.where(among, words, 0).max(1, keepdims=True))
    return among.argmax(1).astype(jnp.int32)


def _pixels(x: jax.Array) -> jax.Array:
    """The hash of each pixel over its channels: [B, H, W, C] -> [B, 2, H, W]."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.nan_to_num(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        x = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    x = jax.lax.collapse(x.astype(jnp.uint32), 3)  # a channel of float64 has two words
    places = jnp.arange(1, x.shape[-1] + 1, dtype=jnp.uint32)
    words = [_mixed(x * factor + places * other).sum(-1, dtype=jnp.uint32) for factor, other in FACTORS[:, :2]]
    return _mixed(jnp.stack(words, 1))


def _blocks(hashes: jax.Array) -> jax.Array:
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
            hashes = _mixed(functools.reduce(operator.add, map(operator.mul, parts, FACTORS.T[:, :, None, None])))
            step *= JOINED
    return hashes


def _mixed(words: jax.Array) -> jax.Array:
    """A permutation of 32-bit words that makes each bit depend on all bits."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return words ^ (words >> 15)
