"""Convolution blocks that widen and narrow a map: the parts of MobileNetV4 (arXiv 2404.10518).

Every convolution has a batch norm, and zero-pads by half of its kernel, at stride 2 too.  Kernels are initially normal
with variance 2 / fan-out, as in timm.  All blocks have the interface of `layers/stack.py`.
"""

import functools
import math
from typing import Any

import jax
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import NormedConv
from equivit.layers.dropout import Key, Rate
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
        self, x: jax.Array, layout: Layout | None = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> jax.Array:
        """The map after the block; arguments as in `Stack`, where `layout` is unused: a map has its grid."""
        y = self.branch(x, train=train)
        return x + drop_path(y, rate, key, axes=3) if self.adds else y


class PlainConv(ResidualBlock):
    """One convolution with batch norm and ReLU, without a residual sum.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride: along both axes.
      options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    adds = False

    def __init__(self, in_channels: int, width: int, *, kernel: int, stride: int = 1, **options: Any):
        self.conv = normed_conv(in_channels, width, kernel, stride, **options)

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        return self.conv(x, train=train)


class FusedInvertedBottleneck(ResidualBlock):
    """A convolution to `hidden` channels with ReLU, then a 1x1 convolution to `width`; x is added if shapes agree.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride: of the first convolution, along both axes.
      options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, in_channels: int, width: int, *, hidden: int, kernel: int, stride: int = 1, **options: Any):
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
      options: `statistics_groups` and `rngs` of `NormedConv`.

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
        **options: Any,
    ):
        if stride > 1 and not start and not mid:
            raise ValueError(f"UniversalInvertedBottleneck: {stride=} needs a depthwise convolution; set start or mid.")
        first, second = (1, stride) if mid else (stride, 1)
        depthwise: dict[str, Any] = dict(depthwise=True, **options)
        before = functools.partial(normed_conv, in_channels, in_channels, start, first, activation=None, **depthwise)
        self.start: Any = before() if start else None
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
    activation: Any = dense.relu,
    **options: Any,
) -> NormedConv:
    """A convolution with a square kernel and batch norm, depthwise or not; options are of `NormedConv`."""
    groups = in_channels if depthwise else 1
    init = nnx.initializers.normal(math.sqrt(2 / (kernel**2 * width // groups)))
    options |= dict(kernel=(kernel, kernel), stride=(stride, stride), groups=groups, activation=activation, init=init)
    return NormedConv(in_channels, width, **options)
