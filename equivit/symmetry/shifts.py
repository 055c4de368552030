"""Circular shifts of maps, their polyphase components, and choices among these that do not depend on a shift.

A map [B, H, W, C] lies on a torus: what leaves on one side comes back on the other.  A stride (sh, sw) splits it into
sh sw components, one for each phase (row, column) of the lattice; the index of a phase is row sw + column.  Each map of
a batch is shifted by itself, and what is chosen for it holds for all its channels.

Which phase is best must not change when the map is shifted, to the last bit.  So the sums that decide are sums of
integers, in which the order of the terms plays no part, and what is exactly equal is told apart by the content of the
map, never by its index.
"""

import functools
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group

Stride = int | tuple[int, int]


class Choice(NamedTuple):
    """What was chosen for each map.

    Attributes:
      index: [B] int32, row-major in the phases of the stride.
      gap: [B] float32, how much less the second best has, relative to the best; 0 where they are equal.
    """

    index: jax.Array
    gap: jax.Array


def polyphase_down(
    x: jax.Array, stride: Stride, *, order: float = 2, lowpass: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The polyphase component of the largest norm.  Of a shifted map it is the same one, up to a shift of its own.

    Gradients flow through the chosen component alone.

    Args:
      x: [B, H, W, C].
      stride: of both axes, or (rows, columns).
      order: of the norm over all entries of a component; `math.inf` takes the largest magnitude.
      lowpass: size of a circular binomial filter before the choice; None: no filter.

    Returns:
      The component [B, H / sh, W / sw, C], and its phase (row, column) [B, 2], int32.

    Raises:
      ValueError: x is no batch of maps, or has no channels, the stride does not divide its size, or an option that is
        none.

    Source: adaptive polyphase sampling, "Making Vision Transformers Truly Shift-Equivariant", Eq. 21 to 23.
    """
    height, width = _strides("polyphase_down", stride)
    _check_map("polyphase_down", "x", x)
    _check_divides("polyphase_down", "x", x, (height, width))
    if not x.shape[-1]:
        raise ValueError(f"polyphase_down: x must have a channel, so that a component is largest; it is {_named(x)}.")
    if isinstance(order, bool) or not isinstance(order, numbers.Real) or not order > 0:
        raise ValueError(f"polyphase_down: order={errors.shown(order)} must be a positive number, or math.inf.")
    x = _smooth("polyphase_down", x, lowpass)
    energy, content = energies(x, float(order)), jax.lax.stop_gradient(x)
    if math.isinf(order):  # the largest of a component, where `choose` adds up
        energy = _lattices(energy, (height, width)).max((1, 3))
    choice = choose(energy, (height, width), lambda: cyclic_rank(content))
    phase = phases(choice.index, (height, width))
    return component(x, phase, (height, width)), phase


def polyphase_up(values: jax.Array, phase: jax.Array, stride: Stride, *, lowpass: int | None = None) -> jax.Array:
    """Put a component back where it was; all other entries are zero.

    Args:
      values: [B, h, w, C].
      phase: where each map begins (row, column), [B, 2] integers, modulo the size of the result.
      stride: of both axes, or (rows, columns).
      lowpass: size of a circular binomial filter after it, with a gain of sh sw; 3 at stride 2 interpolates linearly.

    Returns:
      [B, h sh, w sw, C].

    Raises:
      ValueError: values are no batch of maps, phase does not fit them, or an option that is none.
    """
    height, width = _strides("polyphase_up", stride)
    _check_map("polyphase_up", "values", values)
    is_array = isinstance(phase, jax.Array | np.ndarray)
    if not is_array or phase.shape != (len(values), 2) or not jnp.issubdtype(phase.dtype, jnp.integer):
        raise ValueError(
            f"polyphase_up: phase must be an array of integers [{len(values)}, 2], a row and a column for each map; "
            f"it is {_named(phase)}."
        )
    phase = jnp.asarray(phase)
    steps = jnp.array((height, width), phase.dtype)
    b, h, w, c = values.shape
    values = roll(values, phase // steps)[:, :, None, :, None]
    row, column = ((phase % steps)[:, k, None] == jnp.arange(n) for k, n in enumerate((height, width)))
    here = row[:, None, :, None, None, None] & column[:, None, None, None, :, None]
    x = jnp.where(here, values, jnp.zeros((), values.dtype)).reshape(b, h * height, w * width, c)
    return x if lowpass is None else _smooth("polyphase_up", x, lowpass) * (height * width)


def roll(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """Shift each map by its own (down, right), circularly: [B, H, W, ...] by [B, 2].  `-shifts` undoes it."""
    rows, columns = (jnp.arange(size) - shifts[:, k, None] for k, size in enumerate(x.shape[1:3]))
    return _take(x, rows, columns)


def component(x: jax.Array, phase: jax.Array, stride: Stride) -> jax.Array:
    """The entries at phase, phase + stride, ... of each map: [B, H, W, ...] to [B, H / sh, W / sw, ...].

    The phase [B, 2] may be any place of the map: the component then begins there and wraps around.
    """
    steps = _strides("component", stride)
    _check_divides("component", "x", x, steps)
    rows, columns = (
        phase[:, k, None] + step * jnp.arange(size // step)
        for k, (size, step) in enumerate(zip(x.shape[1:3], steps, strict=True))
    )
    return _take(x, rows, columns)


def phases(index: jax.Array, stride: Stride) -> jax.Array:
    """Indices [B] of phases as (row, column) [B, 2]."""
    return jnp.stack(jnp.divmod(index, _strides("phases", stride)[1]), axis=-1)


def energies(x: jax.Array, order: float = 2) -> jax.Array:
    """What each position adds to the norm of its component, to the power of `order`: [B, H, W, C] to [B, H, W].

    In float32 at least.  Of order `math.inf` it is the largest magnitude.
    """
    x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if math.isinf(order):
        return x.max(-1)
    return (x * x if order == 2 else x**order).sum(-1)


def choose(energies: jax.Array, stride: Stride, ties: Callable[[], jax.Array]) -> Choice:
    """The phase whose energies have the largest sum; of a shifted map, the same one, exactly.

    Energies are divided by the largest one of their map, rounded to integers of two limbs, and summed in int32.  Sums
    that are equal are decided by `ties`: the phase wins on which the greatest rank lies.  Where this rank is equal too,
    the map repeats itself, and the phases hold the same component up to a shift.

    That rests on energies that are equal to the last bit wherever the surroundings of two positions are: those of a
    convolution or of sums over channels are, those of a sum over positions are not.

    A stride of the whole size chooses one position.  Nothing here has a gradient.

    Args:
      energies: [B, H, W], none negative.
      stride: of both axes, or (rows, columns).
      ties: returns ranks [B, H, W] of the content as seen from each position, as `cyclic_rank` gives them.  It is
        called in a branch that runs only when some map of the batch has a tie; arrays that it uses, and that have a
        gradient, should pass `jax.lax.stop_gradient` before.
    """
    stride = _strides("choose", stride)
    _check_divides("choose", "energies", energies, stride)
    high, low, unit = _sums(energies, stride)
    best_high = high.max(1, keepdims=True)
    best_low = jnp.where(high == best_high, low, -1).max(1, keepdims=True)
    tied = (high == best_high) & (low == best_low)
    ranks = jax.lax.cond(
        (tied.sum(1) > 1).any(),
        lambda: _lattices(ties(), stride).max((1, 3)).reshape(high.shape).astype(jnp.int32),
        lambda: jnp.zeros_like(high),
    )
    index = jnp.where(tied, ranks, -1).argmax(1).astype(jnp.int32)
    behind = (best_high - high).astype(jnp.float32) + (best_low - low).astype(jnp.float32) * unit
    others = jnp.where(jnp.arange(high.shape[1]) == index[:, None], jnp.inf, behind).min(1)
    total = best_high[:, 0].astype(jnp.float32) + best_low[:, 0].astype(jnp.float32) * unit
    return Choice(index, _relative(others, total))


def strongest(scores: jax.Array) -> Choice:
    """The largest score of each row [B, n], the first one of equals; without gradient.

    In a frame that the content of the map chose (`canonical`), the first of equals is a matter of content too.
    """
    scores = jax.lax.stop_gradient(scores)
    index = scores.argmax(1).astype(jnp.int32)
    others = jnp.where(jnp.arange(scores.shape[1]) == index[:, None], -jnp.inf, scores).max(1)
    best = scores.max(1)
    return Choice(index, _relative(best - others, best))


def settled(scores: jax.Array, ties: Callable[[], jax.Array]) -> Choice:
    """The largest score of each row [B, n]; among those that rounding may have parted, that of the greatest rank.

    Args:
      ties: returns ranks [B, n]; called, in a branch, only when some row has such a tie.
    """
    scores = jax.lax.stop_gradient(scores)
    choice = strongest(scores)
    tolerance = 2.0 ** -(jnp.finfo(scores.dtype).nmant - 6)  # relative, 64 units of the last place: 7.6e-6 in float32
    tied = scores >= scores.max(1, keepdims=True) * (1 - tolerance)
    ranks = jax.lax.cond((tied.sum(1) > 1).any(), ties, lambda: jnp.zeros(scores.shape, jnp.int32))
    return choice._replace(index=jnp.where(tied, ranks, -1).argmax(1).astype(jnp.int32))


def oriented_rank(x: jax.Array, stride: Stride, group: Group) -> jax.Array:
    """The greatest rank among the views of each phase, in any orientation: [B, H, W, C] to [B, sh sw] int32.

    A phase of patches is seen, in each orientation of the map by the group, from the first pixel of each of its
    patches, and all these views are ranked together (`cyclic_rank`).  So a turned, mirrored or shifted map gives its
    phases the same ranks.  Of a map that is not square, only the orientations count that are at least as wide as high.
    """
    (height, width), (b, h, w, _) = _strides("oriented_rank", stride), x.shape
    seen = {g: fields.act_on_image(g, x) for g in group.elements}
    seen = {g: view for g, view in seen.items() if group is not OCTIC or view.shape[1] <= view.shape[2]}
    rank = cyclic_rank(jnp.stack(list(seen.values()), 1))
    best = jnp.zeros((b, height, width), jnp.int32)
    for k, g in enumerate(seen):
        steps = (width, height) if rank.shape[2:4] != (h, w) else (height, width)
        by_phase = _lattices(rank[:, k], steps).max((1, 3))
        best = jnp.maximum(best, fields.act_on_torus(group.inverse(g), by_phase, (1, 2)))
    return best.reshape(b, height * width)


def cyclic_rank(x: jax.Array) -> jax.Array:
    """The rank of each position's view among all views of its map: [B, H, W, C] to [B, H, W] int32.

    The view of a position is the map rolled until that position comes first.  Views are ordered pixel by pixel, in an
    order of no further meaning; they have the same rank if and only if they are equal.  A shifted map has the same
    ranks, shifted.  The views of several maps [B, G, H, W, C] are ranked together, to [B, G, H, W].

    Ranks of pixels become ranks of strips of 2, 4, 8, ... pixels by ranking pairs of neighbouring strips, and strips
    become blocks likewise.  This sorts all positions about log2(H W) times, less often where all views differ soon.
    """
    *shape, c = x.shape
    x = jnp.nan_to_num(x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _is_inexact(x) else x)
    channels = jnp.moveaxis(x, -1, 0).reshape(c, len(x), math.prod(shape[1:]))
    rank = jax.lax.fori_loop(0, c, lambda k, r: _rank_pairs(r, channels[k]), jnp.zeros(channels.shape[1:], jnp.int32))
    for axis in (-1, -2):
        rank = _rank_strips(rank.reshape(shape), axis)
    return rank


def canonical(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Roll each map into a frame of its own: the position comes first where it changes most, to the right and down.

    A map and its shifted copies become the same array, bit for bit.

    Returns:
      The maps [B, H, W, C], and where their first position was: (row, column) [B, 2], int32.
    """
    content = jax.lax.stop_gradient(x)
    size = x.shape[1], x.shape[2]
    first = phases(choose(_changes(content), size, lambda: cyclic_rank(content)).index, size)
    return roll(x, -first), first


def _changes(x: jax.Array) -> jax.Array:
    """Squared differences of each pixel to the next ones below and to the right: [B, H, W, C] to [B, H, W].

    Channel by channel: a sum over the last axis of an image, which is short, is slow on a CPU.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    planes = (wide[..., k] for k in range(x.shape[-1]))
    pairs = ((jnp.roll(plane, -1, axis) - plane) for plane in planes for axis in (1, 2))
    return functools.reduce(operator.add, map(jnp.square, pairs))


def _sums(energy: jax.Array, stride: tuple[int, int]) -> tuple[jax.Array, jax.Array, float]:
    """Sums over each phase, [B, sh sw], as high + low unit: integers, so that the order of the terms plays no part.

    All energies of a phase together stay below 2^30 in each limb.  Infinity counts as a very large number.
    """
    energy = jax.lax.stop_gradient(energy)
    energy = energy.astype(jnp.promote_types(energy.dtype, jnp.float32))
    energy = jnp.clip(jnp.nan_to_num(energy), 0, jnp.finfo(energy.dtype).max / 8)  # 1 / the largest must not vanish
    largest = energy.max((1, 2), keepdims=True)
    energy = _lattices(energy / jnp.where(largest > 0, largest, 1), stride)
    bits = 30 - (energy.shape[1] * energy.shape[3] - 1).bit_length()
    shape = len(energy), stride[0] * stride[1]
    scaled = energy * 2.0**bits
    high = jnp.floor(scaled)
    low = jnp.round((scaled - high) * 2.0**bits)
    high, low = (limb.astype(jnp.int32).sum((1, 3), dtype=jnp.int32).reshape(shape) for limb in (high, low))
    return high + (low >> bits), low & (2**bits - 1), 2.0**-bits


def _relative(behind: jax.Array, best: jax.Array) -> jax.Array:
    """How far the second is behind, relative to the best; 1 where there is no second."""
    gap = jnp.where(behind > 0, jnp.minimum(behind, best) / jnp.where(best > 0, best, 1), 0)
    return jnp.where(jnp.isnan(behind), jnp.nan, gap).astype(jnp.float32)


def _rank_strips(rank: jax.Array, axis: int) -> jax.Array:
    """Ranks of strips as long as an axis [B, ..., H, W], from the ranks of their first positions."""
    shape = rank.shape
    rows = shape[0], math.prod(shape[1:])

    def unfinished(state):
        length, rank = state
        apart = rank.reshape(rows).max(1, initial=0) == rows[1] - 1  # longer strips part them no more
        return (length < shape[axis]) & ~apart.all()

    def double(state):
        length, rank = state
        pairs = _rank_pairs(rank.reshape(rows), jnp.roll(rank, -length, axis).reshape(rows))
        return 2 * length, pairs.reshape(shape)

    return jax.lax.while_loop(unfinished, double, (jnp.int32(1), rank))[1]


def _rank_pairs(first: jax.Array, second: jax.Array) -> jax.Array:
    """Ranks of pairs of entries in each row, [B, N]: 0 for the least; equal ones share theirs, and none is left out."""
    places = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    first, second, places = jax.lax.sort((first, second, places), num_keys=2, is_stable=False)
    new = (first[:, 1:] != first[:, :-1]) | (second[:, 1:] != second[:, :-1])
    rank = jnp.pad(jnp.cumsum(new, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    # Row by row: of a batch on several devices, put_along_axis would bring all rows to each of them.
    put = jax.vmap(lambda row, at: jnp.zeros_like(row).at[at].set(row, mode="promise_in_bounds", unique_indices=True))
    return put(rank, places)


def _lattices(x: jax.Array, stride: tuple[int, int]) -> jax.Array:
    """[B, H, W] to [B, H / sh, sh, W / sw, sw]."""
    return x.reshape(len(x), x.shape[1] // stride[0], stride[0], x.shape[2] // stride[1], stride[1])


def _take(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Rows [B, h] and columns [B, w] of maps, modulo their size.  Whole rows are copied at once."""
    rows, columns = rows % x.shape[1], columns % x.shape[2]
    rows = jnp.expand_dims(rows, range(2, x.ndim))
    columns = jnp.expand_dims(columns, (1, *range(3, x.ndim)))
    x = jnp.take_along_axis(x, rows, 1, mode="promise_in_bounds")
    return jnp.take_along_axis(x, columns, 2, mode="promise_in_bounds")


def _smooth(where: str, x: jax.Array, size: int | None) -> jax.Array:
    """Convolve with binomial coefficients (1, 2, 1 for 3) along both axes; an even size reaches one further on."""
    if size is None:
        return x
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: lowpass={errors.shown(size)} must be a positive integer, a size, or None.")
    weights = [math.comb(size - 1, k) / 2 ** (size - 1) for k in range(size)]
    for axis in (1, 2):
        x = functools.reduce(
            operator.add, (jnp.roll(x, (size - 1) // 2 - k, axis) * weight for k, weight in enumerate(weights))
        )
    return x


def _strides(where: str, stride: Any) -> tuple[int, int]:
    """A stride as (rows, columns)."""
    pair = stride if isinstance(stride, tuple | list) else (stride, stride)
    try:
        steps = tuple(operator.index(step) for step in pair)
    except TypeError:
        steps = ()
    if len(steps) != 2 or min(steps) < 1 or any(isinstance(step, bool) for step in pair):
        raise ValueError(f"{where}: stride={errors.shown(stride)} must be a positive integer, or two: (rows, columns).")
    return steps


def _check_map(where: str, name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim != 4:
        raise ValueError(f"{where}: {name} must be an array of maps [B, H, W, C]; it is {_named(x)}.")


def _check_divides(where: str, name: str, x: jax.Array, stride: tuple[int, int]) -> None:
    for axis, size, step in zip(("height", "width"), x.shape[1:3], stride, strict=True):
        if not size or size % step:
            raise ValueError(
                f"{where}: the {axis} {size} of {name} must be a multiple of the stride {step}; "
                f"{errors.multiples(size, step)}."
            )


def _named(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, jax.Array | np.ndarray) else errors.shown(x)


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
