"""Replaced attention for inference: plain matrices and at most one convolution (`layers/depthwise.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.kernels.attention import attend, side_by_side, split_heads
from equivit.kernels.convolution import convolve
from equivit.kernels.product import add_bias
from equivit.layers import dense
from equivit.layers.depthwise_conv import MODES, Grid, Pair, check_wrap, depthwise_conv, filled_grid
from equivit.layers.rngs import Keys


class FoldedAttention(nnx.Module):
    """The inference form of a `ReplacedAttention`: remaining heads, then convolved values, then the projection.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      values: DepthwiseValues or DenseValues.
      qkv: queries, keys and values of the remaining heads, with columns (q | k | v) x heads x channels; None if no head
        remains.
      num_heads: the number of remaining heads.
    """

    def __init__(self, values: Any, proj: dense.Linear, *, qkv: dense.Linear | None = None, num_heads: int = 0):
        self.values, self.proj, self.qkv, self.num_heads = values, proj, qkv, num_heads

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        y = self.values(x, grid)
        if self.qkv is not None:
            q, k, v = split_heads(self.qkv(x), self.num_heads)
            y = jnp.concatenate([side_by_side(attend(q, k, v)), y], axis=-1)
        return self.proj(y)


class DepthwiseValues(nnx.Module):
    """A linear map, then a depthwise convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      taps: [k, k, C].
      bias: [C], of the convolution; or None.
    """

    def __init__(self, value: dense.Linear, taps: jax.Array, bias: jax.Array | None, *, padding: str):
        self.value, self.taps = value, nnx.Param(taps, decay=False, product=True)
        self.bias: Any = None if bias is None else nnx.Param(bias, decay=False)
        self.padding = padding

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        y = depthwise_conv(self.value(x), self.taps[...], grid, padding=self.padding)
        return y if self.bias is None else add_bias(y, self.bias[...])


class DenseValues(nnx.Module):
    """One dense convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      kernel: [k, k, in_features, C].
      bias: [C], added to every token; [k, k, C], added by each tap inside the grid; or None.
      relu: whether a ReLU follows.
    """

    def __init__(self, kernel: jax.Array, bias: jax.Array | None, *, relu: bool = False, padding: str):
        self.kernel = nnx.Param(kernel, product=True)
        if bias is not None and bias.ndim == 3:  # sums over all rows before r and columns before s, [k + 1, k + 1, C]
            bias = jnp.pad(bias, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
        self.bias: Any = None if bias is None else nnx.Param(bias)
        self.relu, self.padding = relu, padding

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        h, w = filled_grid(grid, x.shape[-2], "convolution")
        kernel = self.kernel[...]
        check_wrap((h, w), len(kernel), self.padding, "convolution")
        with jax.named_scope("linear"):
            maps = x.astype(kernel.dtype).reshape(-1, h, w, x.shape[-1])
            p = kernel.shape[0] // 2
            y = convolve(maps, kernel, pads=((p, p), (p, p)), mode=MODES[self.padding])
            y = y if self.bias is None else add_bias(y, self.bias_on((h, w)))
            y = nnx.relu(y) if self.relu else y
            return y.reshape(*x.shape[:-1], -1)

    def bias_on(self, grid: Pair) -> jax.Array:
        """The bias at each token: [h, w, C], or [C] if it is the same for all."""
        sums = self.bias[...]
        if sums.ndim == 1:
            return sums
        if self.padding == "wrap":
            return sums[-1, -1]
        for axis, size in enumerate(grid):
            first = len(self.kernel) // 2 - np.arange(size)  # the tap on the first row of the grid
            upper, lower = (np.clip(tap, 0, len(self.kernel)) for tap in (first + size, first))
            sums = jnp.take(sums, upper, axis) - jnp.take(sums, lower, axis)
        return sums


def linear(weight: jax.Array, bias: jax.Array | None) -> dense.Linear:
    """The linear map with this weight and bias."""

    def init(*_, **__):
        return weight

    layer = dense.Linear(*weight.shape, bias=bias is not None, init=init, rngs=Keys(0))
    if bias is not None:
        layer.bias.set_value(bias)
    return layer
