"""CvT: stages that begin with a convolution, of blocks whose attention convolves its queries, keys and values.

Source: CvT (arXiv 2103.15808).  Maps are padded with zeros, or around the torus (`padding="circular"`), as the models
that "Making Vision Transformers Truly Shift-Equivariant" compares with under circular shifts.
"""

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Size
from equivit.layers import dense
from equivit.layers.conv_attention import ConvAttention, ConvBlock, ConvEmbed
from equivit.layers.convolution import MODES, Pair, output_size
from equivit.layers.drop import dropout, split
from equivit.layers.grid import Layout, check_images
from equivit.layers.prefix import token
from equivit.layers.stack import REMAT, Stack
from equivit.models.features import Features, Grid
from equivit.models.model import Preset

ACTIVATIONS = {"quick_gelu": dense.quick_gelu, "gelu": dense.gelu}


@dataclasses.dataclass(frozen=True)
class CvTConfig:
    """The choices that make one CvT.

    Attributes:
      widths, depths, num_heads: width, blocks, and heads per block, of each stage.
      kernels, strides, paddings: of the convolution at the beginning of each stage, along both axes.
      kv_stride: of the convolutions for keys and values, along both axes.
      class_token: whether the last stage has a class token, which the head reads; without one it reads the mean.
      activation: of the MLPs: "quick_gelu", with which the official code trained its weights, or the exact "gelu", with
        which Transformers runs them.
      padding: of every convolution, "zeros" or "circular" (`layers/convolution.py`).  Sizes are the same with both.
      image_size: (height, width); images of any size can be used, as published from 3 pixels on.  Circular shifts need
        one that all strides together divide, that of keys and values included: 32 pixels as published.
      num_classes: None for no head.
      mlp_ratio: hidden width of the MLP in units of its width.
      norm_eps: epsilon of layer norms; that of batch norms is 1e-5.
      drop_path: probability of dropping a branch of a block for a sample, used when a key is given.  With a number for
        each stage it grows linearly in a stage, from 0 in its first block to that number in its last; the official
        configurations have (0, 0, 0.1).
      dropout: the same for single entries.
      remat, unroll: how blocks are run (`layers/stack.py`).
    """

    widths: tuple[PositiveInt, ...]
    depths: tuple[Depth, ...]
    num_heads: tuple[PositiveInt, ...]
    kernels: tuple[PositiveInt, ...] = (7, 3, 3)
    strides: tuple[PositiveInt, ...] = (4, 2, 2)
    paddings: tuple[NonNegativeInt, ...] = (2, 1, 1)
    kv_stride: PositiveInt = 2
    class_token: bool = True
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "quick_gelu"
    padding: Annotated[str, OneOf(MODES)] = "zeros"
    image_size: Size = (224, 224)
    in_channels: PositiveInt = 3
    num_classes: PositiveInt | None = 1000
    mlp_ratio: PositiveFloat = 4.0
    norm_eps: PositiveFloat = 1e-5
    drop_path: Below1 | tuple[Below1, ...] = 0.0
    dropout: Below1 = 0.0
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        constraints.check_fields(self, "CvT")
        stages = ["widths", "num_heads", "kernels", "strides", "paddings"]
        for name in stages + ["drop_path"] * isinstance(self.drop_path, tuple):
            if len(value := getattr(self, name)) != len(self.depths):
                raise ValueError(f"CvT: {name}={value} and depths={self.depths} must have one entry per stage each.")
        for stage, (width, heads) in enumerate(zip(self.widths, self.num_heads, strict=True)):
            if width % heads:
                raise ValueError(
                    f"CvT: num_heads={self.num_heads}: the {heads} heads of stage {stage} must divide its width, "
                    f"{width}."
                )
        self.grids(self.image_size, "CvT: image_size")

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Of one image: (height, width, channels)."""
        return *self.image_size, self.in_channels

    @property
    def rates(self) -> np.ndarray | None:
        """The rate of stochastic depth of each block, [depth]; None where there is none."""
        if isinstance(self.drop_path, tuple):
            ends = zip(self.drop_path, self.depths, strict=True)
            rates = np.concatenate([np.linspace(0, last, depth, dtype=np.float32) for last, depth in ends])
        else:
            rates = np.full(self.depth, self.drop_path, np.float32)
        return rates if rates.any() else None

    def prefix(self, stage: int) -> int:
        """Tokens of a stage before its map: the class token of the last one."""
        return int(self.class_token and stage == len(self.depths) - 1)

    def stride(self, stage: int) -> Pair:
        """(rows, columns) between neighbours of a stage's map, in pixels."""
        stride = math.prod(self.strides[: stage + 1])
        return stride, stride

    def grids(self, image_size: Pair, name: str = "image") -> tuple[Pair, ...]:
        """(h, w) of the map of each stage; ValueError if the image is smaller than the first kernel."""
        sizes, where = [image_size], f"{name} {image_size[0]}x{image_size[1]}"
        for stage, (k, s, p) in enumerate(zip(self.kernels, self.strides, self.paddings, strict=True)):
            sizes.append(output_size(sizes[-1], (k, k), (s, s), (p, p), f"{where}: stage {stage}"))
        return tuple(sizes[1:])

    def build(self, rngs: nnx.Rngs) -> "CvT":
        """The model, with parameters drawn from `rngs`."""
        return CvT(self, rngs=rngs)


class Map(NamedTuple):
    """Tokens after a block.

    Attributes:
      tokens: [*B, prefix + h w, width].
      grid: (h, w).
      stage: that the block belongs to.
    """

    tokens: jax.Array
    grid: Pair
    stage: int


class Stage(nnx.Module):
    """A convolution, unless it is the first stage, whose own comes before all; a class token in the last; blocks."""

    def __init__(self, config: CvTConfig, stage: int, *, rngs: nnx.Rngs):
        width, heads, stride = config.widths[stage], config.num_heads[stage], (config.kv_stride, config.kv_stride)

        def block(rngs):
            hidden, activation = round(config.mlp_ratio * width), ACTIVATIONS[config.activation]
            return ConvBlock(
                norm1=dense.LayerNorm(width, eps=config.norm_eps),
                attention=ConvAttention(width, heads, stride=stride, mode=config.padding, rngs=rngs),
                norm2=dense.LayerNorm(width, eps=config.norm_eps),
                mlp=dense.Mlp(width, hidden, activation=activation, rngs=rngs),
                dropout=config.dropout,
            )

        self.embed = _embed(config, stage, rngs) if stage else None
        self.class_token = token((width,), 0.02, rngs) if config.prefix(stage) else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)

    def tokens(self, x: jax.Array) -> jax.Array:
        """The tokens that the blocks take, of a map: [*B, h, w, width] -> [*B, prefix + h w, width]."""
        x = jax.lax.collapse(x, x.ndim - 3, x.ndim - 1)
        if self.class_token is None:
            return x
        first = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (*x.shape[:-2], 1, x.shape[-1]))
        return jnp.concatenate([first, x], axis=-2)


class CvT(nnx.Module):
    """A CvT; see `CvTConfig`.

    The head reads the class token after a norm, or the mean of the last stage's tokens after it.
    """

    before = ("patch_embed",)

    def __init__(self, config: CvTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = _embed(config, 0, rngs)
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C].

        Args:
          key: drives drop path and dropout; None means neither.
          train: whether batch norms use and record the statistics of these images.

        Raises:
          ValueError: the image is smaller than the first kernel, or the model has no head.
        """
        if self.head is None:
            raise ValueError("CvT: the model has no head (num_classes=None); call features, or create it with classes.")
        trunk_key, head_key = split(key)
        pooled = self.pooled(images, key=trunk_key, train=train)
        return self.head(dropout(pooled, self.config.dropout, head_key))

    def pooled(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """What the head reads, [*B, features]: the class token or the mean of all tokens, after the norm."""
        last, _ = self.trunk(images, key=key, train=train)
        return self.norm(last.tokens[..., 0, :]) if self.config.class_token else self.norm(last.tokens).mean(-2)

    def features(
        self,
        images: jax.Array,
        *,
        blocks: tuple[int, ...] = (),
        norm: bool = True,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> Features:
        """Tokens after the last block, and after each of `blocks`, counted through all stages.

        There is no register, and a class token in the last stage alone.  With `norm` tokens of the last stage go
        through the final norm; those of the stages before have another width, and are as the block left them.

        Raises:
          IndexError: there is no such block.
        """
        for index in blocks:
            if not 0 <= index < self.config.depth:
                raise IndexError(f"CvT: there is no block {index}; the blocks are 0 to {self.config.depth - 1}.")
        last, seen = self.trunk(images, capture=blocks, key=key, train=train)
        return self._features(last, norm, {index: self._features(at, norm, {}) for index, at in seen.items()})

    def trunk(
        self,
        images: jax.Array,
        *,
        capture: tuple[int, ...] = (),
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[Map, dict[int, Map]]:
        """The tokens after the last block, and after those in `capture`, before the final norm."""
        config, rates = self.config, self.config.rates
        grids = config.grids(check_images(images, config.in_channels, (1, 1)))
        x, seen, first = self.patch_embed(images), {}, 0
        for number, (stage, grid) in enumerate(zip(self.stages, grids, strict=True)):
            stop = first + len(stage.blocks)
            if stage.embed is not None:
                x = stage.embed(x.reshape(*x.shape[:-2], *grids[number - 1], x.shape[-1]))
            x, part = stage.blocks(
                stage.tokens(x),
                Layout(grid, config.prefix(number)),
                rates=None if rates is None else rates[first:stop],
                capture=tuple(index - first for index in capture if first <= index < stop),
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: Map(tokens, grid, number) for index, tokens in part.outputs.items()}
            first = stop
        return Map(x, grids[-1], len(grids) - 1), seen

    def _features(self, at: Map, norm: bool, blocks: dict[int, Features]) -> Features:
        tokens, grid, stage = at
        if norm and stage == len(self.stages) - 1:
            tokens = self.norm(tokens)
        *batch, _, width = tokens.shape
        prefix = self.config.prefix(stage)
        patches = tokens[..., prefix:, :].reshape(*batch, *grid, width)
        values = Grid(patches, self.config.stride(stage), jnp.zeros((*batch, 2), jnp.int32))
        return Features(
            tokens[..., 0, :] if prefix else None, jnp.zeros((*batch, 0, width), tokens.dtype), values, blocks
        )


def _embed(config: CvTConfig, stage: int, rngs: nnx.Rngs) -> ConvEmbed:
    """The convolution at the beginning of a stage."""
    channels = (config.in_channels, *config.widths)
    k, s, p = config.kernels[stage], config.strides[stage], config.paddings[stage]
    return ConvEmbed(
        channels[stage],
        channels[stage + 1],
        kernel=(k, k),
        stride=(s, s),
        padding=(p, p),
        mode=config.padding,
        eps=config.norm_eps,
        rngs=rngs,
    )


# Published sizes (CvT, Table 2).
WIDTHS = dict(widths=(64, 192, 384), num_heads=(1, 3, 6))
NAMES = {
    "cvt_13": Preset(CvTConfig, WIDTHS | dict(depths=(1, 2, 10))),
    "cvt_21": Preset(CvTConfig, WIDTHS | dict(depths=(1, 4, 16))),
}
