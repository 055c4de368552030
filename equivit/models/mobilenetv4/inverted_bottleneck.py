"""Convolution blocks that widen and narrow a map: the parts of MobileNetV4 (arXiv 2404.10518).

Every convolution has a batch norm, and zero-pads by half of its kernel, at stride 2 too.  Kernels are initially normal
with variance 2 / fan-out, as in timm.  All blocks have the interface of `layers/stack.py`.
"""

import math
from typing import Any

import jax
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import NormedConv
from equivit.layers.grid import Layout
from equivit.layers.stochastic_depth import drop_path


class ResidualBlock(nnx.Module):
    """x + path(branch(x)), or the branch alone if it changes the shape of the map.

    Attributes:
      adds: whether x is added.
    """

    adds = True

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        """The map after the layers of the block."""
        raise NotImplementedError

    def __call__(
        self,
        x: jax.Array,
        layout: Layout | None = None,
        *,
        rate: float | jax.Array = 0.0,
        phase: int = 0,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The map after the block.

        Args:
          layout, phase: unused; a map has its grid, and blocks do not alternate.
          rate: probability of dropping the branch for an image.
          train: whether batch norms use and record the statistics of this batch.
          key: for stochastic depth; None: none.
        """
        y = self.branch(x, train=train)
        return x + drop_path(y, rate, key, axes=3) if self.adds else y


class PlainConv(ResidualBlock):
    """One convolution with batch norm and ReLU, without a residual sum.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride: along both axes.
      statistics_groups: `groups` of the batch norm.
    """

    adds = False

    def __init__(
        self, in_channels: int, width: int, *, kernel: int, stride: int = 1, statistics_groups: int = 1, rngs: nnx.Rngs
    ):
        self.conv = normed_conv(in_channels, width, kernel, stride, groups=statistics_groups, rngs=rngs)

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        return self.conv(x, train=train)


class FusedInvertedBottleneck(ResidualBlock):
    """A convolution to `hidden` channels with ReLU, then a 1x1 convolution to `width`; x is added if shapes agree.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride: of the first convolution, along both axes.
      statistics_groups: `groups` of the batch norms.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        hidden: int,
        kernel: int,
        stride: int = 1,
        statistics_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(groups=statistics_groups, rngs=rngs)
        self.expand = normed_conv(in_channels, hidden, kernel, stride, **options)
        self.project = normed_conv(hidden, width, 1, activation=None, **options)
        self.adds = stride == 1 and in_channels == width

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        return self.project(self.expand(x, train=train), train=train)


class UniversalInvertedBottleneck(ResidualBlock):
    """Depthwise, 1x1 to `hidden` channels, depthwise, 1x1 to `width`: four blocks in one (MobileNetV4's UIB).

    | start, mid | the block that it is         |
    |------------|------------------------------|
    | 0, k       | inverted bottleneck          |
    | k, 0       | like ConvNeXt's              |
    | k, k       | with an extra depthwise one  |
    | 0, 0       | feed-forward                 |

    ReLU follows the second and third of these convolutions.  The map is divided by the stride in the third, or in the
    first if there is no third.  x is added if shapes agree.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      start, mid: kernels of the depthwise convolutions, along both axes; 0 for none.
      layer_scale: initial layer scale; None for none.
      statistics_groups: `groups` of the batch norms.

    Raises:
      ValueError: a stride without a depthwise convolution.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        hidden: int,
        start: int = 0,
        mid: int = 0,
        stride: int = 1,
        layer_scale: float | None = None,
        statistics_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        if stride > 1 and not start and not mid:
            raise ValueError(f"UniversalInvertedBottleneck: {stride=} needs a depthwise convolution; set start or mid.")
        first, second = (1, stride) if mid else (stride, 1)
        options: dict[str, Any] = dict(groups=statistics_groups, rngs=rngs)
        depthwise: dict[str, Any] = dict(depthwise=True, **options)
        self.start: Any = (
            normed_conv(in_channels, in_channels, start, first, activation=None, **depthwise) if start else None
        )
        self.expand = normed_conv(in_channels, hidden, 1, **options)
        self.mid: Any = normed_conv(hidden, hidden, mid, second, **depthwise) if mid else None
        self.project = normed_conv(hidden, width, 1, activation=None, **options)
        self.scale: Any = None if layer_scale is None else dense.LayerScale(width, layer_scale)
        self.adds = stride == 1 and in_channels == width

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        for conv in (self.start, self.expand, self.mid, self.project):
            x = x if conv is None else conv(x, train=train)
        return x if self.scale is None else self.scale(x)


def normed_conv(
    in_channels: int,
    width: int,
    kernel: int,
    stride: int = 1,
    *,
    depthwise: bool = False,
    activation: Any = jax.nn.relu,
    groups: int = 1,
    rngs: nnx.Rngs,
) -> NormedConv:
    """A convolution with a square kernel and batch norm.

    Args:
      depthwise: whether the convolution is depthwise.
      groups: `groups` of the batch norm.
    """
    channel_groups = in_channels if depthwise else 1
    fan_out = kernel**2 * width // channel_groups
    return NormedConv(
        in_channels,
        width,
        kernel=(kernel, kernel),
        stride=(stride, stride),
        groups=channel_groups,
        activation=activation,
        statistics_groups=groups,
        init=nnx.initializers.normal(math.sqrt(2 / fan_out)),
        rngs=rngs,
    )
