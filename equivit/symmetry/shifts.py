"""Circular shifts of maps, their polyphase components, and shift-invariant choices among components.

A map [B, H, W, C] lies on a torus.  A stride (sh, sw) splits it into sh sw components, one for each phase (row, column)
of the lattice; the index of a phase is row sw + column.  Each map of a batch has its own shift and choice, shared by
its channels.

Shifting a map must not change the choice, down to the last bit.  The deciding sums are therefore sums of integers,
which do not depend on the order of terms, and exact ties are broken by the content of the map, never by the index.
"""

import functools
import math
import numbers
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.derivatives import linear
from equivit.kernels.gather import gather
from equivit.symmetry.views import first_of_largest, greatest, view_hashes

Stride = int | tuple[int, int]


class Choice(NamedTuple):
    """The choice for each map.

    Attributes:
      index: [B] int32, row-major in the phases of the stride.
      gap: [B] float32, relative gap between the best and the second best; 0 if they are equal.
    """

    index: jax.Array
    gap: jax.Array


def polyphase_down(
    x: jax.Array, stride: Stride, *, order: float = 2, lowpass: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The polyphase component with the largest norm; a shifted map gives the same component, up to a shift.

    Gradients flow through the chosen component only.

    Args:
      x: [B, H, W, C].
      stride: of both axes, or (rows, columns).
      order: of the norm over all entries of a component; `math.inf` takes the largest magnitude.
      lowpass: size of a circular binomial filter before the choice; None: no filter.

    Returns:
      The component [B, H / sh, W / sw, C], and its phase (row, column) [B, 2], int32.

    Raises:
      ValueError: x is not a batch of maps or has no channels, the stride does not divide its size, or an invalid
        option.

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
    if math.isinf(order):  # the maximum of each component, where `choose` would sum
        energy = _lattices(energy, (height, width)).max((1, 3))
    choice = choose(energy, (height, width), view_hashes(content))
    phase = phases(choice.index, (height, width))
    return component(x, phase, (height, width)), phase


def polyphase_up(values: jax.Array, phase: jax.Array, stride: Stride, *, lowpass: int | None = None) -> jax.Array:
    """Put a component back where it was; all other entries are zero.

    Args:
      values: [B, h, w, C].
      phase: the origin (row, column) of each map, [B, 2] integers, modulo the size of the result.
      stride: of both axes, or (rows, columns).
      lowpass: size of a circular binomial filter applied to the result, with a gain of sh sw; 3 at stride 2
        interpolates linearly.

    Returns:
      [B, h sh, w sw, C].

    Raises:
      ValueError: values are not a batch of maps, phase does not match them, or an invalid option.
    """
    height, width = _strides("polyphase_up", stride)
    _check_map("polyphase_up", "values", values)
    is_array = isinstance(phase, jax.Array | np.ndarray)
    if not is_array or phase.shape != (len(values), 2) or not jnp.issubdtype(phase.dtype, jnp.integer):
        raise ValueError(
            f"polyphase_up: phase must be an array of integers [{len(values)}, 2], a row and a column for each map; "
            f"it is {_named(phase)}."
        )
    x = _spread(values, jnp.asarray(phase), (height, width))
    return x if lowpass is None else _smooth("polyphase_up", x, lowpass) * (height * width)


@jax.custom_jvp
def roll(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """Shift each map by its own (down, right), circularly: [B, H, W, ...] by [B, 2].  `-shifts` undoes it.

    Its gradient is the inverse roll; the transpose of a gather would be a scatter.
    """
    rows, columns = (jnp.arange(size) - shifts[:, k, None] for k, size in enumerate(x.shape[1:3]))
    return gather(x, rows, columns)


@roll.defjvp
def _roll_derivative(primals, tangents):
    (x, shifts), (slope, _) = primals, tangents
    shifts = jnp.asarray(shifts, jnp.int32)  # unsigned ones cannot be negated
    return roll(x, shifts), linear(lambda shifts, x: roll(x, shifts), lambda shifts, y: roll(y, -shifts), shifts, slope)


def component(x: jax.Array, phase: jax.Array, stride: Stride) -> jax.Array:
    """The entries at phase, phase + stride, ... of each map: [B, H, W, ...] to [B, H / sh, W / sw, ...].

    The phase [B, 2] may be any position of the map: the component then begins there and wraps around.
    """
    steps = _strides("component", stride)
    _check_divides("component", "x", x, steps)
    return _component(x, phase, steps)


def phases(index: jax.Array, stride: Stride) -> jax.Array:
    """Indices [B] of phases as (row, column) [B, 2]."""
    return jnp.stack(jnp.divmod(index, _strides("phases", stride)[1]), axis=-1)


def energies(x: jax.Array, order: float = 2) -> jax.Array:
    """Each position's contribution to its component's norm to the power `order`: [B, H, W, C] to [B, H, W].

    In at least float32.  With order `math.inf`, the largest magnitude.
    """
    x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    if math.isinf(order):
        return x.max(-1)
    return (x * x if order == 2 else x**order).sum(-1)


def choose(energies: jax.Array, stride: Stride, views: jax.Array) -> Choice:
    """The phase with the largest sum of energies, exactly equivariant to shifts.

    Energies are divided by the largest of their map, rounded to integers of two limbs, and summed in int32.  Ties go to
    the phase that contains the view with the greatest hash.  If hashes tie too, the map is periodic, and the phases
    hold the same component up to a shift.

    This requires energies that are bit-identical wherever the surroundings of two positions are.  Elementwise
    operations, and sums over channels or a few shifted maps, give such energies.  Library convolutions and matrix
    products do not on every processor, because their summation order depends on the position; neither do sums over
    positions.

    A stride of the whole size chooses one position.  There is no gradient.

    Args:
      energies: [B, H, W], none negative.
      stride: of both axes, or (rows, columns).
      views: hashes [B, 2, H', W'] of the content as seen from each position, from `view_hashes`, of these maps or of
        larger maps that the stride divides too.
    """
    stride = _strides("choose", stride)
    _check_divides("choose", "energies", energies, stride)
    high, low, unit = _sums(energies, stride)
    best_high = high.max(1, keepdims=True)
    best_low = jnp.where(high == best_high, low, -1).max(1, keepdims=True)
    tied = (high == best_high) & (low == best_low)
    index = _of_greatest_view(tied, views, stride)
    behind = (best_high - high).astype(jnp.float32) + (best_low - low).astype(jnp.float32) * unit
    others = jnp.where(jnp.arange(high.shape[1]) == index[:, None], jnp.inf, behind).min(1)
    total = best_high[:, 0].astype(jnp.float32) + best_low[:, 0].astype(jnp.float32) * unit
    return Choice(index, _relative(others, total))


def strongest(scores: jax.Array) -> Choice:
    """The largest score of each row [B, n]; ties go to the first; no gradient.

    In a frame chosen by the content (`canonical`), this tie-break depends on content only.
    """
    scores = jax.lax.stop_gradient(scores)
    index = scores.argmax(1).astype(jnp.int32)
    others = jnp.where(jnp.arange(scores.shape[1]) == index[:, None], -jnp.inf, scores).max(1)
    best = scores.max(1)
    return Choice(index, _relative(best - others, best))


def settled(scores: jax.Array, hashes: jax.Array) -> Choice:
    """The largest score of each row [B, n]; scores that differ only by rounding tie, and the greatest hash wins.

    Args:
      hashes: [B, 2, n], from `oriented_hashes`.
    """
    scores = jax.lax.stop_gradient(scores)
    tolerance = 2.0 ** -(jnp.finfo(scores.dtype).nmant - 6)  # relative, 64 units in the last place: 7.6e-6 in float32
    tied = scores >= scores.max(1, keepdims=True) * (1 - tolerance)
    return strongest(scores)._replace(index=greatest(hashes, tied))


def canonical(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Roll each map into a frame chosen by its content: the position of the largest change right and down comes first.

    A map and its shifted copies become the same array, bit for bit.

    Returns:
      The maps [B, H, W, C], and where their first position was: (row, column) [B, 2], int32.
    """
    content = jax.lax.stop_gradient(x)
    index = first_of_largest(jnp.nan_to_num(_changes(content)), content)
    first = phases(index, (x.shape[1], x.shape[2]))
    return roll(x, -first), first


def _changes(x: jax.Array) -> jax.Array:
    """Squared differences of each pixel from its lower and right neighbours: [B, H, W, C] to [B, H, W].

    Channel by channel: a sum over the last axis of an image, which is short, is slow on a CPU.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    planes = (wide[..., k] for k in range(x.shape[-1]))
    pairs = ((jnp.roll(plane, -1, axis) - plane) for plane in planes for axis in (1, 2))
    return functools.reduce(operator.add, map(jnp.square, pairs))


def _sums(energy: jax.Array, stride: tuple[int, int]) -> tuple[jax.Array, jax.Array, float]:
    """Sums over each phase, [B, sh sw], as high + low unit: integers, so the order of terms does not matter.

    All energies of a phase together stay below 2^30 in each limb.  Infinity counts as a very large number.
    """
    energy = jax.lax.stop_gradient(energy)
    energy = energy.astype(jnp.promote_types(energy.dtype, jnp.float32))
    energy = jnp.clip(jnp.nan_to_num(energy), 0, jnp.finfo(energy.dtype).max / 8)  # 1 / largest must not underflow
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
    """The relative gap to the second best; 1 if there is none."""
    gap = jnp.where(behind > 0, jnp.minimum(behind, best) / jnp.where(best > 0, best, 1), 0)
    return jnp.where(jnp.isnan(behind), jnp.nan, gap).astype(jnp.float32)


def _of_greatest_view(phases: jax.Array, views: jax.Array, stride: tuple[int, int]) -> jax.Array:
    """The phase where `phases` [B, sh sw] is true that contains the view with the greatest hash: [B] int32."""
    b, _, height, width = views.shape
    among = phases.reshape(b, 1, stride[0], 1, stride[1])
    among = jnp.broadcast_to(among, (b, height // stride[0], stride[0], width // stride[1], stride[1]))
    row, column = jnp.divmod(greatest(jax.lax.collapse(views, 2), jax.lax.collapse(among, 1)), width)
    return row % stride[0] * stride[1] + column % stride[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _component(x: jax.Array, phase: jax.Array, stride: tuple[int, int]) -> jax.Array:
    rows, columns = (
        phase[:, k, None] + step * jnp.arange(size // step)
        for k, (size, step) in enumerate(zip(x.shape[1:3], stride, strict=True))
    )
    return gather(x, rows, columns)


@_component.defjvp
def _component_derivative(stride, primals, tangents):
    (x, phase), (slope, _) = primals, tangents

    def read(phase, x):
        return _component(x, phase, stride)

    def write(phase, y):
        return _spread(y, phase, stride)

    return _component(x, phase, stride), linear(read, write, phase, slope)


def _spread(values: jax.Array, phase: jax.Array, stride: tuple[int, int]) -> jax.Array:
    """The transpose of `component`, elementwise: [B, h, w, ...] -> [B, h sh, w sw, ...]."""
    (sh, sw), (b, h, w, *rest) = stride, values.shape
    steps = jnp.array(stride, phase.dtype)
    values = jnp.expand_dims(roll(values, phase // steps), (2, 4))
    row, column = ((phase % steps)[:, k, None] == jnp.arange(n) for k, n in enumerate(stride))
    here = row[:, None, :, None, None] & column[:, None, None, None, :]
    x = jnp.where(here.reshape(*here.shape, *(1,) * len(rest)), values, jnp.zeros((), values.dtype))
    return x.reshape(b, h * sh, w * sw, *rest)


def _lattices(x: jax.Array, stride: tuple[int, int]) -> jax.Array:
    """[B, H, W] to [B, H / sh, sh, W / sw, sw]."""
    return x.reshape(len(x), x.shape[1] // stride[0], stride[0], x.shape[2] // stride[1], stride[1])


def _smooth(where: str, x: jax.Array, size: int | None) -> jax.Array:
    """Convolve with binomial coefficients (1, 2, 1 for 3) along both axes; even sizes reach one entry further on."""
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
