"""Depthwise convolution of tokens on a grid; the "taps" are the kernel, one for each channel.

It is a correlation with stride 1, centred on the token, as in `jax.lax.conv_general_dilated`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.kernels.convolution import convolve
from equivit.layers.grid import Layout
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic

Pair = tuple[int, int]
Grid = Pair | Layout | None  # None (a block called without its layout) raises
MODES = {"zeros": "zeros", "wrap": "circular"}  # padding -> mode of a convolution


def depthwise_conv(x: jax.Array, taps: jax.Array, grid: Grid, *, padding: str = "zeros") -> jax.Array:
    """Convolve tokens channel by channel, in the dtype of x.

    Shapes: x [*B, h w, C], tokens in row-major order, taps [k, k, C] -> [*B, h w, C].

    Args:
      grid: (h, w), or the layout that blocks get.
      padding: "zeros", or "wrap" around the torus.

    Raises:
      ValueError: even k, taps of another shape, unknown padding, tokens that do not fill the grid, or a grid smaller
        than taps that wrap.
    """
    _check_shape("depthwise_conv", taps, x.shape[-1])
    check_taps("depthwise_conv", taps.shape[0], padding)
    h, w = filled_grid(grid, x.shape[-2], "depthwise_conv")
    check_wrap((h, w), taps.shape[0], padding, "depthwise_conv")
    with jax.named_scope("depthwise"):
        maps, p = x.reshape(*x.shape[:-2], h, w, x.shape[-1]), taps.shape[0] // 2
        kernel, pads = taps.astype(x.dtype)[:, :, None], ((p, p), (p, p))
        y = convolve(maps, kernel, pads=pads, mode=MODES[padding], groups=x.shape[-1])
        return y.reshape(x.shape)


def isotypic_depthwise_conv(
    field: Isotypic, taps: jax.Array, grid: Grid, *, bias: jax.Array | None = None, padding: str = "zeros"
) -> Isotypic:
    """Convolve a field channel by channel, commuting with the group.

    In the regular representation, the taps for the channel of element h are transformed by h.  Rotating the image
    rotates the tokens and permutes these channels, so each channel meets taps rotated with it.

    Shapes: a field of h w tokens, taps [k, k, C] with C = width / order -> the same.

    Args:
      bias: [C], added to the values on every group element.
      padding: as in `depthwise_conv`, like the errors.
    """
    values = jnp.moveaxis(fields.to_regular(field), 0, -2)
    _check_shape("isotypic_depthwise_conv", taps, values.shape[-1])
    moved = [fields.act_on_grid(element, taps, (0, 1)) for element in field.group.regular_order]
    regular = jax.lax.collapse(values, values.ndim - 2)
    y = depthwise_conv(regular, jnp.concatenate(moved, axis=-1), grid, padding=padding)
    y = y.reshape(values.shape)
    return fields.from_regular(jnp.moveaxis(y if bias is None else y + bias.astype(y.dtype), -2, 0))


def _check_shape(name: str, taps: jax.Array, channels: int) -> None:
    """Raise ValueError unless the taps are [k, k, channels]; other shapes would broadcast or fail obscurely."""
    if taps.ndim != 3 or taps.shape != (len(taps), len(taps), channels):
        raise ValueError(f"{name}: taps of shape {taps.shape} must be [k, k, C], with k = 3 here (3, 3, {channels}).")


def check_taps(name: str, kernel_size: int, padding: str) -> None:
    """Raise ValueError for taps without a centre, or an unknown padding."""
    errors.one_of(f"{name}: padding", padding, MODES)
    if type(kernel_size) is not int:
        shown = errors.shown(kernel_size)
        raise ValueError(f"{name}: kernel_size={shown} must be a whole number, odd and positive; take 3.")
    if kernel_size < 1 or kernel_size % 2 == 0:
        near = f"{max(kernel_size - 1, 1)} or {max(kernel_size + 1, 3)}"
        raise ValueError(f"{name}: kernel_size={kernel_size} must be odd and positive, to have a centre; take {near}.")


def check_wrap(grid: Pair, kernel_size: int, padding: str, name: str) -> None:
    """Raise ValueError if wrapped taps would read a token twice."""
    if padding == "wrap" and min(grid) < kernel_size:
        raise ValueError(
            f"{name}: padding='wrap' with {kernel_size}x{kernel_size} taps needs a grid at least as large, not "
            f"{grid[0]}x{grid[1]}; take padding='zeros' or larger images."
        )


def filled_grid(grid: Grid, tokens: int, name: str) -> Pair:
    """The grid (h, w) that the tokens fill; ValueError if they do not fill it."""
    if isinstance(grid, Layout):
        if grid.prefix:
            raise ValueError(
                f"{name}: {grid.prefix} tokens before the patches are not on the grid; remove them "
                "(depthwise.replacement.patches_only)."
            )
        if not grid.grid:
            raise ValueError(f"{name}: patches were removed, so the others do not fill a grid; call without keep=.")
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
