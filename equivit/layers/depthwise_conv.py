"""Depthwise convolution of tokens on a grid: each channel with a kernel of its own, the "taps".

Correlation with stride 1, centred on the token, as in `jax.lax.conv_general_dilated`; the result has the tokens of x.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.derivatives import with_pullback
from equivit.layers.convolution import apart, around
from equivit.layers.grid import Layout
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic

Pair = tuple[int, int]
Grid = Pair | Layout | None  # None, where a block was called without its layout, is refused
PADDINGS = ("zeros", "wrap")
IMPLEMENTATIONS = ("auto", "shift", "lax")
# More products than this in one sum, and the loop that XLA:CPU makes of them is ten times slower per tap.
TAPS_IN_A_SUM = 49


def depthwise_conv(
    x: jax.Array, taps: jax.Array, grid: Grid, *, padding: str = "zeros", implementation: str = "auto"
) -> jax.Array:
    """Convolve tokens channel by channel, in the dtype of x.

    Shapes: x [*B, h w, C], tokens in row-major order, taps [k, k, C] -> [*B, h w, C].

    Args:
      grid: (h, w), or the layout that blocks get.
      padding: "zeros" outside the grid, or "wrap", its other side.
      implementation: "lax" is XLA's convolution, which is also what is exported; "shift" sums products with shifted
        tokens, 30 times faster on a CPU, where XLA has no good kernel; "auto" chooses by platform.

    Raises:
      ValueError: even k, taps of another shape, unknown padding or implementation, tokens that do not fill the grid, or
        a grid smaller than the taps that wrap around it.
    """
    errors.one_of("depthwise_conv: implementation", implementation, IMPLEMENTATIONS)
    _check_shape("depthwise_conv", taps, x.shape[-1])
    check_taps("depthwise_conv", taps.shape[0], padding)
    h, w = filled_grid(grid, x.shape[-2], "depthwise_conv")
    check_wrap((h, w), taps.shape[0], padding, "depthwise_conv")
    with jax.named_scope("depthwise"):
        maps = x.reshape(math.prod(x.shape[:-2]), h, w, x.shape[-1])
        taps = taps.astype(x.dtype)
        whole = implementation == "lax"
        y: Any = _whole(maps, taps, padding) if whole else _convolved(maps, taps, padding, implementation)
        return y.reshape(x.shape)


def isotypic_depthwise_conv(
    field: Isotypic, taps: jax.Array, grid: Grid, *, padding: str = "zeros", implementation: str = "auto"
) -> Isotypic:
    """Convolve a field channel by channel, commuting with the group.

    In the regular representation, the taps for the channel of the element h are moved by h.  A turned image turns the
    tokens and permutes these channels, so each channel meets taps that have turned with it.

    Shapes: a field of h w tokens, taps [k, k, C] with C = width / order -> the same.

    Args:
      padding, implementation: as in `depthwise_conv`; errors too.
    """
    values = jnp.moveaxis(fields.to_regular(field), 0, -2)
    _check_shape("isotypic_depthwise_conv", taps, values.shape[-1])
    moved = [fields.act_on_grid(element, taps, (0, 1)) for element in field.group.regular_order]
    y = depthwise_conv(
        jax.lax.collapse(values, values.ndim - 2),
        jnp.concatenate(moved, axis=-1),
        grid,
        padding=padding,
        implementation=implementation,
    )
    return fields.from_regular(jnp.moveaxis(y.reshape(values.shape), -2, 0))


def _check_shape(name: str, taps: jax.Array, channels: int) -> None:
    """ValueError unless the taps are [k, k, channels]; other shapes would broadcast, or fail without their name."""
    if taps.ndim != 3 or taps.shape != (len(taps), len(taps), channels):
        raise ValueError(f"{name}: taps of shape {taps.shape} must be [k, k, C], with k = 3 here (3, 3, {channels}).")


def check_taps(name: str, kernel_size: int, padding: str) -> None:
    """ValueError for taps without a centre, or an unknown padding."""
    errors.one_of(f"{name}: padding", padding, PADDINGS)
    if type(kernel_size) is not int:
        shown = errors.shown(kernel_size)
        raise ValueError(f"{name}: kernel_size={shown} must be a whole number, odd and positive; take 3.")
    if kernel_size < 1 or kernel_size % 2 == 0:
        near = f"{max(kernel_size - 1, 1)} or {max(kernel_size + 1, 3)}"
        raise ValueError(f"{name}: kernel_size={kernel_size} must be odd and positive, to have a centre; take {near}.")


def check_wrap(grid: Pair, kernel_size: int, padding: str, name: str) -> None:
    """ValueError where taps that wrap around the grid would meet a token twice."""
    if padding == "wrap" and min(grid) < kernel_size:
        raise ValueError(
            f"{name}: padding='wrap' with {kernel_size}x{kernel_size} taps needs a grid at least as large, not "
            f"{grid[0]}x{grid[1]}; take padding='zeros' or larger images."
        )


def filled_grid(grid: Grid, tokens: int, name: str) -> Pair:
    """The (h, w) that the tokens fill; ValueError if they do not."""
    if isinstance(grid, Layout):
        if grid.prefix:
            raise ValueError(
                f"{name}: {grid.prefix} tokens stand before the patches and lie on no grid; leave them out "
                "(depthwise.replacement.patches_only)."
            )
        if not grid.grid:
            raise ValueError(f"{name}: patches were removed, so that those left fill no grid; call without keep=.")
        sides = grid.grid
    else:
        sides = () if grid is None else grid
    rows = max(n for n in range(1, math.isqrt(max(tokens, 1)) + 1) if tokens % n == 0)
    possible = f"such as {(rows, tokens // rows)}"
    if not (isinstance(sides, tuple | list) and len(sides) == 2 and all(map(_is_side, sides))):
        shown = errors.shown(grid)
        raise ValueError(f"{name}: grid={shown} must be (rows, columns) of the tokens, {possible} of {tokens}.")
    h, w = sides
    if h * w != tokens:
        raise ValueError(f"{name}: {tokens} tokens do not fill a {h}x{w} grid, which has {h * w}; give one {possible}.")
    return h, w


def _is_side(size: Any) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) > 0


def _pullback(padding: str, implementation: str, arrays: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, taps = arrays
    with jax.named_scope("depthwise"):
        # The taps are centred, so that the transpose of the convolution is one with the taps turned half round.
        by_x = _convolved(slope, taps[::-1, ::-1], padding, implementation)
        return by_x, _chosen(implementation, _products, _products_whole, x, slope, padding, len(taps))


@with_pullback(_pullback, static=(2, 3))
def _convolved(x: jax.Array, taps: jax.Array, padding: str, implementation: str) -> jax.Array:
    """Maps [n, h, w, C] convolved with [k, k, C]; XLA's own gradient is as slow on a CPU as its convolution."""
    return _chosen(implementation, _by_shifts, _whole, x, taps, padding)


def _chosen(implementation: str, by_shifts: Callable, whole: Callable, x: jax.Array, y: jax.Array, *static) -> Any:
    """by_shifts(x, y, *static), or on other platforms than CPUs whole(x, y, *static)."""

    def given(function):
        return lambda x, y: function(x, y, *static)

    if implementation == "shift":
        return by_shifts(x, y, *static)
    return jax.lax.platform_dependent(x, y, cpu=given(by_shifts), default=given(whole))


def correlate(x: jax.Array, kernel: jax.Array, *, padding: str, groups: int = 1) -> jax.Array:
    """XLA's convolution that keeps the size of maps: x [n, h, w, groups C], kernel [k, k, C, D] -> [n, h, w, D]."""
    p, numbers = kernel.shape[0] // 2, ("NHWC", "HWIO", "NHWC")
    ends = ((p, p), (p, p))
    if padding == "wrap":
        x, ends = jnp.pad(x, ((0, 0), *ends, (0, 0)), mode="wrap"), ((0, 0), (0, 0))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), ends, dimension_numbers=numbers, feature_group_count=groups)


def _whole(x: jax.Array, taps: jax.Array, padding: str) -> jax.Array:
    return correlate(x, taps[:, :, None], padding=padding, groups=taps.shape[-1])


def _by_shifts(x: jax.Array, taps: jax.Array, padding: str) -> jax.Array:
    """A sum of products in one expression is one loop; of many taps, a few such loops that write partial sums."""
    wide, taps = jnp.promote_types(x.dtype, jnp.float32), apart(taps)
    products = [view * tap for view, tap in zip(_views(x, taps.shape[0], padding, wide), _flat(taps), strict=True)]
    groups = [products[i : i + TAPS_IN_A_SUM] for i in range(0, len(products), TAPS_IN_A_SUM)]
    sums = [functools.reduce(operator.add, group) for group in groups]
    if len(sums) == 1:
        return sums[0].astype(x.dtype)
    partial = jnp.zeros((len(sums), *x.shape), wide)
    for i, part in enumerate(sums):  # a plain sum, or an optimization barrier, would be fused into one loop again
        partial = jax.lax.dynamic_update_index_in_dim(partial, part, i, 0)
    return partial.sum(0).astype(x.dtype)


def _products(x: jax.Array, slope: jax.Array, padding: str, kernel_size: int) -> jax.Array:
    """The gradient by the taps, [k, k, C]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    sums = [(view * slope).sum((0, 1, 2)) for view in _views(x, kernel_size, padding, wide)]
    return jnp.stack(sums).reshape(kernel_size, kernel_size, -1).astype(x.dtype)


def _products_whole(x: jax.Array, slope: jax.Array, padding: str, kernel_size: int) -> jax.Array:
    taps = jax.ShapeDtypeStruct((kernel_size, kernel_size, x.shape[-1]), x.dtype)
    return jax.linear_transpose(lambda taps: _whole(x, taps, padding), taps)(slope)[0]


def _views(x: jax.Array, kernel_size: int, padding: str, dtype: Any) -> list[jax.Array]:
    """The views under the taps, row by row: k k of [n, h, w, C]."""
    p, (_, h, w, _) = kernel_size // 2, x.shape
    ends = ((p, p), (p, p))
    x = around(x, ends) if padding == "wrap" else jnp.pad(x, ((0, 0), *ends, (0, 0)))
    x = x.astype(dtype)
    return [x[:, r : r + h, s : s + w] for r in range(kernel_size) for s in range(kernel_size)]


def _flat(taps: jax.Array) -> list[jax.Array]:
    return [tap for row in taps for tap in row]
