"""Convolutions of maps, padded with zeros or circularly.

Output (i, j) reads the inputs from (sh i - ph, sw j - pw) on, for stride (sh, sw) and padding (ph, pw); an axis of n
entries gets floor((n + 2 p - k) / s) + 1 outputs, as in PyTorch.

With "circular" padding the map is a torus.  Output sizes are the same as with "zeros".  If the stride divides the map,
and 2 p < k <= 2 p + s, the outputs lie on a torus too and follow shifts by the stride; otherwise there is a seam at the
border of the map.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.kernels.convolution import convolve
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.dense import uniform

Pair = tuple[int, int]
MODES = ("zeros", "circular")


class Conv(nnx.Module):
    """A grouped convolution.

    The product has the dtype of the kernel, and the sum has the dtype of the bias, as in `dense.PatchEmbed`.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride, padding: (rows, columns).
      mode: padding mode, "zeros" or "circular".
      groups: number of channel groups; each group of outputs reads one group of `in_channels`.
      init: draws the kernel [kh, kw, in_channels / groups, width]; by default PyTorch's uniform.

    Raises:
      ValueError: a kernel, stride or padding that is no pair, an unknown mode, groups that do not divide both numbers
        of channels, a map of other channels, or one smaller than the kernel.
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
        for option, pair in dict(kernel=kernel, stride=stride, padding=padding).items():
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                name = f"{type(self).__name__}: {option}={errors.shown(pair)}"
                raise ValueError(f"{name} must be a pair (rows, columns), such as (3, 3).")
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
        """The convolution with circular padding, whatever the mode; adaptive layers apply it to a map they rolled."""
        return self._convolved(x, "circular")

    def _convolved(self, x: jax.Array, mode: str) -> jax.Array:
        with jax.named_scope("linear"):
            kernel, (rows, columns) = self.kernel[...], self.padding
            output_size((x.shape[-3], x.shape[-2]), (kernel.shape[0], kernel.shape[1]), self.stride, self.padding)
            pads = ((rows, rows), (columns, columns))
            y = convolve(x, kernel, stride=self.stride, pads=pads, mode=mode, groups=self.groups)
            return y if self.bias is None else y + self.bias[...]

    def everywhere(self, x: jax.Array) -> jax.Array:
        """The circular convolution at stride 1, all phases at once: [*B, H, W, in_channels] -> [*B, H, W, width].

        Entry (i, j) is the output whose taps begin at (i - ph, j - pw).
        """
        with jax.named_scope("linear"):
            kernel = self.kernel[...]
            (rows, columns), (above, left) = kernel.shape[:2], self.padding
            pads = ((above, rows - 1 - above), (left, columns - 1 - left))
            y = convolve(x, kernel, pads=pads, mode="circular", groups=self.groups)
            return y if self.bias is None else y + self.bias[...]

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The kernel [kh, kw, in, width] and the bias [width], zeros if there is none."""
        kernel = self.kernel[...]
        return kernel, jnp.zeros(kernel.shape[-1], kernel.dtype) if self.bias is None else self.bias[...]


class DepthwiseConv(Conv):
    """A depthwise convolution; options as in `Conv`.  Shapes: [*B, H, W, channels] -> [*B, h, w, channels]."""

    def __init__(self, channels: int, *, bias: bool = False, rngs: nnx.Rngs, **options: Any):
        super().__init__(channels, channels, groups=channels, bias=bias, rngs=rngs, **options)


class NormedConv(nnx.Module):
    """Convolution, batch norm, activation.

    The padding is k // 2 on each side: stride 1 keeps the size, and stride s divides the sides by s, rounding up.  The
    product has the dtype of the kernel, and the result has the dtype of the norm's scale.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel: (rows, columns), both odd.
      options: `stride`, `mode`, `groups` and `init` of the convolution (`Conv`).
      norm: whether there is a batch norm.
      bias: whether the convolution has a bias; by default only without a norm, which would cancel it.
      activation: a function of arrays; None for none.
      scale: initial scale of the norm; with 0, a residual branch starts at zero.
      statistics_groups: `groups` of the batch norm.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kernel: Pair,
        norm: bool = True,
        bias: bool | None = None,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        scale: float = 1.0,
        statistics_groups: int = 1,
        **options: Any,
    ):
        options |= dict(padding=(kernel[0] // 2, kernel[1] // 2), bias=not norm if bias is None else bias)
        self.conv = Conv(in_channels, width, kernel=kernel, **options)
        self.norm: Any = BatchNorm(width, scale=scale, groups=statistics_groups) if norm else None
        self.activation = activation

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return self._activated(self.conv(x), train)

    def circular(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """The layer with `Conv.circular`."""
        return self._activated(self.conv.circular(x), train)

    def everywhere(self, x: jax.Array) -> jax.Array:
        """`Conv.everywhere`, then the norm with its running statistics, and the activation."""
        return self._activated(self.conv.everywhere(x), False)

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The factor and shift of each channel after the convolution, by the running statistics, both [width]."""
        bias = self.conv.affine()[1]
        if self.norm is None:
            return jnp.ones_like(bias), bias
        factor, shift = self.norm.affine()
        return factor, bias * factor + shift

    def folded(self) -> "NormedConv":
        """The same map for inference: a convolution with a bias and no norm, folded from the running statistics."""
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
