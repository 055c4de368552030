"""Convolutions of maps, padded with zeros or around the torus.

Output (i, j) reads the inputs that begin at (sh i - ph, sw j - pw), for a stride (sh, sw) and a padding (ph, pw); an
axis of n entries becomes one of floor((n + 2 p - k) / s) + 1, as in PyTorch.

With "circular" padding what leaves a map on one side comes back on the other.  Sizes are those with "zeros", so that a
model has the same shapes with either.  If the stride divides the map, and 2 p < k <= 2 p + s, the outputs lie on a
torus too and follow shifts by the stride; otherwise there is a seam where the map ends.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.derivatives import with_pullback
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.dense import uniform

Pair = tuple[int, int]
MODES = ("zeros", "circular")
FEW_CHANNELS = 4  # of images
FEW_TAPS = 9  # of a kernel for them that is summed entry by entry


class Conv(nnx.Module):
    """A convolution with a kernel of its own for each pair of channels of a group.

    The product has the dtype of the kernel, the sum that of the bias, as in `dense.PatchEmbed`.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride, padding: (rows, columns).
      mode: "zeros" or "circular", what the padding holds.
      groups: of channels; those of one group are made of the same group of `in_channels`.
      init: draws the kernel [kh, kw, in_channels / groups, width]; by default uniform, as PyTorch does.

    Raises:
      ValueError: an unknown mode, groups that do not divide both numbers of channels, or a map that is smaller than the
        kernel.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kernel: Pair,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        mode: str = "zeros",
        groups: int = 1,
        bias: bool = True,
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        errors.one_of(f"{type(self).__name__}: mode", mode, MODES)
        both = math.gcd(in_channels, width)
        errors.divides(f"{type(self).__name__}: groups", groups, both, f"{in_channels=} and {width=}")
        shape = (*kernel, in_channels // groups, width)
        bound = 1 / math.sqrt(math.prod(shape[:-1]))
        drawn = uniform(rngs.params(), shape, bound) if init is None else init(rngs.params(), shape)
        self.kernel = nnx.Param(drawn, product=True)
        self.bias: Any = nnx.Param(uniform(rngs.params(), (width,), bound)) if bias else None
        self.stride, self.padding, self.mode, self.groups = stride, padding, mode, groups

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._convolved(x, self.mode)

    def circular(self, x: jax.Array) -> jax.Array:
        """The convolution around the torus whatever the mode, as an adaptive layer takes it of a map that it rolled."""
        return self._convolved(x, "circular")

    def _convolved(self, x: jax.Array, mode: str) -> jax.Array:
        with jax.named_scope("linear"):
            y = convolve(x, self.kernel[...], self.stride, self.padding, mode, self.groups)
            return y if self.bias is None else y + self.bias[...]

    def everywhere(self, x: jax.Array) -> jax.Array:
        """At stride 1 around the torus, of all phases at once: [*B, H, W, in_channels] -> [*B, H, W, width].

        The result at (i, j) is that of the convolution whose taps begin at (i - ph, j - pw).
        """
        with jax.named_scope("linear"):
            kernel = self.kernel[...]
            (rows, columns), (above, left) = kernel.shape[:2], self.padding
            x = _written_around(x, ((above, rows - 1 - above), (left, columns - 1 - left)))
            y = convolve(x, kernel, (1, 1), (0, 0), "zeros", self.groups)
            return y if self.bias is None else y + self.bias[...]

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The kernel [kh, kw, in, width] and the bias [width], zero if there is none."""
        kernel = self.kernel[...]
        return kernel, jnp.zeros(kernel.shape[-1], kernel.dtype) if self.bias is None else self.bias[...]


class DepthwiseConv(Conv):
    """A convolution of each channel by itself.

    Shapes: [*B, H, W, channels] -> [*B, h, w, channels].

    Args:
      options: those of `Conv`.
    """

    def __init__(self, channels: int, *, bias: bool = False, rngs: nnx.Rngs, **options: Any):
        super().__init__(channels, channels, groups=channels, bias=bias, rngs=rngs, **options)


class NormedConv(nnx.Module):
    """A convolution, batch norm, and an activation: what convolutional networks are made of.

    The padding is k // 2 on each side, so that at stride 1 a map keeps its size; at stride s its sides are divided by s
    and rounded up.  The product has the dtype of the kernel, the result that of the norm's scale, as the sum of a
    `Conv` has that of its bias.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel: (rows, columns), both odd.
      stride, mode, groups, init: of the convolution (`Conv`).
      norm: the batch norm may be left out.
      bias: of the convolution; by default it has one only where no norm would take it off.
      activation: a function of arrays; None for none.
      scale: the scale of the norm at the start; 0 begins a residual branch as nothing.
      statistics_groups: `groups` of the batch norm.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kernel: Pair,
        stride: Pair = (1, 1),
        mode: str = "zeros",
        groups: int = 1,
        norm: bool = True,
        bias: bool | None = None,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        scale: float = 1.0,
        statistics_groups: int = 1,
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(
            in_channels,
            width,
            kernel=kernel,
            stride=stride,
            padding=(kernel[0] // 2, kernel[1] // 2),
            mode=mode,
            groups=groups,
            bias=not norm if bias is None else bias,
            init=init,
            rngs=rngs,
        )
        self.norm: Any = BatchNorm(width, scale=scale, groups=statistics_groups) if norm else None
        self.activation = activation

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return self._activated(self.conv(x), train)

    def circular(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """The same with `Conv.circular`."""
        return self._activated(self.conv.circular(x), train)

    def everywhere(self, x: jax.Array) -> jax.Array:
        """`Conv.everywhere`, then the norm by its running statistics, and the activation."""
        return self._activated(self.conv.everywhere(x), False)

    def folded(self) -> "NormedConv":
        """The same map as a convolution with a bias and no norm, by the running statistics, for inference."""
        unit = nnx.clone(self)
        if self.norm is not None:
            factor, shift = self.norm.affine()
            kernel, bias = self.conv.affine()
            unit.conv.kernel.set_value((kernel * factor).astype(kernel.dtype))
            unit.conv.bias, unit.norm = nnx.data(nnx.Param(bias * factor + shift)), None
        return unit

    def _activated(self, x: jax.Array, train: bool) -> jax.Array:
        if self.norm is not None:
            x = self.norm(x.astype(jnp.promote_types(x.dtype, self.norm.scale[...].dtype)), train=train)
        return x if self.activation is None else self.activation(x)


def convolve(x: jax.Array, kernel: jax.Array, stride: Pair, padding: Pair, mode: str, groups: int = 1) -> jax.Array:
    """The convolution of maps, in the dtype of the kernel.

    Shapes: x [*B, H, W, groups C], kernel [kh, kw, C, D] -> [*B, h, w, D].
    """
    *batch, h, w, channels = x.shape
    output_size((h, w), (kernel.shape[0], kernel.shape[1]), stride, padding)
    x = x.astype(kernel.dtype).reshape(math.prod(batch), h, w, channels)
    torus, circular = x, functools.partial(_circular, stride=stride, padding=padding, groups=groups)
    depthwise = kernel.shape[2:] == (1, channels)
    if mode == "circular":
        (rows, columns), extended = padding, _written_around if depthwise else around
        x, padding = extended(x, ((rows, rows), (columns, columns))), (0, 0)
    whole = functools.partial(_whole, stride=stride, padding=padding, groups=groups)
    if depthwise:
        taps = functools.partial(_by_taps, stride=stride, padding=padding)
        y = jax.lax.platform_dependent(x, kernel, cpu=taps, default=whole)
    elif kernel.shape[:2] == stride == (1, 1) and padding == (0, 0):
        points = functools.partial(_by_points, groups=groups)
        y = jax.lax.platform_dependent(x, kernel, cpu=points, default=whole)
    elif groups == 1 and channels <= FEW_CHANNELS and kernel.shape[0] * kernel.shape[1] <= FEW_TAPS:
        entries = functools.partial(_by_entries, stride=stride, padding=padding)
        y = jax.lax.platform_dependent(x, kernel, cpu=entries, default=whole)
    elif mode == "circular":
        y = jax.lax.platform_dependent(torus, kernel, cpu=functools.partial(circular, more=1), default=circular)
    else:
        y = whole(x, kernel)
    return y.reshape(*batch, *y.shape[1:])


def _whole(x: jax.Array, kernel: jax.Array, *, stride: Pair, padding: Pair, groups: int) -> jax.Array:
    return _by_library(x, kernel, stride, [(p, p) for p in padding], groups)


def _circular(x: jax.Array, kernel: jax.Array, *, stride: Pair, padding: Pair, groups: int, more: int = 0) -> jax.Array:
    """A convolution around a torus, of some columns `more`, which it leaves out by a negative padding.

    XLA:CPU's convolution is slower without any padding, and so it gets one column more.
    """
    rows, columns = padding
    x = around(x, ((rows, rows), (columns, columns + more)))
    return _by_library(x, kernel, stride, [(0, 0), (0, -more)], groups)


def _by_library(x: jax.Array, kernel: jax.Array, stride: Pair, pads: list[Pair], groups: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, stride, pads, dimension_numbers=numbers, feature_group_count=groups)


def _by_points(x: jax.Array, kernel: jax.Array, *, groups: int) -> jax.Array:
    """A convolution with kernels of one tap, as the matrix product that it is.

    XLA:CPU has no good kernel for the gradient: as convolutions they take up to three times as long.
    """
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
    """With groups only the gradient consists of matrix products.

    In the forward pass they would transpose x, and a compiler would compute the depthwise convolution before them in
    that order too, ten times slower.
    """
    return _whole(x, kernel, stride=(1, 1), padding=(0, 0), groups=groups)


@functools.partial(jax.jit, static_argnames=("stride", "padding"))
def _by_entries(x: jax.Array, kernel: jax.Array, *, stride: Pair, padding: Pair) -> jax.Array:
    """A convolution of images as a sum over the entries of its kernel, each a row of channels times one of an image.

    XLA:CPU's convolution of few channels by few taps runs on one thread, and takes four times as long.
    """
    return _summed_entries(x, kernel, stride, padding)


def _summed_entries_pullback(stride, padding, arrays, slope):
    x, kernel = arrays
    by_x = jax.linear_transpose(lambda x: _whole(x, kernel, stride=stride, padding=padding, groups=1), x)(slope)[0]
    patches = jnp.concatenate(list(_views(_padded(x, padding), kernel, stride).values()), axis=-1)
    by_kernel = jnp.einsum("...c,...d->cd", patches, slope.astype(patches.dtype))
    return by_x, by_kernel.reshape(kernel.shape).astype(kernel.dtype)


@with_pullback(_summed_entries_pullback, static=(2, 3))
def _summed_entries(x: jax.Array, kernel: jax.Array, stride: Pair, padding: Pair) -> jax.Array:
    views = _views(_padded(x, padding), kernel, stride)
    parts = [view[..., i : i + 1] * kernel[a, b, i] for (a, b), view in views.items() for i in range(kernel.shape[2])]
    return functools.reduce(operator.add, parts).astype(kernel.dtype)


def _views(x: jax.Array, kernel: jax.Array, stride: Pair) -> dict[Pair, jax.Array]:
    """The views of padded maps under each tap of a kernel: [n, h, w, C] by (row, column)."""
    (n, height, width, channels), (sh, sw), (kh, kw) = x.shape, stride, kernel.shape[:2]
    down, right = (height - kh) // sh * sh + 1, (width - kw) // sw * sw + 1

    def view(a, b):
        return jax.lax.slice(x, (0, a, b, 0), (n, a + down, b + right, channels), (1, sh, sw, 1))

    return {(a, b): view(a, b) for a in range(kh) for b in range(kw)}


@functools.partial(jax.jit, static_argnames=("stride", "padding"))  # traced once for all convolutions of a shape
def _by_taps(x: jax.Array, kernel: jax.Array, *, stride: Pair, padding: Pair) -> jax.Array:
    """A depthwise convolution as a sum over its taps.

    It is many times faster on a CPU, a training step too: XLA:CPU has no good kernel for `_whole` nor its gradient.
    """
    return _summed(x, kernel, stride, padding)


def _summed_pullback(stride, padding, arrays, slope):
    x, kernel = arrays
    dtype, shape = x.dtype, x.shape
    slope = slope.astype(jnp.promote_types(x.dtype, jnp.float32))
    sums = [(view * slope).sum((0, 1, 2)) for view in _views(_padded(x, padding), kernel, stride).values()]
    by_kernel = jnp.stack(sums).reshape(kernel.shape)
    return _spread(slope, kernel, shape, stride, padding).astype(dtype), by_kernel.astype(kernel.dtype)


@with_pullback(_summed_pullback, static=(2, 3))
def _summed(x: jax.Array, kernel: jax.Array, stride: Pair, padding: Pair) -> jax.Array:
    views, kernel = _views(_padded(x, padding), kernel, stride), apart(kernel)
    return functools.reduce(operator.add, [v * kernel[a, b] for (a, b), v in views.items()]).astype(kernel.dtype)


def _spread(y: jax.Array, kernel: jax.Array, shape: tuple[int, ...], stride: Pair, padding: Pair) -> jax.Array:
    """The transpose of `_summed` by x, of the given shape.

    Entry q s + u of a padded axis belongs to the taps A s + u of the outputs q - A.  Each phase u is thus a sum over
    shifted outputs, where the transpose of strided slices would be a sum of maps that are mostly zeros.
    """
    (h, w), (kh, kw), (sh, sw), (ph, pw) = y.shape[1:3], kernel.shape[:2], stride, padding
    rows, columns = -(-(shape[1] + 2 * ph) // sh), -(-(shape[2] + 2 * pw) // sw)  # of a phase
    up, left = -(-kh // sh) - 1, -(-kw // sw) - 1
    y, kernel = jnp.pad(y, [(0, 0), (up, rows - h), (left, columns - w), (0, 0)]), apart(kernel)
    none = jnp.zeros((len(y), rows, columns, shape[3]), y.dtype)

    def phase(u, v):
        taps = ((a, b) for a in range(u, kh, sh) for b in range(v, kw, sw))
        starts = ((up - a // sh, left - b // sw, kernel[a, b]) for a, b in taps)
        return sum((y[:, r : r + rows, c : c + columns] * tap for r, c, tap in starts), none)

    phases = jnp.stack([jnp.stack([phase(u, v) for v in range(sw)], axis=3) for u in range(sh)], axis=2)
    whole = phases.reshape(len(y), rows * sh, columns * sw, shape[3])
    return whole[:, ph : ph + shape[1], pw : pw + shape[2]]


def apart(taps: jax.Array) -> jax.Array:
    """The taps as an array of their own, which a sum over them reads faster on a CPU.

    Under a scan over blocks XLA would read them from the stack of all blocks, by an index that each product computes
    again.  It does not join a branch with what follows, so that the taps come out of one; both branches are the same.
    """
    if not taps.size:
        return taps
    first = taps[(0,) * taps.ndim]
    return jax.lax.cond(first == first, lambda taps: taps, lambda taps: taps + 0, taps)


def _padded(x: jax.Array, padding: Pair) -> jax.Array:
    """Maps with zeros around them, in which sums are taken: float32 at least."""
    return jnp.pad(x, [(0, 0), *((p, p) for p in padding), (0, 0)]).astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def around(x: jax.Array, ends: tuple[Pair, Pair]) -> jax.Array:
    """Maps with rows and columns from the other side of the torus: [*B, H, W, C] -> [*B, t + H + b, l + W + r, C].

    It reads the maps by constant indices, which XLA joins with what follows, where it would write `jnp.pad` out first.
    The gradient is that of `jnp.pad`; that of indices would be a slow scatter.

    Args:
      ends: (t, b) and (l, r).
    """
    for axis, (before, after) in zip((-3, -2), ends, strict=True):
        size = x.shape[axis]
        x = jnp.take(x, np.arange(-before, size + after) % size, axis=axis, mode="clip")
    return x


@around.defjvp
def _around_derivative(ends, primals, tangents):
    (x,), (slope,) = primals, tangents
    return around(x, ends), jnp.pad(slope, [(0, 0)] * (x.ndim - 3) + [*ends, (0, 0)], mode="wrap")


def _written_around(x: jax.Array, ends: tuple[Pair, Pair]) -> jax.Array:
    """`around`; on a CPU an array of its own, which many taps read faster than by indices."""

    def written(x):
        pads = [(0, 0)] * (x.ndim - 3) + [*ends, (0, 0)]
        return jax.lax.optimization_barrier(jnp.pad(x, pads, mode="wrap"))

    return jax.lax.platform_dependent(x, cpu=written, default=functools.partial(around, ends=ends))


def output_size(grid: Pair, kernel: Pair, stride: Pair, padding: Pair, name: str = "convolution") -> Pair:
    """(h, w) after a convolution of a map of (H, W); ValueError, with `name`, if the map is smaller than the kernel."""
    for axis, n, k, p in zip(("height", "width"), grid, kernel, padding, strict=True):
        if n + 2 * p < k or not n:
            raise ValueError(
                f"{name}: the {axis} {n} of a map with padding {p} is smaller than the kernel, {k}; it must be at "
                f"least {max(k - 2 * p, 1)}."
            )
    h, w = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(grid, kernel, stride, padding, strict=True))
    return h, w
