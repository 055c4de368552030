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

from equivit import errors
from equivit.layers.convolution import around
from equivit.layers.grid import Layout
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic

Pair = tuple[int, int]
PADDINGS = ("zeros", "wrap")
IMPLEMENTATIONS = ("auto", "shift", "lax")
# More products than this in one sum, and the loop that XLA:CPU makes of them is ten times slower per tap.
TAPS_IN_A_SUM = 49


def depthwise_conv(
    x: jax.Array, taps: jax.Array, grid: Pair | Layout, *, padding: str = "zeros", implementation: str = "auto"
) -> jax.Array:
    """The tokens convolved channel by channel, in the dtype of x.

    Shapes: x [*B, h w, C], tokens in row-major order, taps [k, k, C] -> [*B, h w, C].

    Args:
      grid: (h, w), or the layout that blocks get.
      padding: what lies outside of the grid: "zeros", or "wrap", its other side.
      implementation: "lax" is XLA's convolution, which is also what is exported; "shift" sums products with shifted
        tokens, 30 times faster on a CPU, where XLA has no good kernel; "auto" chooses by platform.

    Raises:
      ValueError: even k, unknown padding or implementation, tokens that do not fill the grid, or a grid smaller than
        the taps that wrap around it.
    """
    errors.one_of("depthwise_conv: implementation", implementation, IMPLEMENTATIONS)
    check_taps("depthwise_conv", taps.shape[0], padding)
    h, w = filled_grid(grid, x.shape[-2], "depthwise_conv")
    check_wrap((h, w), taps.shape[0], padding, "depthwise_conv")
    with jax.named_scope("depthwise"):
        maps = x.reshape(math.prod(x.shape[:-2]), h, w, x.shape[-1])
        taps = taps.astype(x.dtype)
        if implementation == "lax":
            return _whole(maps, taps, padding=padding).reshape(x.shape)
        return _convolved(maps, taps, padding, implementation).reshape(x.shape)


def isotypic_depthwise_conv(
    field: Isotypic, taps: jax.Array, grid: Pair | Layout, *, padding: str = "zeros", implementation: str = "auto"
) -> Isotypic:
    """The depthwise convolution of a field that commutes with the group.

    In the regular representation the channel of the element h is convolved with the taps moved by h: a turned image
    turns the tokens and permutes these channels, so each meets the taps that have turned with it.

    Shapes: a field of h w tokens, taps [k, k, C] with C = width / order -> the same.

    Args:
      padding, implementation: as in `depthwise_conv`, which this raises the errors of.
    """
    values = jnp.moveaxis(fields.to_regular(field), 0, -2)
    moved = [fields.act_on_grid(element, taps, (0, 1)) for element in field.group.regular_order]
    y = depthwise_conv(
        jax.lax.collapse(values, values.ndim - 2),
        jnp.concatenate(moved, axis=-1),
        grid,
        padding=padding,
        implementation=implementation,
    )
    return fields.from_regular(jnp.moveaxis(y.reshape(values.shape), -2, 0))


def check_taps(name: str, kernel_size: int, padding: str) -> None:
    """ValueError for taps without a centre, or an unknown padding."""
    errors.one_of(f"{name}: padding", padding, PADDINGS)
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


def filled_grid(grid: Pair | Layout | None, tokens: int, name: str) -> Pair:
    """The (h, w) that the tokens fill; ValueError if they do not."""
    if isinstance(grid, Layout):
        if grid.prefix:
            raise ValueError(
                f"{name}: {grid.prefix} tokens stand before the patches and lie on no grid; leave them out "
                "(models.replacement.patches_only)."
            )
        if not grid.grid:
            raise ValueError(f"{name}: patches were removed, so that those left fill no grid; call without keep=.")
        grid = grid.grid
    if grid is None or len(grid) != 2:
        raise ValueError(f"{name}: {grid=} must be (rows, columns) of the tokens.")
    h, w = grid
    if h * w != tokens:
        raise ValueError(f"{name}: {tokens} tokens do not fill a {h}x{w} grid, which has {h * w}.")
    return h, w


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolved(x: jax.Array, taps: jax.Array, padding: str, implementation: str) -> jax.Array:
    """Maps [n, h, w, C] convolved with [k, k, C]; XLA's own gradient is as slow on a CPU as its convolution."""
    by_shifts, whole = (functools.partial(f, padding=padding) for f in (_by_shifts, _whole))
    return _chosen(implementation, by_shifts, whole, x, taps)


def _forward(x, taps, padding, implementation):
    return _convolved(x, taps, padding, implementation), (x, taps)


def _backward(padding, implementation, given, slope):
    def by_shifts(x, taps, slope):
        by_taps = _products(x, slope, taps.shape[0], padding).astype(taps.dtype)
        return _by_shifts(slope, taps[::-1, ::-1], padding=padding), by_taps

    def whole(x, taps, slope):
        return jax.vjp(functools.partial(_whole, padding=padding), x, taps)[1](slope)

    with jax.named_scope("depthwise"):
        return _chosen(implementation, by_shifts, whole, *given, slope)


_convolved.defvjp(_forward, _backward)


def _chosen(implementation: str, by_shifts: Callable, whole: Callable, *arrays: jax.Array) -> Any:
    if implementation == "shift":
        return by_shifts(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=by_shifts, default=whole)


def correlate(x: jax.Array, kernel: jax.Array, *, padding: str, groups: int = 1) -> jax.Array:
    """XLA's convolution that keeps the size of maps: x [n, h, w, groups C], kernel [k, k, C, D] -> [n, h, w, D]."""
    p, numbers = kernel.shape[0] // 2, ("NHWC", "HWIO", "NHWC")
    ends = ((p, p), (p, p))
    if padding == "wrap":
        x, ends = jnp.pad(x, ((0, 0), *ends, (0, 0)), mode="wrap"), ((0, 0), (0, 0))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), ends, dimension_numbers=numbers, feature_group_count=groups)


def _whole(x: jax.Array, taps: jax.Array, *, padding: str) -> jax.Array:
    return correlate(x, taps[:, :, None], padding=padding, groups=taps.shape[-1])


def _by_shifts(x: jax.Array, taps: jax.Array, *, padding: str) -> jax.Array:
    """A sum of products in one expression is one loop; of many taps, a few such loops that write partial sums."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    products = [view * tap for view, tap in zip(_views(x, taps.shape[0], padding, wide), _flat(taps), strict=True)]
    groups = [products[i : i + TAPS_IN_A_SUM] for i in range(0, len(products), TAPS_IN_A_SUM)]
    sums = [functools.reduce(operator.add, group) for group in groups]
    if len(sums) == 1:
        return sums[0].astype(x.dtype)
    partial = jnp.zeros((len(sums), *x.shape), wide)
    for i, part in enumerate(sums):  # a plain sum, or an optimization barrier, would be fused into one loop again
        partial = jax.lax.dynamic_update_index_in_dim(partial, part, i, 0)
    return partial.sum(0).astype(x.dtype)


def _products(x: jax.Array, slope: jax.Array, kernel_size: int, padding: str) -> jax.Array:
    """The gradient by taps, [k, k, C]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    sums = [(view * slope).sum((0, 1, 2)) for view in _views(x, kernel_size, padding, wide)]
    return jnp.stack(sums).reshape(kernel_size, kernel_size, -1)


def _views(x: jax.Array, kernel_size: int, padding: str, dtype: Any) -> list[jax.Array]:
    """What each tap meets, row by row of the taps: k k of [n, h, w, C]."""
    p, (_, h, w, _) = kernel_size // 2, x.shape
    ends = ((p, p), (p, p))
    x = around(x, ends) if padding == "wrap" else jnp.pad(x, ((0, 0), *ends, (0, 0)))
    x = x.astype(dtype)
    return [x[:, r : r + h, s : s + w] for r in range(kernel_size) for s in range(kernel_size)]


def _flat(taps: jax.Array) -> list[jax.Array]:
    return [tap for row in taps for tap in row]
