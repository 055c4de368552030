"""Downsampling by convolution with channel gates: the patch merging of SHViT (arXiv 2401.16456)."""

from typing import Any

import jax
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import Conv, NormedConv

EXPANSION = 4


class SqueezeExcitation(nnx.Module):
    """Multiply each channel by a gate in (0, 1), computed by a small MLP from the channel means.

    Source: arXiv 1709.01507, Section 3.

    Shapes: [*B, h, w, width] -> the same.

    Args:
      hidden: width of the MLP.
    """

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.fc1 = Conv(width, hidden, kernel=(1, 1), rngs=rngs)
        self.fc2 = Conv(hidden, width, kernel=(1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gates = self.fc2(dense.relu(self.fc1(x.mean((-3, -2), keepdims=True))))
        with jax.named_scope("activation"):
            return x * jax.nn.sigmoid(gates)


class ConvMerging(nnx.Module):
    """Halves a map, rounding up: linear map to 4 C channels, depthwise convolution, gates, linear map.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      statistics_groups: `groups` of the batch norms.
    """

    def __init__(self, in_channels: int, width: int, *, statistics_groups: int = 1, rngs: nnx.Rngs):
        hidden = EXPANSION * in_channels
        options: dict[str, Any] = dict(statistics_groups=statistics_groups, rngs=rngs)
        inner: dict[str, Any] = dict(activation=dense.relu, **options)
        self.expand = NormedConv(in_channels, hidden, kernel=(1, 1), **inner)
        self.depthwise = NormedConv(hidden, hidden, kernel=(3, 3), stride=(2, 2), groups=hidden, **inner)
        self.gate = SqueezeExcitation(hidden, squeezed(hidden), rngs=rngs)
        self.reduce = NormedConv(hidden, width, kernel=(1, 1), **options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.depthwise(self.expand(x, train=train), train=train)
        return self.reduce(self.gate(x), train=train)


def squeezed(width: int) -> int:
    """A quarter of the width, rounded to the nearest multiple of 8 (halves up), at least 8."""
    return max(8, (width + 16) // 32 * 8)
