"""MobileNetV4: a table of inverted bottlenecks, and of attention with shared keys in the hybrid model.

Source: MobileNetV4 (arXiv 2404.10518), with the tables, paddings and epsilons of timm, where its public weights were
trained.  "Jumbo" (Section 4.1) compares with it.
"""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, PositiveFloat, PositiveInt
from equivit.layers import dense
from equivit.layers.stack import Stack
from equivit.models.image_config import ImageConfig
from equivit.models.mobilenetv4.attention import MobileAttention
from equivit.models.mobilenetv4.inverted_bottleneck import (
    FusedInvertedBottleneck,
    PlainConv,
    UniversalInvertedBottleneck,
    normed_conv,
)
from equivit.models.model import Preset
from equivit.models.staged import Map, Staged

CLASSIFIER = nnx.initializers.variance_scaling(1 / 3, "fan_out", "uniform")  # bounded by 1 / sqrt(classes), as in timm


@dataclasses.dataclass(frozen=True)
class Spec:
    """One block of a table, written like `str(spec)`; fields that a kind of block lacks are 0.

    | written                | block                                                                         |
    |------------------------|-------------------------------------------------------------------------------|
    | "conv 3 s2 32"         | convolution 3x3 at stride 2 to 32 channels                                    |
    | "fused 3 s2 e4 48"     | the same to 4 times as many channels as there are, then 1x1 to 48             |
    | "uib 3/5 s2 e4 80"     | depthwise 3x3, 1x1 to 4 times the channels, depthwise 5x5 at stride 2, to 80  |
    | "mqa 4x64 kv2 160"     | attention of 4 heads of 64 channels, with keys and values at stride 2         |

    A kernel of 0 means no depthwise convolution, a stride of 1 is not written, and "2x uib ..." is two blocks.

    Attributes:
      kind: "conv", "fused", "uib" or "mqa".
      width: output channels.
      start: kernel of the first depthwise convolution.
      kernel: kernel of the convolution; in "uib", of the second depthwise convolution.
      stride: stride of the block.
      expansion: ratio of hidden to input channels.
      heads, channels: number of attention heads, and channels per head.
      kv_stride: stride of the convolutions for keys and values.
    """

    kind: str
    width: int
    start: int = 0
    kernel: int = 0
    stride: int = 1
    expansion: int = 0
    heads: int = 0
    channels: int = 0
    kv_stride: int = 1

    def __str__(self) -> str:
        sizes = {"uib": f"{self.start}/{self.kernel}", "mqa": f"{self.heads}x{self.channels}"}
        words = [self.kind, sizes.get(self.kind, str(self.kernel))]
        words += [f"s{self.stride}"] * (self.stride > 1) + [f"e{self.expansion}"] * bool(self.expansion)
        return " ".join([*words, *[f"kv{self.kv_stride}"] * (self.kv_stride > 1), str(self.width)])


_NUMBER, _ODD, _STRIDE = r"[1-9]\d{0,4}", r"(?:[1-9]\d?)?[13579]", r"(?: s(?P<stride>[12]))?"
_BLOCKS = {
    "conv": rf"conv (?P<kernel>{_ODD}){_STRIDE}",
    "fused": rf"fused (?P<kernel>{_ODD}){_STRIDE} e(?P<expansion>{_NUMBER})",
    "uib": rf"uib (?P<start>0|{_ODD})/(?P<kernel>0|{_ODD}){_STRIDE} e(?P<expansion>{_NUMBER})",
    "mqa": rf"mqa (?P<heads>{_NUMBER})x(?P<channels>{_NUMBER})(?: kv(?P<kv_stride>[12]))?",
}


@functools.cache
def parsed(stage: str) -> tuple[Spec, ...]:
    """Parse the blocks of a stage, separated by commas.

    Raises:
      ValueError: a part is not a block.
    """
    specs = []
    for text in stage.split(","):
        for kind, pattern in _BLOCKS.items():
            if match := re.fullmatch(rf"(?:(?P<times>[1-9]\d?)x )?{pattern} (?P<width>{_NUMBER})", text.strip()):
                numbers = {name: int(value) for name, value in match.groupdict().items() if value is not None}
                specs += numbers.pop("times", 1) * [Spec(kind, **numbers)]
                break
        else:
            raise ValueError(f"MobileNetV4: stages: {text.strip()!r} is not a block; write it like 'uib 3/5 s2 e4 80'.")
    return tuple(specs)


@dataclasses.dataclass(frozen=True)
class MobileNetV4Config(ImageConfig):
    """The configuration of a MobileNetV4: the fields of its base and these.

    Attributes:
      stages: the table: for each stage its blocks as written by `Spec`, separated by commas.
      stem_width: channels of the convolution before all blocks, 3x3 at stride 2.
      head_width: channels of the 1x1 convolution between the mean of the last map and the head.
      layer_scale: initial layer scale of "uib" and "mqa" branches; None for none.
      drop_path: a single rate; block i of n uses i / n of it, as in timm.
      statistics_groups: number of runs of images with separate batch statistics, like the devices of the original.
    """

    norm_eps: ClassVar[float] = 1e-5  # for layer norms that decoders add; the model has batch norms only

    stages: tuple[str, ...]
    stem_width: PositiveInt = 32
    head_width: PositiveInt = 1280
    layer_scale: PositiveFloat | None = None
    statistics_groups: PositiveInt = 1
    _: dataclasses.KW_ONLY
    drop_path: Below1 = 0.0

    def __post_init__(self):
        constraints.check_fields(self, "MobileNetV4")
        for spec, before in zip(itertools.chain(*self.blocks), self.inputs, strict=True):
            if spec.kind == "uib" and spec.stride > 1 and not spec.start and not spec.kernel:
                raise ValueError(
                    f"MobileNetV4: stages: '{spec}' has no depthwise convolution for its stride; write 'uib 3/0 ...'."
                )
            if spec.kind == "mqa" and spec.width != before:
                raise ValueError(f"MobileNetV4: stages: '{spec}' must keep its {before} input channels.")

    @property
    def blocks(self) -> tuple[tuple[Spec, ...], ...]:
        """The blocks of each stage."""
        return tuple(map(parsed, self.stages))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Input channels of each block, over all stages."""
        return (self.stem_width, *(spec.width for stage in self.blocks for spec in stage))[:-1]

    @property
    def depth(self) -> int:
        """Number of blocks of all stages."""
        return sum(map(len, self.blocks))

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride in pixels of the map after each block, along both axes."""
        steps = (spec.stride for stage in self.blocks for spec in stage)
        return tuple(itertools.accumulate(steps, int.__mul__, initial=2))[1:]

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of blocks of each resolution, for dense-prediction decoders; the published sizes have four."""
        return tuple(len(list(same)) for _, same in itertools.groupby(self.strides))

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the last map of each resolution."""
        after = (*self.inputs[1:], self.features)
        return tuple(after[stop - 1] for stop in itertools.accumulate(self.depths))

    @property
    def features(self) -> int:
        """Channels of the last map."""
        return self.blocks[-1][-1].width

    @property
    def rates(self) -> np.ndarray | None:
        rates = np.arange(self.depth, dtype=np.float32) * np.float32(self.drop_path / self.depth)
        return rates if rates.any() else None

    def build(self, rngs: nnx.Rngs) -> "MobileNetV4":
        return MobileNetV4(self, rngs=rngs)


class MobileNetV4(Staged):
    """A MobileNetV4; see `MobileNetV4Config`.

    The last map is averaged before the convolution that widens it, so its batch norm has one entry per image.
    """

    before = ("stem",)

    def __init__(self, config: MobileNetV4Config, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(statistics_groups=config.statistics_groups, rngs=rngs)
        self.stem = normed_conv(config.in_channels, config.stem_width, 3, 2, **options)
        inputs = iter(config.inputs)
        # Each block is a separate run: few neighbours are alike.
        makes = [
            [(1, functools.partial(made, config, next(inputs), spec)) for spec in stage] for stage in config.blocks
        ]
        self.stages = nnx.List([Stack(runs, remat=config.remat, rngs=rngs) for runs in makes])
        self.neck = normed_conv(config.features, config.head_width, 1, **options)
        classes = config.num_classes
        self.head = None if classes is None else dense.Linear(config.head_width, classes, init=CLASSIFIER, rngs=rngs)

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        return Map.of_images(images).strided(self.stem(images, train=train), 2)

    def stride(self, stage: int, start: int, stop: int) -> int:
        return math.prod(spec.stride for spec in self.config.blocks[stage][start:stop])

    def pool(self, last: Map, *, train: bool = False) -> jax.Array:
        """The widened mean of the last map, [B, head_width]."""
        return self.neck(last.tokens.mean((1, 2), keepdims=True), train=train)[:, 0, 0]


def made(config: MobileNetV4Config, before: int, spec: Spec, rngs: nnx.Rngs) -> nnx.Module:
    """A block with `before` input channels."""
    options: dict[str, Any] = dict(statistics_groups=config.statistics_groups, rngs=rngs)
    scale: dict[str, Any] = dict(layer_scale=config.layer_scale)
    if spec.kind == "mqa":
        options |= dict(num_heads=spec.heads, head_channels=spec.channels, kv_stride=spec.kv_stride)
        return MobileAttention(before, **scale, **options)
    options |= dict(stride=spec.stride)
    if spec.kind == "conv":
        return PlainConv(before, spec.width, kernel=spec.kernel, **options)
    options |= dict(hidden=spec.expansion * before)
    if spec.kind == "fused":
        return FusedInvertedBottleneck(before, spec.width, kernel=spec.kernel, **options)
    return UniversalInvertedBottleneck(before, spec.width, start=spec.start, mid=spec.kernel, **scale, **options)


# The tables of the paper, from timm.
CONV_SMALL = (
    "conv 3 s2 32, conv 1 32",
    "conv 3 s2 96, conv 1 64",
    "uib 5/5 s2 e3 96, 4x uib 0/3 e2 96, uib 3/0 e4 96",
    "uib 3/3 s2 e6 128, uib 5/5 e4 128, uib 0/5 e4 128, uib 0/5 e3 128, 2x uib 0/3 e4 128",
    "conv 1 960",
)
CONV_MEDIUM = (
    "fused 3 s2 e4 48",
    "uib 3/5 s2 e4 80, uib 3/3 e2 80",
    "uib 3/5 s2 e6 160, 2x uib 3/3 e4 160, uib 3/5 e4 160, uib 3/3 e4 160, uib 3/0 e4 160, uib 0/0 e2 160, "
    "uib 3/0 e4 160",
    "uib 5/5 s2 e6 256, uib 5/5 e4 256, 2x uib 3/5 e4 256, uib 0/0 e4 256, uib 3/0 e4 256, uib 3/5 e2 256, "
    "uib 5/5 e4 256, 2x uib 0/0 e4 256, uib 5/0 e2 256",
    "conv 1 960",
)
HYBRID_MEDIUM = (
    *CONV_MEDIUM[:2],
    "uib 3/5 s2 e6 160, uib 0/0 e2 160, uib 3/3 e4 160, uib 3/5 e4 160, "
    "mqa 4x64 kv2 160, uib 3/3 e4 160, mqa 4x64 kv2 160, uib 3/0 e4 160, mqa 4x64 kv2 160, uib 3/3 e4 160, "
    "mqa 4x64 kv2 160, uib 3/0 e4 160",
    "uib 5/5 s2 e6 256, uib 5/5 e4 256, 2x uib 3/5 e4 256, uib 0/0 e2 256, uib 3/5 e2 256, uib 0/0 e2 256, "
    "uib 0/0 e4 256, mqa 4x64 256, uib 3/0 e4 256, mqa 4x64 256, uib 5/5 e4 256, mqa 4x64 256, uib 5/0 e4 256, "
    "mqa 4x64 256, uib 5/0 e4 256",
    "conv 1 960",
)
NAMES = {
    "mobilenetv4_conv_small": Preset(MobileNetV4Config, dict(stages=CONV_SMALL)),
    "mobilenetv4_conv_medium": Preset(MobileNetV4Config, dict(stages=CONV_MEDIUM)),
    "mobilenetv4_hybrid_medium": Preset(MobileNetV4Config, dict(stages=HYBRID_MEDIUM, layer_scale=1e-5)),
}
