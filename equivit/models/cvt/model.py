"""CvT: stages that begin with a convolution, of blocks whose attention convolves its queries, keys and values.

Source: CvT (arXiv 2103.15808).  Maps are padded with zeros, or around the torus (`padding="circular"`), as the models
that "Making Vision Transformers Truly Shift-Equivariant" compares with under circular shifts.
"""

import dataclasses
import functools
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Size
from equivit.layers import dense
from equivit.layers.convolution import MODES, Pair, output_size
from equivit.layers.dropout import dropout, split
from equivit.layers.grid import Frame, Layout, check_images
from equivit.layers.polyphase import FILTERING
from equivit.layers.prefix import token
from equivit.layers.stack import REMAT, Stack, check_blocks
from equivit.models.adaptive import SELECT, AdaptiveConfig, check_torus, placed
from equivit.models.cvt.attention import ConvAttention, ConvBlock, ConvEmbed
from equivit.models.features import Features, Grid
from equivit.models.image_config import StagedConfig
from equivit.models.model import Preset
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

PARTS = ("token", "merge", "pool")  # that may be adaptive
ACTIVATIONS = {"quick_gelu": dense.quick_gelu, "gelu": dense.gelu}


@dataclasses.dataclass(frozen=True)
class CvTConfig(AdaptiveConfig, StagedConfig):
    """The choices that make one CvT.

    Attributes:
      widths, depths, num_heads: width, blocks, and heads per block, of each stage.
      kernels, strides, paddings: of the convolution at the beginning of each stage, along both axes.  In an adaptive
        model 2 padding < kernel <= 2 padding + stride, and with `select="output"` "merge" takes kernels of 2 or 3 with
        a stride of 2.
      kv_stride: of the convolutions for keys and values, along both axes.
      class_token: whether the last stage has a class token, which the head reads; without one it reads the mean.
      activation: of the MLPs: "quick_gelu", with which the official code trained its weights, or the exact "gelu", with
        which Transformers runs them.
      padding: of every convolution, but for those of adaptive parts, "zeros" or "circular" (`layers/convolution.py`).
        Sizes are the same with both.
      image_size: (height, width); images of any size can be used, as published from 3 pixels on.  Circular shifts need
        one that all strides together divide, that of keys and values included: 32 pixels as published.
      num_classes: None for no head.
      mlp_ratio: hidden width of the MLP in units of its width.
      norm_eps: epsilon of layer norms; that of batch norms is 1e-5.
      drop_path: probability of dropping a branch of a block for a sample, used when a key is given.  With a number for
        each stage it grows linearly in a stage, from 0 in its first block to that number in its last; the official
        configurations have (0, 0, 0.1).
      dropout: the same for single entries.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (the first convolution begins
        where the content decides; A-token), "merge" (those between stages too; A-PMerge), "pool" (keys and values too).
        The convolutions of an adaptive part, of "pool" those for queries too, pad around the torus.  The weights are
        those of the ordinary model.
      select, anchor: as in `SwinConfig`.
      remat, unroll: how blocks are run (`layers/stack.py`).
    """

    KNOWN_PARTS = PARTS

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
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # in this order a message names the wrong part
    select: Annotated[str, OneOf(SELECT)] = "output"
    anchor: bool = True
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        constraints.check_fields(self, "CvT")
        stages = ["widths", "num_heads", "kernels", "strides", "paddings"]
        self.check_stages(*stages, *["drop_path"] * isinstance(self.drop_path, tuple))
        self.check_heads(self.num_heads, self.widths)
        self._check_phases()
        self.grids(self.image_size, "CvT: image_size")

    def _check_phases(self) -> None:
        """ValueError for convolutions that have no phases on a torus, where a model is adaptive."""
        for stage, (k, s, p) in enumerate(zip(self.kernels, self.strides, self.paddings, strict=True)):
            if self.parts and not 2 * p < k <= 2 * p + s:
                fitting = range(max(0, (k - s + 1) // 2), (k + 1) // 2)
                near = min(fitting, key=lambda padding: abs(padding - p), default=None)
                fix = f"take kernels[{stage}]={k + 1}" if near is None else f"the nearest is {near}"
                raise ValueError(
                    f"CvT: paddings[{stage}]={p}: an adaptive model takes paddings p with 2 p < kernel <= 2 p + "
                    f"stride, and stage {stage} has a kernel of {k} and a stride of {s}; {fix}."
                )
            if stage and "merge" in self.parts and self.select == "output" and (s != 2 or k not in FILTERING):
                raise ValueError(
                    f"CvT: kernels[{stage}]={k} and strides[{stage}]={s}: the adaptive part 'merge' takes kernels of 2 "
                    "or 3 with a stride of 2, or select='input'."
                )

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """ValueError unless all strides divide an image, as an adaptive model needs it."""
        unit = math.prod(self.strides) * self.kv_stride
        why = f"strides {self.strides}, and {self.kv_stride} of keys and values"
        check_torus("CvT", image_size, (unit, unit), why)

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
      tokens: [B, prefix + h w, width].
      grid: (h, w).
      stage: that the block belongs to.
      frame: where the map lies on the image.
    """

    tokens: jax.Array
    grid: Pair
    stage: int
    frame: Frame


class Stage(nnx.Module):
    """A convolution, unless it is the first stage, whose own comes before all; a class token in the last; blocks."""

    def __init__(self, config: CvTConfig, stage: int, *, rngs: nnx.Rngs):
        width, heads, stride = config.widths[stage], config.num_heads[stage], (config.kv_stride, config.kv_stride)

        select = config.select if "pool" in config.parts else None

        def block(rngs):
            hidden, activation = round(config.mlp_ratio * width), ACTIVATIONS[config.activation]
            return ConvBlock(
                norm1=dense.LayerNorm(width, eps=config.norm_eps),
                attention=ConvAttention(
                    width, heads, stride=stride, mode=config.mode("pool"), select=select, rngs=rngs
                ),
                norm2=dense.LayerNorm(width, eps=config.norm_eps),
                mlp=dense.Mlp(width, hidden, activation=activation, rngs=rngs),
                dropout=config.dropout,
            )

        self.embed = _embed(config, stage, rngs) if stage else None
        self.class_token = token((width,), 0.02, rngs) if config.prefix(stage) else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)

    def begin(self, x: jax.Array, frame: Frame, config: CvTConfig) -> tuple[jax.Array, Frame, dict[str, Choice]]:
        """The map after the convolution of the stage, [B, h, w, C] -> [B, h w, width], and what was chosen for it."""
        assert self.embed is not None
        stride = self.embed.conv.stride
        if "merge" not in config.parts:
            return jax.lax.collapse(self.embed(x), 1, 3), frame.every(stride), {}
        x, choice = self.embed.adaptive(x, config.select)
        return x, frame.rolled(shifts.phases(choice.index, stride)).every(stride), {"embed": choice}

    def tokens(self, x: jax.Array) -> jax.Array:
        """The tokens that the blocks take, of those of a map: [B, h w, width] -> [B, prefix + h w, width]."""
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
        """The input of the head, [*B, features]: the class token or the mean of all tokens, after the norm."""
        last, _, _ = self.trunk(images, key=key, train=train)
        pooled = self.norm(last.tokens[:, 0]) if self.config.class_token else self.norm(last.tokens).mean(-2)
        return pooled.reshape(*images.shape[:-3], pooled.shape[-1])

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The choices of the adaptive parts for each image; see `Swin.selections`.

        Names are "stage0_embed", "stage0_layer0_kv" and so on.
        """
        return self.trunk(images, collect=True)[2]

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
          ValueError: blocks are no indices.
        """
        check_blocks("CvT", blocks, self.config.depth)
        last, seen, _ = self.trunk(images, capture=blocks, key=key, train=train)
        batch = images.shape[:-3]
        return self._features(
            last, batch, norm, {index: self._features(at, batch, norm, {}) for index, at in seen.items()}
        )

    def trunk(
        self,
        images: jax.Array,
        *,
        capture: tuple[int, ...] = (),
        collect: bool = False,
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[Map, dict[int, Map], dict[str, Choice]]:
        """The tokens after the last block, before the final norm; those after the blocks in `capture`; all choices.

        Those of the blocks are among the choices with `collect`.
        """
        config, rates = self.config, self.config.rates
        grids = config.grids(check_images(images, config.in_channels, (1, 1)))
        x, frame, chosen = self._embedded(images)
        seen, first = {}, 0
        for number, (stage, grid) in enumerate(zip(self.stages, grids, strict=True)):
            stop, layout = first + len(stage.blocks), Layout(grid, config.prefix(number))
            if stage.embed is not None:
                x, frame, choice = stage.begin(x.reshape(len(x), *grids[number - 1], x.shape[-1]), frame, config)
                chosen |= {f"stage{number}_{name}": value for name, value in choice.items()}
            x, part = stage.blocks(
                stage.tokens(x),
                layout,
                collect=functools.partial(_chosen, layout) if collect and "pool" in config.parts else None,
                rates=None if rates is None else rates[first:stop],
                capture=tuple(index - first for index in capture if first <= index < stop),
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            if part.collected is not None:
                for layer in range(len(stage.blocks)):
                    name = f"stage{number}_layer{layer}_kv"
                    chosen[name] = jax.tree.map(lambda values, layer=layer: values[layer], part.collected)
            seen |= {first + index: Map(tokens, grid, number, frame) for index, tokens in part.outputs.items()}
            first = stop
        return Map(x, grids[-1], len(grids) - 1, frame), seen, chosen

    def _embedded(self, images: jax.Array) -> tuple[jax.Array, Frame, dict[str, Choice]]:
        """The tokens after the first convolution, [B, h w, width], and the choice of where it begins."""
        config, conv = self.config, self.patch_embed.conv
        if config.parts:
            config.check_torus(images.shape[-3:-1])
        flat = images.reshape(-1, *images.shape[-3:])
        flat, frame, chosen = placed(flat, config, *conv.affine(), stride=conv.stride, padding=conv.padding)
        chosen = {"stage0_embed": chosen["patch_embed"]} if chosen else {}
        return jax.lax.collapse(self.patch_embed(flat), 1, 3), frame.every(conv.stride), chosen

    def _features(self, at: Map, batch: tuple[int, ...], norm: bool, blocks: dict[int, Features]) -> Features:
        tokens, grid, stage, frame = at
        if norm and stage == len(self.stages) - 1:
            tokens = self.norm(tokens)
        tokens = tokens.reshape(*batch, *tokens.shape[1:])
        prefix, width = self.config.prefix(stage), tokens.shape[-1]
        patches = tokens[..., prefix:, :].reshape(*batch, *grid, width)
        values = Grid(patches, frame.stride, frame.offset.reshape(*batch, 2))
        return Features(
            tokens[..., 0, :] if prefix else None, jnp.zeros((*batch, 0, width), tokens.dtype), values, blocks
        )


def _chosen(layout: Layout, block: ConvBlock, x: jax.Array) -> Choice:
    """The phase that a block chooses for its keys and values."""
    return block.attention.choice_of(block.norm1(x), layout)


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
        mode=config.mode("merge" if stage else "token"),
        eps=config.norm_eps,
        rngs=rngs,
    )


# Published sizes (CvT, Table 2).
WIDTHS = dict(widths=(64, 192, 384), num_heads=(1, 3, 6))
NAMES = {
    "cvt_13": Preset(CvTConfig, WIDTHS | dict(depths=(1, 2, 10))),
    "cvt_21": Preset(CvTConfig, WIDTHS | dict(depths=(1, 4, 16))),
}
