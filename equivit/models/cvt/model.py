"""CvT: stages that begin with a convolution, then blocks whose attention convolves queries, keys and values.

Source: CvT (arXiv 2103.15808).  Maps are padded with zeros, or circularly (`padding="circular"`) like the baselines for
circular shifts in "Making Vision Transformers Truly Shift-Equivariant".
"""

import dataclasses
import functools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, NonNegativeInt, OneOf, PositiveFloat, PositiveInt
from equivit.kernels.phases import KERNELS
from equivit.layers import dense
from equivit.layers.convolution import MODES, Pair, output_size
from equivit.layers.grid import Layout
from equivit.layers.prefix import token
from equivit.layers.stack import Stack, collecting
from equivit.models.adaptive import aligned, check_torus
from equivit.models.cvt.attention import ConvAttention, ConvEmbed
from equivit.models.model import Preset
from equivit.models.staged import Map, Staged, StagedTransformerConfig, TokenBlock, split_prefix
from equivit.symmetry.shifts import Choice

PARTS = ("token", "merge", "pool")  # that may be adaptive
ACTIVATIONS = {"quick_gelu": dense.quick_gelu, "gelu": dense.gelu}


@dataclasses.dataclass(frozen=True)
class CvTConfig(StagedTransformerConfig):
    """The configuration of a CvT: the fields of its bases and these.

    Attributes:
      widths, depths, num_heads: width, blocks, and heads per block, of each stage.
      kernels, strides, paddings: for the convolution at the beginning of each stage, along both axes.  An adaptive
        model needs 2 padding < kernel <= 2 padding + stride, and with `select="output"`, "merge" needs kernels of 2 or
        3 with a stride of 2.
      kv_stride: stride of the convolutions for keys and values, along both axes.
      class_token: whether the last stage has a class token, which the head reads; otherwise it reads the mean token.
      activation: activation of the MLPs: "quick_gelu", which the official weights were trained with, or the exact
        "gelu", which Transformers uses.
      padding: "zeros" or "circular" (`layers/convolution.py`), for all convolutions except adaptive ones.  Sizes are
        the same with both.
      image_size: (height, width); the model takes any size, from 3 pixels on as published.  Equivariance to circular
        shifts needs sizes divisible by the product of all strides, including `kv_stride`: 32 as published.
      norm_eps: epsilon of layer norms; batch norms use 1e-5.
      drop_path: one rate for all blocks, or one per stage, to which it grows linearly from 0 in the first block of the
        stage; the official configurations have (0, 0, 0.1).
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (the content chooses the phase
        of the first convolution; A-token), "merge" (of convolutions between stages; A-PMerge), "pool" (of keys and
        values).  The convolutions of an adaptive part are circular; for "pool", also those for queries.  The weights
        are the same as in the ordinary model.
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
    norm_eps: PositiveFloat = 1e-5
    _: dataclasses.KW_ONLY
    drop_path: Below1 | tuple[Below1, ...] = 0.0
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # tuple first: messages then name the wrong part

    def __post_init__(self):
        constraints.check_fields(self, "CvT")
        stages = ["widths", "num_heads", "kernels", "strides", "paddings"]
        self.check_stages(*stages, *["drop_path"] * isinstance(self.drop_path, tuple))
        self.check_heads(self.num_heads, self.widths)
        self._check_phases()
        self.grids(self.image_size, "CvT: image_size")

    def _check_phases(self) -> None:
        """Raise ValueError for convolutions without phases on a torus in an adaptive model."""
        for stage, (k, s, p) in enumerate(zip(self.kernels, self.strides, self.paddings, strict=True)):
            if self.parts and not 2 * p < k <= 2 * p + s:
                fitting = range(max(0, (k - s + 1) // 2), (k + 1) // 2)
                near = min(fitting, key=lambda padding: abs(padding - p), default=None)
                fix = f"take kernels[{stage}]={k + 1}" if near is None else f"the nearest is {near}"
                raise ValueError(
                    f"CvT: paddings[{stage}]={p}: an adaptive model takes paddings p with 2 p < kernel <= 2 p + "
                    f"stride, and stage {stage} has a kernel of {k} and a stride of {s}; {fix}."
                )
            if stage and "merge" in self.parts and self.select == "output" and (s != 2 or k not in KERNELS):
                raise ValueError(
                    f"CvT: kernels[{stage}]={k} and strides[{stage}]={s}: the adaptive part 'merge' takes kernels of 2 "
                    "or 3 with a stride of 2, or select='input'."
                )

    @property
    def period(self) -> tuple[int, int]:
        """(height, width) in pixels after which the grids of tokens, keys and values repeat."""
        unit = math.prod(self.strides) * self.kv_stride
        return unit, unit

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """Raise ValueError unless all strides divide the image, as adaptive models need."""
        why = f"strides {self.strides}, and {self.kv_stride} of keys and values"
        check_torus("CvT", image_size, self.period, why)

    @property
    def rates(self) -> np.ndarray | None:
        if isinstance(self.drop_path, tuple):
            ends = zip(self.drop_path, self.depths, strict=True)
            rates = np.concatenate([np.linspace(0, last, depth, dtype=np.float32) for last, depth in ends])
        else:
            rates = np.full(self.depth, self.drop_path, np.float32)
        return rates if rates.any() else None

    def prefix(self, stage: int) -> int:
        """Number of tokens before a stage's map: the class token in the last stage."""
        return int(self.class_token and stage == len(self.depths) - 1)

    def grids(self, image_size: Pair, name: str = "image") -> tuple[Pair, ...]:
        """(h, w) of the map of each stage; ValueError if the image is smaller than the first kernel."""
        sizes, where = [image_size], f"{name} {image_size[0]}x{image_size[1]}"
        for stage, (k, s, p) in enumerate(zip(self.kernels, self.strides, self.paddings, strict=True)):
            sizes.append(output_size(sizes[-1], (k, k), (s, s), (p, p), f"{where}: stage {stage}"))
        return tuple(sizes[1:])

    def build(self, rngs: nnx.Rngs) -> "CvT":
        return CvT(self, rngs=rngs)


class Stage(nnx.Module):
    """A convolution, except in the first stage (`patch_embed`); a class token in the last stage; blocks."""

    def __init__(self, config: CvTConfig, stage: int, *, rngs: nnx.Rngs):
        width, heads, stride = config.widths[stage], config.num_heads[stage], (config.kv_stride, config.kv_stride)

        select = config.select if "pool" in config.parts else None

        def block(rngs):
            hidden, activation = round(config.mlp_ratio * width), ACTIVATIONS[config.activation]
            init = config.weights_init
            return TokenBlock(
                norm1=dense.LayerNorm(width, eps=config.norm_eps),
                attention=ConvAttention(
                    width, heads, stride=stride, mode=config.mode("pool"), select=select, init=init, rngs=rngs
                ),
                norm2=dense.LayerNorm(width, eps=config.norm_eps),
                mlp=dense.Mlp(width, hidden, activation=activation, init=init, rngs=rngs),
                dropout=config.dropout,
            )

        self.embed = _embed(config, stage, rngs) if stage else None
        self.class_token = token((width,), 0.02, rngs) if config.prefix(stage) else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)

    def tokens(self, x: jax.Array) -> jax.Array:
        """The input of the blocks, from the tokens of a map: [B, h w, width] -> [B, prefix + h w, width]."""
        if self.class_token is None:
            return x
        first = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (*x.shape[:-2], 1, x.shape[-1]))
        return jnp.concatenate([first, x], axis=-2)


class CvT(Staged):
    """A CvT; see `CvTConfig`.

    The head reads the class token, or the mean token of the last stage, after the norm.
    """

    before = ("patch_embed",)

    def __init__(self, config: CvTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = _embed(config, 0, rngs)
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        config, conv = self.config, self.patch_embed.conv
        grid = config.grids(images.shape[1:3])[0]
        images, frame, choices = aligned(images, config, *conv.affine(), stride=conv.stride, padding=conv.padding)
        tokens = jax.lax.collapse(self.patch_embed(images), 1, 3)
        choices = {"stage0_embed": choices["patch_embed"]} if choices else {}
        return Map(tokens, Layout(grid), frame.every(conv.stride), choices)

    def begin(self, stage: int, at: Map, *, train: bool = False) -> Map:
        """Convolve the map, except in the first stage, and prepend the class token."""
        if stage:
            at = self._embedded(stage, at)
        layout = Layout(at.layout.grid, self.config.prefix(stage))
        return at._replace(tokens=self.stages[stage].tokens(at.tokens), layout=layout)

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The choices as in `Staged`; names are "stage0_embed", "stage0_layer0_kv" and so on."""
        at, choices = self.embedded(images), {}
        for number, stage in enumerate(self.stages):
            at = self.begin(number, at)
            blocks, looks = stage.blocks, {}
            if "pool" in self.config.parts:
                looks = collecting(functools.partial(_chosen, at.layout), len(blocks), blocks[0], at.tokens)
            tokens, chosen = blocks(at.tokens, at.layout, **looks)
            at = at._replace(tokens=tokens)
            for layer in range(len(blocks) if looks else 0):
                choices[f"stage{number}_layer{layer}_kv"] = jax.tree.map(lambda a, i=layer: a[i], chosen)
        return at.choices | choices

    def _embedded(self, stage: int, at: Map) -> Map:
        """The map after the convolution of a stage."""
        embed, x = self.stages[stage].embed, split_prefix(at.tokens, at.layout)[1]
        grid = self.config.grids(at.frame.image)[stage]
        if "merge" in self.config.parts:
            x, choice = embed.adaptive(x, self.config.select)
            at = at.record(f"stage{stage}_embed", choice, embed.conv.stride)
        else:
            x = jax.lax.collapse(embed(x), 1, 3)
        return at._replace(tokens=x, layout=Layout(grid), frame=at.frame.every(embed.conv.stride))


def _chosen(layout: Layout, block: Any, x: jax.Array) -> Choice:
    """The phase chosen by a block for keys and values."""
    return block.attention.choice(split_prefix(block.norm1(x), layout)[1])


def _embed(config: CvTConfig, stage: int, rngs: nnx.Rngs) -> ConvEmbed:
    """The convolution at the beginning of a stage."""
    channels = (config.in_channels, *config.widths)
    k, s, p = config.kernels[stage], config.strides[stage], config.paddings[stage]
    options: dict[str, Any] = dict(kernel=(k, k), stride=(s, s), padding=(p, p))
    mode = config.mode("merge" if stage else "token")
    return ConvEmbed(channels[stage], channels[stage + 1], mode=mode, **options, eps=config.norm_eps, rngs=rngs)


# Published sizes (CvT, Table 2).
WIDTHS = dict(widths=(64, 192, 384), num_heads=(1, 3, 6))
NAMES = {
    "cvt_13": Preset(CvTConfig, WIDTHS | dict(depths=(1, 2, 10))),
    "cvt_21": Preset(CvTConfig, WIDTHS | dict(depths=(1, 4, 16))),
}
