"""Separable convolutions: depthwise convolutions and pointwise linear maps.

Source: MobileNetV2 (arXiv 1801.04381), as used in EfficientViT (arXiv 2205.14756).
"""

from typing import Any

import jax
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import NormedConv

EXPANSION = 4


class SeparableConv(nnx.Module):
    """A depthwise 3x3 convolution with hard-swish, then a pointwise linear map ("DSConv").

    Shapes: [*B, h, w, width] -> the same.  Options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, width: int, **options: Any):
        self.depthwise = NormedConv(width, width, kernel=(3, 3), groups=width, activation=dense.hard_swish, **options)
        self.reduce = NormedConv(width, width, kernel=(1, 1), **options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return self.reduce(self.depthwise(x, train=train), train=train)


class InvertedBottleneck(nnx.Module):
    """A pointwise linear map to 4 times the channels, a depthwise 3x3 convolution, a pointwise linear map ("MBConv").

    Hard-swish follows the first two.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      stride: stride of the convolution, along both axes.
      norm: if False, the first two have biases instead of batch norms; the last always has a norm.
      options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, in_channels: int, width: int, *, stride: int = 1, norm: bool = True, **options: Any):
        hidden = EXPANSION * in_channels
        inner: dict[str, Any] = dict(norm=norm, activation=dense.hard_swish, **options)
        self.expand = NormedConv(in_channels, hidden, kernel=(1, 1), **inner)
        self.depthwise = NormedConv(hidden, hidden, kernel=(3, 3), stride=(stride, stride), groups=hidden, **inner)
        self.reduce = NormedConv(hidden, width, kernel=(1, 1), **options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.depthwise(self.expand(x, train=train), train=train)
        return self.reduce(x, train=train)
