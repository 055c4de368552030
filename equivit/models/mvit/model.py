"""Multiscale vision transformers, MViTv2: blocks that attend globally among pooled tokens, in stages of half the size.

The first block of a stage halves the map and doubles the width, and from stage to stage keys and values are pooled by
half the stride, down to 1, so that attention never has many of them.

An adaptive one (`MViTConfig.adaptive`) is truly shift-equivariant.

Sources: MViTv2 (arXiv 2112.01526); A-MViTv2 (arXiv 2305.16316).
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, OneOf, PositiveFloat, PositiveInt, Size
from equivit.layers import dense
from equivit.layers.convolution import MODES, Conv, Pair
from equivit.layers.dropout import dropout, split
from equivit.layers.grid import Layout, check_images
from equivit.layers.prefix import token
from equivit.layers.stack import REMAT, check_blocks
from equivit.models.adaptive import SELECT, AdaptiveConfig, check_torus, placed
from equivit.models.features import Features, Grid
from equivit.models.image_config import StagedConfig
from equivit.models.model import Preset
from equivit.models.mvit.attention import apart, joined
from equivit.models.mvit.stages import Map, Shape, Stage, map_size
from equivit.symmetry.shifts import Choice

KERNEL, STRIDE, PADDING = (7, 7), (4, 4), (3, 3)  # of the patch embedding
KV_STRIDE = 4  # of keys and values in the first stage; half of it in each further one
PARTS = ("token", "pool", "position")


@dataclasses.dataclass(frozen=True)
class MViTConfig(AdaptiveConfig, StagedConfig):
    """The choices that make one MViTv2.

    Attributes:
      width: of the first stage; each further stage has twice the width of the one before.
      depths: blocks of each stage.
      num_heads: heads per block of each stage; one number is that of the first, and doubles with the width.
      class_token: the head reads this token, which nothing pools and which has no position, not the mean of all.
      expand_attn: the attention of a stage's first block doubles the width; else the MLP of the last block before it.
      padding: what convolutions and max-pools see beyond the ends of a map: "zeros" (max-pools nothing) or "circular".
        Those of the parts "token" and "pool" are circular in any case where the part is adaptive.
      image_size: (height, width) that the tables of positions are made for; images of any size can be used.
      num_classes: None for no head.
      mlp_ratio: hidden width of the MLP in units of its width.
      norm_eps: epsilon of layer norms.
      drop_path: probability of dropping a branch of a block for a sample, used when a key is given; a pair grows
        linearly from the first block of all to the last.
      dropout: the same for single entries.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (patches begin where the content
        decides; A-token), "pool" (what a stride keeps of queries, and of keys with their values, too), "position"
        (distances go around the torus; A-RPE).  The weights are those of the ordinary model, but for positions: a table
        has as many distances as the map has places.
      select: how phases are chosen: by the norm of all that comes out ("output", Eq. 15 and 22), or by that of what
        goes in at the lattice ("input"), which costs nothing.
      anchor: a model whose every part is adaptive rolls the image into a frame of its content first, which settles ties
        and rounding (`models/adaptive.py`).
      remat, unroll: how blocks are run (`layers/stack.py`).
    """

    KNOWN_PARTS = PARTS

    width: PositiveInt
    depths: tuple[Depth, ...]
    num_heads: PositiveInt | tuple[PositiveInt, ...] = 1
    class_token: bool = False
    expand_attn: bool = True
    padding: Annotated[str, OneOf(MODES)] = "zeros"
    image_size: Size = (224, 224)
    in_channels: PositiveInt = 3
    num_classes: PositiveInt | None = 1000
    mlp_ratio: PositiveFloat = 4.0
    norm_eps: PositiveFloat = 1e-6
    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    dropout: Below1 = 0.0
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # in this order a message names the wrong part
    select: Annotated[str, OneOf(SELECT)] = "output"
    anchor: bool = True
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        constraints.check_fields(self, "MViT")
        object.__setattr__(self, "num_heads", self.heads)
        self.check_stages("num_heads")
        self.check_heads(self.heads, self.widths)

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads per block of each stage."""
        if isinstance(self.num_heads, int):
            return tuple(self.num_heads * 2**stage for stage in range(len(self.depths)))
        return self.num_heads

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    @property
    def prefix(self) -> int:
        """Tokens before the map."""
        return int(self.class_token)

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """ValueError unless patches and all strides divide an image, as an adaptive model needs it."""
        halvings = len(self.depths) - 1
        height, width = (step * max(KV_STRIDE, 2**halvings) for step in STRIDE)
        why = f"patches of {STRIDE}, halved {halvings} times, keys and values at every {KV_STRIDE}th of them"
        check_torus("MViT", image_size, (height, width), why)

    def stride(self, stage: int) -> Pair:
        """Pixels between neighbours of a stage's map."""
        h, w = (step * 2**stage for step in STRIDE)
        return h, w

    def shapes(self, stage: int) -> list[Shape]:
        """The shape of each block of a stage."""
        width, depth, kv_step = self.widths[stage], self.depths[stage], max(1, KV_STRIDE // 2**stage)
        following = self.widths[min(stage + 1, len(self.depths) - 1)]

        def shape(i):
            first = i == 0 and stage > 0
            before = self.widths[stage - 1] if first and self.expand_attn else width
            after = following if i == depth - 1 and not self.expand_attn else width
            step, finer = (2, min(2, kv_step)) if first else (1, 1)
            grid = map_size(self.image_size, self.stride(stage - first))
            grid = grid if "position" in self.parts else map_size(grid, (finer, finer))
            return Shape(before, width, after, self.heads[stage], (step, step), (kv_step, kv_step), grid)

        return [shape(i) for i in range(depth)]

    def build(self, rngs: nnx.Rngs) -> "MViT":
        """The model, with parameters drawn from `rngs`."""
        return MViT(self, rngs=rngs)


class MViT(nnx.Module):
    """An MViTv2; see `MViTConfig`.

    The head reads the class token, or the mean of the last stage's tokens, after a norm.
    """

    before = ("patch_embed", "class_token")

    def __init__(self, config: MViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = Conv(
            config.in_channels,
            config.width,
            kernel=KERNEL,
            stride=STRIDE,
            padding=PADDING,
            mode=config.mode("token"),
            rngs=rngs,
        )
        self.class_token = token((config.width,), 0.02, rngs) if config.class_token else None
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C] of any size; an adaptive model takes whole grids.

        Args:
          key: drives drop path and dropout; None means neither.
          train: unused; there are no batch statistics.

        Raises:
          ValueError: the model has no head, or it is adaptive and its strides do not divide the image.
        """
        if self.head is None:
            raise ValueError(
                "MViT: the model has no head (num_classes=None); call features, or create it with classes."
            )
        trunk_key, head_key = split(key)
        pooled = self.pooled(images, key=trunk_key, train=train)
        return self.head(dropout(pooled, self.config.dropout, head_key))

    def pooled(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """The input of the head, [*B, features]: the class token, or the mean of all tokens, after the norm."""
        last, _, _ = self.trunk(images, key=key, train=train)
        pooled = self.norm(last.tokens[:, 0]) if self.config.class_token else self.norm(last.tokens).mean(1)
        return pooled.reshape(*images.shape[:-3], pooled.shape[-1])

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The choices of the adaptive parts for each image: the index, and the relative gap to the second best.

        Both are [B], B being all batch axes in one.  Names are "patch_embed", "stage0_block0_kv" (keys and values),
        "stage1_block0_q" (queries and the shortcut) and so on; indices are row-major in the phases of the stride.  With
        an anchor they are those in the frame of the content, and so the same for each shift.
        """
        return self.trunk(images)[2]

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

        With `norm` tokens of the last stage go through the final norm; those of the stages before have another width,
        and are as the block left them.

        Raises:
          IndexError: there is no such block.
          ValueError: blocks are no indices.
        """
        check_blocks("MViT", blocks, self.config.depth)
        last, seen, _ = self.trunk(images, capture=blocks, key=key, train=train)
        batch = images.shape[:-3]
        inner = {
            index: self._features(at, batch, norm and at.frame.stride == last.frame.stride, {})
            for index, at in seen.items()
        }
        return self._features(last, batch, norm, inner)

    def trunk(
        self,
        images: jax.Array,
        *,
        capture: tuple[int, ...] = (),
        key: jax.Array | None = None,
        train: bool = False,
    ) -> tuple[Map, dict[int, Map], dict[str, Choice]]:
        """The tokens after the last block, before the final norm; those after the blocks in `capture`; all choices."""
        rates, (at, chosen) = self.config.rates, self.embed(images)
        seen, first = {}, 0
        for number, stage in enumerate(self.stages):
            stop = first + len(stage.blocks)
            at, part, choices = stage(
                at,
                capture=tuple(index - first for index in capture if first <= index < stop),
                rates=None if rates is None else rates[first:stop],
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: tokens for index, tokens in part.items()}
            chosen |= {f"stage{number}_{name}": choice for name, choice in choices.items()}
            first = stop
        return at, seen, chosen

    def embed(self, images: jax.Array) -> tuple[Map, dict[str, Choice]]:
        """The tokens before the first block, and the choice of where patches begin."""
        config = self.config
        check_images(images, config.in_channels, (1, 1))
        if config.parts:
            config.check_torus(images.shape[-3:-1])
        images = images.reshape(-1, *images.shape[-3:])
        images, frame, chosen = placed(images, config, *self.patch_embed.affine(), stride=STRIDE, padding=PADDING)
        maps = self.patch_embed(images)
        number, h, w, width = maps.shape
        first = jnp.zeros((0, width)) if self.class_token is None else self.class_token[...][None]
        tokens = joined(jnp.broadcast_to(first.astype(maps.dtype), (number, *first.shape)), maps)
        return Map(tokens, (h, w), frame.every(STRIDE)), chosen

    def _features(self, at: Map, batch: tuple[int, ...], norm: bool, blocks: dict[int, Features]) -> Features:
        tokens = self.norm(at.tokens) if norm else at.tokens
        first, maps = apart(tokens.reshape(*batch, *tokens.shape[1:]), Layout(at.grid, self.config.prefix))
        values = Grid(maps, at.frame.stride, at.frame.offset.reshape(*batch, 2))
        cls = first[..., 0, :] if self.config.class_token else None
        return Features(cls, jnp.zeros((*batch, 0, tokens.shape[-1]), tokens.dtype), values, blocks)


# Published sizes (MViTv2, Table 1 and the official configurations).
SIZES = {
    "t": dict(width=96, depths=(1, 2, 5, 2), num_heads=1),
    "s": dict(width=96, depths=(1, 2, 11, 2), num_heads=1),
    "b": dict(width=96, depths=(2, 3, 16, 3), num_heads=1),
    "l": dict(width=144, depths=(2, 6, 36, 4), num_heads=2, expand_attn=False),
}
NAMES = {f"mvitv2_{size}": Preset(MViTConfig, fields) for size, fields in SIZES.items()}
