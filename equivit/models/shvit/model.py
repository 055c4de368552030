"""SHViT: convolutional blocks, with single-head attention on some channels in the later stages.

Source: SHViT (arXiv 2401.16456), and its code in timm.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Depth, NonNegativeInt, PositiveInt
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import NormedConv
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.grid import Layout
from equivit.layers.stack import Stack
from equivit.layers.stochastic_depth import drop_path
from equivit.models.model import Preset
from equivit.models.shvit.attention import SingleHeadAttention
from equivit.models.shvit.merging import ConvMerging
from equivit.models.staged import Map, Staged, StagedConfig

STRIDE = 16  # of the first stage; doubles with each stage
EXPANSION = 2  # hidden width of feed-forward parts / width


@dataclasses.dataclass(frozen=True)
class SHViTConfig(StagedConfig):
    """The configuration of an SHViT: the fields of its bases and these.  The official code has no drop path.

    Attributes:
      widths, depths: width and blocks of each stage.  The first width is a multiple of 8.
      partial_widths: number of channels that attend in each stage; 0 for no attention.
      qk_width: channels of queries and of keys.
      statistics_groups: number of runs of images with separate batch statistics (`BatchNorm`).
    """

    widths: tuple[PositiveInt, ...]
    depths: tuple[Depth, ...]
    partial_widths: tuple[NonNegativeInt, ...]
    qk_width: PositiveInt = 16
    statistics_groups: PositiveInt = 1

    def __post_init__(self):
        constraints.check_fields(self, "SHViT")
        self.check_stages("widths", "partial_widths")
        if (width := self.widths[0]) % 8:
            raise ValueError(
                f"SHViT: widths={self.widths}: the first must be a multiple of 8, because the stem "
                f"has fractions of it; the nearest is {max(8, round(width / 8) * 8)}."
            )
        for stage, (width, partial) in enumerate(zip(self.widths, self.partial_widths, strict=True)):
            if partial > width:
                raise ValueError(
                    f"SHViT: partial_widths={self.partial_widths}: stage {stage} has {width} channels, so "
                    f"{partial} cannot attend; the most is {width}."
                )

    def build(self, rngs: nnx.Rngs) -> "SHViT":
        return SHViT(self, rngs=rngs)


class ResidualConv(nnx.Module):
    """x + path(convolution of x): depthwise, 3x3, with batch norm.

    Shapes: [*B, h, w, width] -> the same.  Options as in `NormedConv`.
    """

    def __init__(self, width: int, **options: Any):
        self.conv = NormedConv(width, width, kernel=(3, 3), groups=width, **options)
        self.residual = True

    def __call__(self, x: jax.Array, *, rate: Rate = 0.0, train: bool = False, key: Key = None) -> jax.Array:
        y = self.conv(x, train=train)
        return x + drop_path(y, rate, key, axes=3) if self.residual else y

    def folded(self) -> "ResidualConv":
        """The same map as one convolution, with x added through the centre tap.

        The centre tap carries the residual stream, so "mixed" precision must not round this kernel.
        """
        module = nnx.clone(self)
        module.conv, module.residual = self.conv.folded(), False
        kernel, _ = module.conv.conv.affine()
        module.conv.conv.kernel = nnx.Param(kernel.at[1, 1].add(1))
        return module


class FeedForward(nnx.Module):
    """Pointwise linear map to twice the width, ReLU, pointwise linear map; with batch norms.

    Shapes: [*B, h, w, width] -> the same.  Options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, width: int, **options: Any):
        hidden = EXPANSION * width
        options |= dict(kernel=(1, 1))
        self.fc1 = NormedConv(width, hidden, activation=dense.relu, **options)
        self.fc2 = NormedConv(hidden, width, scale=0.0, **options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return self.fc2(self.fc1(x, train=train), train=train)


class Block(nnx.Module):
    """A residual convolution; x + path(attention(x)), if there is attention; x + path(mlp(x)).

    Shapes: [*B, h, w, width] -> the same.

    Args:
      partial: channels that attend; 0 for none.
      options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, width: int, partial: int, *, qk_width: int, **options: Any):
        self.conv = ResidualConv(width, scale=0.0, **options)
        self.attention: Any = SingleHeadAttention(width, partial, qk_width=qk_width, **options) if partial else None
        self.mlp = FeedForward(width, **options)

    def __call__(
        self, x: jax.Array, layout: Layout | None = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> jax.Array:
        """The map after the block; arguments as in `Stack`, where `layout` is unused: a map has its grid."""
        keys = split(key, 3)
        x = self.conv(x, rate=rate, train=train, key=keys[0])
        if self.attention is not None:
            x = x + drop_path(self.attention(x, train=train), rate, keys[1], axes=3)
        return x + drop_path(self.mlp(x, train=train), rate, keys[2], axes=3)


class Downsampling(nnx.Module):
    """Between stages: halves the map, with a residual convolution and an MLP before and after.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].  Options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, in_channels: int, width: int, **options: Any):
        self.conv1, self.mlp1 = ResidualConv(in_channels, **options), FeedForward(in_channels, **options)
        self.merge = ConvMerging(in_channels, width, **options)
        self.conv2, self.mlp2 = ResidualConv(width, **options), FeedForward(width, **options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.conv1(x, train=train)
        x = self.merge(x + self.mlp1(x, train=train), train=train)
        x = self.conv2(x, train=train)
        return x + self.mlp2(x, train=train)


class Stage(nnx.Module):
    """A downsampling, unless it is the first stage, then blocks."""

    def __init__(self, config: SHViTConfig, stage: int, *, rngs: nnx.Rngs):
        before, width, groups = config.widths[stage - 1], config.widths[stage], config.statistics_groups

        def block(rngs):
            options: dict[str, Any] = dict(qk_width=config.qk_width, statistics_groups=groups, rngs=rngs)
            return Block(width, config.partial_widths[stage], **options)

        self.downsampling: Any = Downsampling(before, width, statistics_groups=groups, rngs=rngs) if stage else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)


class NormedLinear(nnx.Module):
    """Batch norm, then a linear map.  Shapes: [*B, in_features] -> [*B, out_features]."""

    def __init__(self, in_features: int, out_features: int, *, statistics_groups: int, rngs: nnx.Rngs):
        self.norm = BatchNorm(in_features, groups=statistics_groups)
        self.linear = dense.Linear(in_features, out_features, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])  # batch-statistics groups are over images, in any batch axes
        y = self.linear(self.norm(flat, train=train))
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def folded(self) -> dense.Linear:
        """The same map for inference: one linear map, folded from the running statistics."""
        linear, (factor, shift) = nnx.clone(self.linear), self.norm.affine()
        weight = self.linear.weight[...]
        linear.weight.set_value((weight * factor[:, None]).astype(weight.dtype))
        # A float32 sum: accelerators round the factors of matrix products.
        linear.bias.set_value(self.linear.bias[...] + jnp.sum(shift[:, None] * weight, 0))
        return linear


class SHViT(Staged):
    """A SHViT; see `SHViTConfig`.  The head, which begins with a batch norm, reads the mean of the last map."""

    before = ("patch_embed",)

    def __init__(self, config: SHViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        groups, width = config.statistics_groups, config.widths[0]
        widths = (config.in_channels, width // 8, width // 4, width // 2, width)
        conv = functools.partial(NormedConv, kernel=(3, 3), stride=(2, 2), statistics_groups=groups, rngs=rngs)
        activations = (dense.relu, dense.relu, dense.relu, None)
        self.patch_embed = nnx.List([conv(*widths[i : i + 2], activation=activations[i]) for i in range(4)])
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        width, classes = config.widths[-1], config.num_classes
        self.head: Any = None if classes is None else NormedLinear(width, classes, statistics_groups=groups, rngs=rngs)

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        x = images
        for conv in self.patch_embed:
            x = conv(x, train=train)
        return Map.of_images(images).strided(x, STRIDE)

    def begin(self, stage: int, at: Map, *, train: bool = False) -> Map:
        """Halve the map, except in the first stage."""
        downsampling = self.stages[stage].downsampling
        return at if downsampling is None else at.strided(downsampling(at.tokens, train=train), 2)

    def pool(self, last: Map, *, train: bool = False) -> jax.Array:
        """The mean of the last map."""
        return last.tokens.mean((1, 2))

    def classify(self, pooled: jax.Array, *, train: bool = False) -> jax.Array:
        return self.head(pooled, train=True) if train else self.head(pooled)  # the head of a folded model is linear


# Published sizes (the official configurations and timm).
NAMES = {
    "shvit_s1": Preset(SHViTConfig, dict(widths=(128, 224, 320), depths=(2, 4, 5), partial_widths=(0, 48, 68))),
    "shvit_s2": Preset(SHViTConfig, dict(widths=(128, 308, 448), depths=(2, 4, 5), partial_widths=(0, 66, 96))),
    "shvit_s3": Preset(SHViTConfig, dict(widths=(192, 352, 448), depths=(3, 5, 5), partial_widths=(0, 75, 96))),
}
