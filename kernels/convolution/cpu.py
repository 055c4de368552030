"""Convolutions in forms that XLA:CPU runs fast.

XLA:CPU runs most convolutions well.  It is slow for depthwise convolutions (by a factor of 30), gradients of 1x1
kernels, few channels by few taps, and convolutions without padding.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from equivit.derivatives import with_pullback
from equivit.kernels.convolution.reference import by_library, wrap_pad

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]
NONE = ((0, 0), (0, 0))
FEW_CHANNELS = 4  # channels of images
FEW_TAPS = 9  # largest kernel for FEW_CHANNELS that is summed entry by entry
# With more products in one sum, XLA:CPU's loop is ten times slower per tap.
TAPS_IN_A_SUM = 49


def form(
    x: jax.Array, kernel: jax.Array, *, stride: Pair, pads: Pads, mode: str, groups: int
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """A faster form of the convolution than XLA's; None if XLA's is as fast."""
    (rows, columns, inner, _), channels = kernel.shape, x.shape[-1]
    if inner == 1 and kernel.shape[3] == groups == channels:
        return functools.partial(_padded_first, functools.partial(_by_taps, stride=stride), pads, mode, written=True)
    if (rows, columns) == stride == (1, 1) and pads == NONE:
        return functools.partial(_by_points, groups=groups)
    if groups == 1 and channels <= FEW_CHANNELS and rows * columns <= FEW_TAPS:
        return functools.partial(_padded_first, functools.partial(_by_entries, stride=stride), pads, mode)
    return functools.partial(_circular, stride=stride, pads=pads, groups=groups) if mode == "circular" else None


def _padded_first(function, pads, mode, x, kernel, written=False):
    """`function(x, kernel, pads=)`, on maps already padded around the torus if the mode is circular."""
    if mode != "circular":
        return function(x, kernel, pads=pads)
    if written:  # as a separate array: many taps read it faster than by indices
        wrapped = jax.lax.optimization_barrier(jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap"))
    else:
        wrapped = wrap_pad(x, pads)
    return function(wrapped, kernel, pads=NONE)


def _circular(x: jax.Array, kernel: jax.Array, *, stride: Pair, pads: Pads, groups: int) -> jax.Array:
    """A circular convolution with one extra column, which negative padding removes: without padding XLA is slower."""
    rows, (left, right) = pads
    return by_library(wrap_pad(x, (rows, (left, right + 1))), kernel, stride, ((0, 0), (0, -1)), groups)


# ---- 1x1 kernels


def _by_points(x: jax.Array, kernel: jax.Array, *, groups: int) -> jax.Array:
    """A 1x1 convolution as a matrix product; the gradients of XLA's convolution take up to three times as long."""
    return jnp.matmul(x, kernel[0, 0]) if groups == 1 else _grouped_points(x, kernel, groups)


def _grouped_points_pullback(groups, arrays, slope):
    x, kernel = arrays
    shape = x.shape
    x, slope = (y.reshape(math.prod(y.shape[:3]), groups, y.shape[3] // groups) for y in (x, slope))
    by_x = jnp.einsum("bgd,cgd->bgc", slope, kernel.reshape(kernel.shape[2], groups, -1))
    by_kernel = jnp.einsum("bgc,bgd->cgd", x, slope)
    return by_x.reshape(shape), by_kernel.reshape(kernel.shape)


@with_pullback(_grouped_points_pullback, static=(2,))
def _grouped_points(x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
    """A grouped 1x1 convolution whose gradient consists of matrix products.

    In the forward pass, products would transpose x.  XLA would then compute a depthwise convolution before them in that
    order too, ten times slower.
    """
    return by_library(x, kernel, (1, 1), NONE, groups)


# ---- Few channels by few taps


def _by_entries_pullback(stride, pads, arrays, slope):
    x, kernel = arrays
    by_x = jax.linear_transpose(lambda x: by_library(x, kernel, stride, pads, 1), x)(slope)[0]
    patches = jnp.concatenate(list(_views(_padded(x, pads), kernel, stride).values()), axis=-1)
    by_kernel = jnp.einsum("...c,...d->cd", patches, slope.astype(patches.dtype))
    return by_x, by_kernel.reshape(kernel.shape).astype(kernel.dtype)


@functools.partial(jax.jit, static_argnames=("stride", "pads"))
@with_pullback(_by_entries_pullback, static=(2, 3))
def _by_entries(x: jax.Array, kernel: jax.Array, stride: Pair, pads: Pads) -> jax.Array:
    """A convolution of images as a sum over kernel entries, each a row of output channels times one image channel.

    XLA:CPU runs convolutions of few channels by few taps on one thread, which takes four times as long.
    """
    views = _views(_padded(x, pads), kernel, stride)
    parts = [view[..., i : i + 1] * kernel[a, b, i] for (a, b), view in views.items() for i in range(kernel.shape[2])]
    return functools.reduce(operator.add, parts).astype(kernel.dtype)


# ---- Depthwise


def _by_taps_pullback(stride, pads, arrays, slope):
    x, kernel = arrays
    dtype, shape = x.dtype, x.shape
    slope = slope.astype(jnp.promote_types(x.dtype, jnp.float32))
    sums = [(view * slope).sum((0, 1, 2)) for view in _views(_padded(x, pads), kernel, stride).values()]
    by_kernel = jnp.stack(sums).reshape(kernel.shape)
    return _spread(slope, kernel, shape, stride, pads).astype(dtype), by_kernel.astype(kernel.dtype)


@functools.partial(jax.jit, static_argnames=("stride", "pads"))  # traced once for all convolutions of a shape
@with_pullback(_by_taps_pullback, static=(2, 3))
def _by_taps(x: jax.Array, kernel: jax.Array, stride: Pair, pads: Pads) -> jax.Array:
    """A depthwise convolution as a sum over its taps."""
    views, kernel = _views(_padded(x, pads), kernel, stride), _apart(kernel)
    return _sum([view * kernel[a, b, 0] for (a, b), view in views.items()]).astype(kernel.dtype)


def _sum(products: Sequence[jax.Array]) -> Any:
    """The sum in one loop, or for many products in a few loops that write partial sums."""
    groups = [products[i : i + TAPS_IN_A_SUM] for i in range(0, len(products), TAPS_IN_A_SUM)]
    sums = [functools.reduce(operator.add, group) for group in groups]
    if len(sums) == 1:
        return sums[0]
    partial = jnp.zeros((len(sums), *sums[0].shape), sums[0].dtype)
    for i, part in enumerate(sums):  # a plain sum, or an optimization barrier, would be fused into one loop again
        partial = jax.lax.dynamic_update_index_in_dim(partial, part, i, 0)
    return partial.sum(0)


def _spread(y: jax.Array, kernel: jax.Array, shape: tuple[int, ...], stride: Pair, pads: Pads) -> jax.Array:
    """The transpose of `_by_taps` with respect to x, of the given shape.

    Entry q s + u of a padded axis belongs to the taps A s + u of the outputs q - A.  So each phase u is a sum over
    shifted outputs; the transpose of strided slices would be a sum of maps that are mostly zeros.
    """
    (h, w), (kh, kw), (sh, sw), ((top, below), (ahead, behind)) = y.shape[1:3], kernel.shape[:2], stride, pads
    if stride == (1, 1) and max(top, below) < kh and max(ahead, behind) < kw:  # also a convolution, with reversed taps
        turned = (kh - 1 - top, kh - 1 - below), (kw - 1 - ahead, kw - 1 - behind)
        return _by_taps(y, kernel[::-1, ::-1].astype(y.dtype), stride, turned)
    rows, columns = -(-(shape[1] + top + below) // sh), -(-(shape[2] + ahead + behind) // sw)  # of a phase
    up, left = -(-kh // sh) - 1, -(-kw // sw) - 1
    y, kernel = jnp.pad(y, [(0, 0), (up, rows - h), (left, columns - w), (0, 0)]), _apart(kernel)

    def phase(u, v):
        taps = [(a, b) for a in range(u, kh, sh) for b in range(v, kw, sw)]
        if not taps:
            return jnp.zeros((len(y), rows, columns, shape[3]), y.dtype)
        starts = [(up - a // sh, left - b // sw, kernel[a, b, 0]) for a, b in taps]
        return _sum([y[:, r : r + rows, c : c + columns] * tap for r, c, tap in starts])

    phases = jnp.stack([jnp.stack([phase(u, v) for v in range(sw)], axis=3) for u in range(sh)], axis=2)
    whole = phases.reshape(len(y), rows * sh, columns * sw, shape[3])
    return whole[:, top : top + shape[1], ahead : ahead + shape[2]]


def _apart(taps: jax.Array) -> jax.Array:
    """Copy the taps to a separate array, which a CPU reads faster.

    Under a scan over blocks, XLA would read them from the stack of all blocks and recompute the index for each product.
    XLA does not fuse a conditional with its users, so a conditional with two equal branches forces the copy.
    """
    if not taps.size:
        return taps
    first = taps[(0,) * taps.ndim]
    return jax.lax.cond(first == first, lambda taps: taps, lambda taps: taps + 0, taps)


def _padded(x: jax.Array, pads: Pads) -> jax.Array:
    """Zero-padded maps, in at least float32 for the sums."""
    return jnp.pad(x, [(0, 0), *pads, (0, 0)]).astype(jnp.promote_types(x.dtype, jnp.float32))


def _views(x: jax.Array, kernel: jax.Array, stride: Pair) -> dict[Pair, jax.Array]:
    """The views of padded maps under each tap of a kernel: [n, h, w, C] by (row, column)."""
    (n, height, width, channels), (sh, sw), (kh, kw) = x.shape, stride, kernel.shape[:2]
    down, right = (height - kh) // sh * sh + 1, (width - kw) // sw * sw + 1

    def view(a, b):
        return jax.lax.slice(x, (0, a, b, 0), (n, a + down, b + right, channels), (1, sh, sw, 1))

    return {(a, b): view(a, b) for a in range(kh) for b in range(kw)}
