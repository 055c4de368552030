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
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers.dense import uniform

Pair = tuple[int, int]
MODES = ("zeros", "circular")


class Conv(nnx.Module):
    """A convolution with a kernel of its own for each pair of channels.

    The product has the dtype of the kernel, the sum that of the bias, as in `dense.PatchEmbed`.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride, padding: (rows, columns).
      mode: "zeros" or "circular", what the padding holds.

    Raises:
      ValueError: an unknown mode, or a map that is smaller than the kernel.
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
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        errors.one_of(f"{type(self).__name__}: mode", mode, MODES)
        bound = 1 / math.sqrt(math.prod(kernel) * in_channels)
        self.kernel = nnx.Param(uniform(rngs.params(), (*kernel, in_channels, width), bound), product=True)
        self.bias = nnx.Param(uniform(rngs.params(), (width,), bound)) if bias else None
        self.stride, self.padding, self.mode = stride, padding, mode
        self.groups = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("linear"):
            y = convolve(x, self.kernel[...], self.stride, self.padding, self.mode, self.groups)
            return y if self.bias is None else y + self.bias[...]

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The kernel [kh, kw, in, width] and the bias [width], zero if there is none."""
        kernel = self.kernel[...]
        return kernel, jnp.zeros(kernel.shape[-1], kernel.dtype) if self.bias is None else self.bias[...]

    def size(self, grid: Pair) -> Pair:
        """(h, w) of the output for a map of (H, W)."""
        kernel = self.kernel.shape
        return output_size(grid, (kernel[0], kernel[1]), self.stride, self.padding)


class DepthwiseConv(Conv):
    """A convolution of each channel by itself.

    Shapes: [*B, H, W, channels] -> [*B, h, w, channels].
    """

    def __init__(
        self,
        channels: int,
        *,
        kernel: Pair,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        mode: str = "zeros",
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(1, channels, kernel=kernel, stride=stride, padding=padding, mode=mode, bias=bias, rngs=rngs)
        self.groups = channels


def convolve(x: jax.Array, kernel: jax.Array, stride: Pair, padding: Pair, mode: str, groups: int = 1) -> jax.Array:
    """The convolution of maps, in the dtype of the kernel.

    Shapes: x [*B, H, W, groups C], kernel [kh, kw, C, D] -> [*B, h, w, D].

    Args:
      groups: 1, or the number of channels, each of which is convolved by itself (C = 1, D = groups).
    """
    *batch, h, w, channels = x.shape
    output_size((h, w), (kernel.shape[0], kernel.shape[1]), stride, padding)
    x = x.astype(kernel.dtype).reshape(math.prod(batch), h, w, channels)
    pads = [(p, p) for p in padding]
    if mode == "circular" or groups > 1:
        x = jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap" if mode == "circular" else "constant")
        pads = [(0, 0), (0, 0)]
    if groups > 1:
        y = depthwise(x, kernel[:, :, 0], stride).astype(kernel.dtype)
    else:
        y = jax.lax.conv_general_dilated(x, kernel, stride, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y.reshape(*batch, *y.shape[1:])


def depthwise(x: jax.Array, kernel: jax.Array, stride: Pair) -> jax.Array:
    """Each channel convolved by itself, where the kernel fits into the map; in at least float32.

    It is a sum of shifted products, one for each tap: on a CPU, XLA's own convolution in groups takes from 8 to 30
    times as long.  Its gradient is written so too, and keeps nothing but x.

    Shapes: x [B, H, W, C], kernel [kh, kw, C] -> [B, h, w, C].
    """
    return _depthwise(x, kernel, stride)


def _sum_of_taps(x: jax.Array, kernel: jax.Array, stride: Pair) -> jax.Array:
    kernel = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    return functools.reduce(operator.add, (part * kernel[tap] for tap, part in _taps(x, kernel, stride)))


def _taps(x: jax.Array, kernel: jax.Array, stride: Pair) -> Iterator[tuple[Pair, jax.Array]]:
    """For each tap, (row, column), what it sees of a map: [B, h, w, C]."""
    (sh, sw), (kh, kw) = stride, kernel.shape[:2]
    for i, j in np.ndindex(kh, kw):
        yield (i, j), x[:, i : x.shape[1] - kh + i + 1 : sh, j : x.shape[2] - kw + j + 1 : sw]


def _depthwise_forward(x, kernel, stride):
    return _sum_of_taps(x, kernel, stride), (x, kernel)


def _depthwise_backward(stride, kept, slope):
    x, kernel = kept
    by_tap = [(part * slope).sum((0, 1, 2)) for _, part in _taps(x, kernel, stride)]
    # Back to the places of x: the stride is undone with zeros in between, and the kernel turned around.
    ends = [
        (k - 1, size - 1 - (n - 1) * step, step - 1)
        for k, size, n, step in zip(kernel.shape, x.shape[1:3], slope.shape[1:3], stride, strict=False)
    ]
    spread = jax.lax.pad(slope, jnp.zeros((), slope.dtype), [(0, 0, 0), *ends, (0, 0, 0)])
    by_map = depthwise(spread, kernel[::-1, ::-1], (1, 1))
    return by_map.astype(x.dtype), jnp.stack(by_tap).reshape(kernel.shape).astype(kernel.dtype)


_depthwise = jax.custom_vjp(_sum_of_taps, nondiff_argnums=(2,))
_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def output_size(grid: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """(h, w) after a convolution of a map of (H, W); ValueError if the map is smaller than the kernel."""
    for axis, n, k, p in zip(("height", "width"), grid, kernel, padding, strict=True):
        if n + 2 * p < k or not n:
            raise ValueError(
                f"convolution: the {axis} {n} of a map with padding {p} is smaller than the kernel, {k}; it must be at "
                f"least {max(k - 2 * p, 1)}."
            )
    h, w = ((n + 2 * p - k) // s + 1 for n, k, s, p in zip(grid, kernel, stride, padding, strict=True))
    return h, w
