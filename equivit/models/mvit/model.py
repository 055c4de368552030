"""Multiscale vision transformers, MViTv2: global attention among pooled tokens, in stages of halving size.

The first block of a stage halves the map and doubles the width.  The pooling stride of keys and values halves from
stage to stage, down to 1, so their number stays small.

With `MViTConfig.adaptive` the model is truly shift-equivariant.

Sources: MViTv2 (arXiv 2112.01526); A-MViTv2 (arXiv 2305.16316).
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Depth, OneOf, PositiveFloat, PositiveInt
from equivit.layers import dense
from equivit.layers.convolution import MODES, Conv, Pair
from equivit.layers.grid import Layout
from equivit.layers.prefix import token
from equivit.models.adaptive import aligned, check_torus
from equivit.models.model import Preset
from equivit.models.mvit.stages import Shape, Stage, map_size
from equivit.models.staged import Map, Staged, StagedTransformerConfig, join_prefix

KERNEL, STRIDE, PADDING = (7, 7), (4, 4), (3, 3)  # of the patch embedding
KV_STRIDE = 4  # of keys and values in the first stage; halves with each stage
PARTS = ("token", "pool", "position")


@dataclasses.dataclass(frozen=True)
class MViTConfig(StagedTransformerConfig):
    """The configuration of an MViTv2: the fields of its bases and these.

    Attributes:
      width: width of the first stage; it doubles with each stage.
      depths: number of blocks of each stage.
      num_heads: heads per block of each stage; a single number is for the first stage and doubles with the width.
      class_token: the head reads a class token, which is not pooled and has no position, instead of the mean token.
      expand_attn: the attention of a stage's first block doubles the width; otherwise the MLP of the previous block
        does.
      padding: padding of convolutions and max-pools: "zeros" (max-pools ignore padding) or "circular".  It is always
        circular in the parts "token" and "pool" if they are adaptive.
      image_size: (height, width) that determines the position tables; the model takes any size.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (the content chooses the origin
        of patches; A-token), "pool" (and the phases of pooling), "position" (distances wrap around the torus; A-RPE).
        The weights are the same as in the ordinary model, except for position tables, which have one distance per
        position of the map.
    """

    KNOWN_PARTS = PARTS

    width: PositiveInt
    depths: tuple[Depth, ...]
    num_heads: PositiveInt | tuple[PositiveInt, ...] = 1
    class_token: bool = False
    expand_attn: bool = True
    padding: Annotated[str, OneOf(MODES)] = "zeros"
    norm_eps: PositiveFloat = 1e-6
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # tuple first: messages then name the wrong part

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
        """The width of each stage, in its attention."""
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    @property
    def map_widths(self) -> tuple[int, ...]:
        """The width after the last block of each stage, which may be the width of the next stage."""
        return tuple(self.shapes(stage)[-1].after for stage in range(len(self.depths)))

    @property
    def prefix(self) -> int:
        """Number of tokens before the map."""
        return int(self.class_token)

    @property
    def period(self) -> Pair:
        """(height, width) in pixels after which the grids of tokens, keys and values repeat."""
        height, width = (step * max(KV_STRIDE, 2 ** (len(self.depths) - 1)) for step in STRIDE)
        return height, width

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """Raise ValueError unless patches and all strides divide the image, as adaptive models need."""
        halvings = len(self.depths) - 1
        why = f"patches of {STRIDE}, halved {halvings} times, keys and values at every {KV_STRIDE}th of them"
        check_torus("MViT", image_size, self.period, why)

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
        return MViT(self, rngs=rngs)


class MViT(Staged):
    """An MViTv2; see `MViTConfig`.

    The head reads the class token or the mean token of the last stage, after a norm.  Choices are called "patch_embed",
    "stage0_block0_kv" (keys and values), "stage1_block0_q" (queries and the shortcut) and so on.
    """

    before = ("patch_embed", "class_token")

    def __init__(self, config: MViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(kernel=KERNEL, stride=STRIDE, padding=PADDING, mode=config.mode("token"))
        self.patch_embed = Conv(config.in_channels, config.width, **options, rngs=rngs)
        self.class_token = token((config.width,), 0.02, rngs) if config.class_token else None
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        embed = self.patch_embed
        images, frame, choices = aligned(images, self.config, *embed.affine(), stride=STRIDE, padding=PADDING)
        maps = embed(images)
        number, h, w, width = maps.shape
        first = jnp.zeros((0, width)) if self.class_token is None else self.class_token[...][None]
        tokens = join_prefix(jnp.broadcast_to(first, (number, *first.shape)), maps)
        return Map(tokens, Layout((h, w), self.config.prefix), frame.every(STRIDE), choices)

    def stage(self, stage: int, at: Map, *, train: bool, **options: Any) -> tuple[Map, dict[int, Map]]:
        return self.stages[stage](at, f"stage{stage}", train=train, **options)


# Published sizes (MViTv2, Table 1 and the official configurations).
SIZES = {
    "t": dict(width=96, depths=(1, 2, 5, 2), num_heads=1),
    "s": dict(width=96, depths=(1, 2, 11, 2), num_heads=1),
    "b": dict(width=96, depths=(2, 3, 16, 3), num_heads=1),
    "l": dict(width=144, depths=(2, 6, 36, 4), num_heads=2, expand_attn=False),
}
NAMES = {f"mvitv2_{size}": Preset(MViTConfig, fields) for size, fields in SIZES.items()}
