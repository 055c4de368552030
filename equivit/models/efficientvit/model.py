"""EfficientViT (MIT): inverted bottlenecks, with linear attention in the later stages.

Source: EfficientViT (arXiv 2205.14756), with the classifiers of timm.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from equivit import constraints, errors
from equivit.constraints import Depth, PositiveInt
from equivit.layers import dense
from equivit.layers.convolution import NormedConv
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.grid import Layout
from equivit.layers.stack import Stack
from equivit.layers.stochastic_depth import drop_path
from equivit.models.efficientvit.attention import LinearAttention
from equivit.models.efficientvit.separable_conv import InvertedBottleneck, SeparableConv
from equivit.models.image_config import ImageConfig
from equivit.models.model import Preset
from equivit.models.staged import Map, Staged

STAGES = 4
ATTENTION = (2, 3)  # stages with attention, whose bottlenecks have fewer norms
STRIDE = 2  # of the stem; each stage doubles it


@dataclasses.dataclass(frozen=True)
class EfficientViTConfig(ImageConfig):
    """The configuration of an EfficientViT: the fields of its base and these.  Official classifiers had drop_path=0.05.

    Attributes:
      widths: width of the stem and of each of the four stages.
      depths: number of residual blocks of the stem, and of blocks per stage.  The first two stages count the block that
        halves the map; the last two, which have attention, do not.
      neck_widths: widths of the linear maps before and after the mean; the head reads the second.
      head_channels: channels of an attention head.
      statistics_groups: number of runs of images with separate batch statistics (`BatchNorm`).
    """

    widths: tuple[PositiveInt, ...]
    depths: tuple[Depth, ...]
    neck_widths: tuple[PositiveInt, PositiveInt]
    head_channels: PositiveInt = 16
    statistics_groups: PositiveInt = 1
    unroll: bool | None = None

    def __post_init__(self):
        constraints.check_fields(self, "EfficientViT")
        for name in ("widths", "depths"):
            if len(value := getattr(self, name)) != 1 + STAGES:
                raise ValueError(
                    f"EfficientViT: {name}={value} must have {1 + STAGES} entries, of the stem and of {STAGES} stages."
                )
        for stage in ATTENTION:
            width = self.widths[1 + stage]
            what = f"the width of stage {stage}, {width}"
            errors.divides("EfficientViT: head_channels", self.head_channels, width, what)

    def blocks(self, stage: int) -> int:
        """Number of blocks of a stage, including the first, which halves the map."""
        return self.depths[1 + stage] + (stage in ATTENTION)

    @property
    def depth(self) -> int:
        """Number of blocks of all stages, without the stem."""
        return sum(self.blocks(stage) for stage in range(STAGES))

    @property
    def map_widths(self) -> tuple[int, ...]:
        return self.widths[1:]

    def build(self, rngs: nnx.Rngs) -> "EfficientViT":
        return EfficientViT(self, rngs=rngs)


class Stem(nnx.Module):
    """A convolution that halves the image, then separable convolutions with residuals.

    They are a list, not a `Stack`: published models have one, and layer counts start after it.

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].  Options: `statistics_groups` and `rngs` of `NormedConv`.
    """

    def __init__(self, in_channels: int, width: int, depth: int, **options: Any):
        self.conv = NormedConv(in_channels, width, kernel=(3, 3), stride=(2, 2), activation=dense.hard_swish, **options)
        self.blocks = nnx.List([SeparableConv(width, **options) for _ in range(depth)])

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.conv(x, train=train)
        for block in self.blocks:
            x = x + block(x, train=train)
        return x


class Block(nnx.Module):
    """x + path(attention(x)), if there is attention; x + path(local(x)).

    The first block of a stage is local(x) alone, which halves the map.

    Shapes: [*B, h, w, width] -> the same; for the first block [*B, H, W, in_channels] -> [*B, h, w, width].
    """

    def __init__(self, attention: LinearAttention | None, local: InvertedBottleneck, *, residual: bool = True):
        self.attention, self.local, self.residual = attention, local, residual

    def __call__(
        self, x: jax.Array, layout: Layout | None = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> jax.Array:
        """The map after the block; arguments as in `Stack`, where `layout` is unused: a map has its grid."""
        keys = split(key)
        if self.attention is not None:
            x = x + drop_path(self.attention(x, train=train), rate, keys[0], axes=3)
        y = self.local(x, train=train)
        return x + drop_path(y, rate, keys[1], axes=3) if self.residual else y


class EfficientViT(Staged):
    """An EfficientViT; see `EfficientViTConfig`.

    After the last stage the neck widens the map, averages it and widens the mean, which the head reads.
    """

    before = ("stem",)

    def __init__(self, config: EfficientViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(statistics_groups=config.statistics_groups, rngs=rngs)
        self.stem = Stem(config.in_channels, config.widths[0], config.depths[0], **options)
        self.stages = nnx.List([_stage(config, stage, rngs) for stage in range(STAGES)])
        self.neck = Neck(config.widths[-1], config.neck_widths, **options)
        width, classes = config.neck_widths[1], config.num_classes
        self.head = None if classes is None else dense.Linear(width, classes, rngs=rngs)

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        return Map.of_images(images).strided(self.stem(images, train=train), 2)

    def stride(self, stage: int, start: int, stop: int) -> int:
        return 1 if start else 2  # the first block halves the map

    def pool(self, last: Map, *, train: bool = False) -> jax.Array:
        """The last map after the neck."""
        return self.neck(last.tokens, train=train)


class Neck(nnx.Module):
    """Pointwise linear map, batch norm, hard-swish, mean; then linear map, layer norm, hard-swish.

    Shapes: [*B, h, w, in_channels] -> [*B, widths[1]].

    Args:
      widths: output widths of the two linear maps.
    """

    def __init__(self, in_channels: int, widths: tuple[int, int], *, statistics_groups: int, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(kernel=(1, 1), activation=dense.hard_swish, statistics_groups=statistics_groups)
        self.conv = NormedConv(in_channels, widths[0], **options, rngs=rngs)
        self.linear = dense.Linear(*widths, bias=False, rngs=rngs)
        self.norm = dense.LayerNorm(widths[1], eps=1e-5)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.conv(x, train=train).mean((-3, -2))
        return dense.hard_swish(self.norm(self.linear(x)))


def _stage(config: EfficientViTConfig, stage: int, rngs: nnx.Rngs) -> Stack:
    """A block that halves the map, then a scan over residual blocks."""
    before, width = config.widths[stage : stage + 2]
    options: dict[str, Any] = dict(norm=stage not in ATTENTION, statistics_groups=config.statistics_groups)

    def first(rngs):
        return Block(None, InvertedBottleneck(before, width, stride=2, **options, rngs=rngs), residual=False)

    def block(rngs):
        attention = None
        if stage in ATTENTION:
            groups = config.statistics_groups
            attention = LinearAttention(width, head_channels=config.head_channels, statistics_groups=groups, rngs=rngs)
        return Block(attention, InvertedBottleneck(width, width, **options, rngs=rngs))

    runs = [(1, first), (config.blocks(stage) - 1, block)]
    return Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)


# Published sizes (the official code and timm).
NAMES = {
    "efficientvit_b0": Preset(
        EfficientViTConfig, dict(widths=(8, 16, 32, 64, 128), depths=(1, 2, 2, 2, 2), neck_widths=(1024, 1280))
    ),
    "efficientvit_b1": Preset(
        EfficientViTConfig, dict(widths=(16, 32, 64, 128, 256), depths=(1, 2, 3, 3, 4), neck_widths=(1536, 1600))
    ),
}
