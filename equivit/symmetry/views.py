"""Hashes of a map as seen from each of its positions, to compare views without sorting.

The view of a position is its map, a torus, rolled until that position comes first.  Its hash has 64 bits, in two words:
equal views have equal hashes, and different views collide with a probability of about 2^-64.  A shifted map has the
same hashes, shifted.  All arithmetic is on integers, so neither the order of terms nor the device matters, and no step
depends on the content.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from equivit.kernels.views import greatest_view
from equivit.kernels.views.reference import FACTORS, blocks, greatest, mixed
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group

__all__ = ["first_of_largest", "greatest", "oriented_hashes", "view_hashes"]


def view_hashes(x: jax.Array) -> jax.Array:
    """The hash of each position's view: [B, H, W, C] -> [B, 2, H, W] uint32.

    NaN counts as 0, as -0 does.
    """
    return blocks(_pixels(x))


def first_of_largest(energies: jax.Array, x: jax.Array) -> jax.Array:
    """The position of the largest energy [B, H, W]; among equals, of the greatest view of x [B, H, W, C]: [B]."""
    return greatest_view(energies, _pixels(x))


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
    hashes = jax.lax.map(blocks, jnp.stack(list(seen.values())))  # all at once would exceed the cache
    steps = (sh, sw) if hashes.shape[3:] == (height, width) else (sw, sh)
    h, w = (size // step for size, step in zip(hashes.shape[3:], steps, strict=True))
    by_view = hashes.reshape(len(seen), b, 2, h, steps[0], w, steps[1]).sum((3, 5), dtype=jnp.uint32)
    back = (fields.act_on_torus(group.inverse(g), sums, (2, 3)) for g, sums in zip(seen, by_view, strict=True))
    return functools.reduce(operator.add, back)


def _pixels(x: jax.Array) -> jax.Array:
    """The hash of each pixel over its channels: [B, H, W, C] -> [B, 2, H, W]."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.nan_to_num(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        x = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    x = jax.lax.collapse(x.astype(jnp.uint32), 3)  # a channel of float64 has two words
    places = jnp.arange(1, x.shape[-1] + 1, dtype=jnp.uint32)
    words = [mixed(x * factor + places * other).sum(-1, dtype=jnp.uint32) for factor, other in FACTORS[:, :2]]
    return mixed(jnp.stack(words, 1))
