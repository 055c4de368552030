"""The deployed form of a replaced attention: plain matrices and one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers import dense
from equivit.layers.depthwise_conv import Grid, Pair, check_wrap, correlate, depthwise_conv, filled_grid
from equivit.layers.rngs import Keys
from kernels.attention import attend, side_by_side


class DepthwiseValues(nnx.Module):
    """A linear map, then a depthwise convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      taps: [k, k, C].
      implementation: of the convolution.
    """

    def __init__(self, value: dense.Linear, taps: jax.Array, *, padding: str, implementation: str = "auto"):
        self.value, self.taps = value, nnx.Param(taps, decay=False, product=True)
        self.padding, self.implementation = padding, implementation

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        v = self.value(x)
        return depthwise_conv(v, self.taps[...], grid, padding=self.padding, implementation=self.implementation)


class DenseValues(nnx.Module):
    """One dense convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      kernel: [k, k, in_features, C].
      bias: [k, k, C], what each tap that lies inside of the grid adds; or None.
    """

    def __init__(self, kernel: jax.Array, bias: jax.Array | None, *, padding: str):
        self.kernel = nnx.Param(kernel, product=True)
        self.bias: Any = None if bias is None else nnx.Param(_summed(bias))
        self.padding = padding

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        h, w = filled_grid(grid, x.shape[-2], "convolution")
        kernel = self.kernel[...]
        check_wrap((h, w), len(kernel), self.padding, "convolution")
        with jax.named_scope("linear"):
            maps = x.astype(kernel.dtype).reshape(-1, h, w, x.shape[-1])
            y = correlate(maps, kernel, padding=self.padding)
            y = y if self.bias is None else y + self._bias((h, w)).astype(y.dtype)
            return y.reshape(*x.shape[:-1], -1)

    def _bias(self, grid: Pair) -> jax.Array:
        """The sum of the biases of the taps inside of the grid, at each place: [h, w, C], or [C] around a torus."""
        sums = self.bias[...]
        if self.padding == "wrap":
            return sums[-1, -1]
        for axis, size in enumerate(grid):
            first = len(self.kernel) // 2 - np.arange(size)  # the tap on the first row of the grid
            upper, lower = (np.clip(tap, 0, len(self.kernel)) for tap in (first + size, first))
            sums = jnp.take(sums, upper, axis) - jnp.take(sums, lower, axis)
        return sums


class FoldedAttention(nnx.Module):
    """Values convolved, and the projection; beside them the heads that stay attention, which come first.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      values: DepthwiseValues or DenseValues.
      qkv: of the heads that stay, with columns (q | k | v) x heads x channels; None: there are none.
      num_heads: the number of these.
    """

    def __init__(
        self,
        values: DepthwiseValues | DenseValues,
        proj: dense.Linear,
        *,
        qkv: dense.Linear | None = None,
        num_heads: int = 0,
    ):
        self.values, self.proj, self.qkv, self.num_heads = values, proj, qkv, num_heads

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        y = self.values(x, grid)
        if self.qkv is not None:
            qkv = self.qkv(x)
            q, k, v = jnp.einsum("...nqhd->q...hnd", qkv.reshape(*x.shape[:-1], 3, self.num_heads, -1))
            attended = attend(q, k, v)
            y = jnp.concatenate([side_by_side(attended), y], axis=-1)
        return self.proj(y)


def linear(weight: jax.Array, bias: jax.Array | None) -> dense.Linear:
    """The linear map with this weight and bias."""

    def init(*_, **__):
        return weight

    layer = dense.Linear(*weight.shape, bias=bias is not None, init=init, rngs=Keys(0))
    if bias is not None:
        layer.bias.set_value(bias)
    return layer


def _summed(bias: jax.Array) -> jax.Array:
    """[k, k, C] to the sums over all rows before r and columns before s: [k + 1, k + 1, C]."""
    return jnp.pad(bias, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
