"""Multiscale vision transformers, MViTv2: blocks that attend globally among pooled tokens, in stages of half the size.

The first block of a stage halves the map and doubles the width, and from stage to stage keys and values are pooled by
half the stride, down to 1, so that attention never has many of them.

Source: MViTv2 (arXiv 2112.01526).
"""

import dataclasses
import functools
import itertools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, OneOf, PositiveFloat, PositiveInt, Size
from equivit.layers import dense
from equivit.layers.convolution import MODES, Conv, Pair
from equivit.layers.drop import dropout, split
from equivit.layers.grid import Layout, check_images
from equivit.layers.pooling_attention import PoolingAttention, PoolingBlock, apart, joined
from equivit.layers.prefix import token
from equivit.layers.stack import REMAT, Stack
from equivit.models.features import Features, Grid
from equivit.models.model import Preset

KERNEL, STRIDE, PADDING = (7, 7), (4, 4), (3, 3)  # of the patch embedding
KV_STRIDE = 4  # of keys and values in the first stage; half of it in each further one


class Shape(NamedTuple):
    """What blocks share that have parameters of the same shapes.

    Attributes:
      before, width, after: channels of its input, inside of attention, and of its output.
      num_heads: of its attention.
      stride, kv_stride: of queries, and of keys and values.
      grid: (h, w) of the finer of queries and keys.
    """

    before: int
    width: int
    after: int
    num_heads: int
    stride: Pair
    kv_stride: Pair
    grid: Pair

    @property
    def changes(self) -> bool:
        """Whether tokens leave such a block in another shape."""
        return self.stride != (1, 1) or self.before != self.after


@dataclasses.dataclass(frozen=True)
class MViTConfig:
    """The choices that make one MViTv2.

    Attributes:
      width: of the first stage; each further stage has twice the width of the one before.
      depths: blocks of each stage.
      num_heads: heads per block of each stage; one number is that of the first, and doubles with the width.
      class_token: the head reads this token, which nothing pools and which has no position, not the mean of all.
      expand_attn: the attention of a stage's first block doubles the width; else the MLP of the last block before it.
      padding: what convolutions and max-pools see beyond the ends of a map: "zeros" (max-pools nothing) or "circular".
      image_size: (height, width) that the tables of positions are made for; images of any size can be used.
      num_classes: None for no head.
      mlp_ratio: hidden width of the MLP in units of its width.
      norm_eps: epsilon of layer norms.
      drop_path: probability of dropping a branch of a block for a sample, used when a key is given; a pair grows
        linearly from the first block of all to the last.
      dropout: the same for single entries.
      remat, unroll: how blocks are run (`layers/stack.py`).
    """

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
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        constraints.check_fields(self, "MViT")
        object.__setattr__(self, "num_heads", self.heads)
        if len(self.heads) != len(self.depths):
            raise ValueError(
                f"MViT: num_heads={self.num_heads} and depths={self.depths} must have one entry per stage each."
            )
        for stage, (heads, width) in enumerate(zip(self.heads, self.widths, strict=True)):
            if width % heads:
                raise ValueError(
                    f"MViT: num_heads={self.num_heads}: the {heads} heads of stage {stage} must divide its width, "
                    f"{width}."
                )

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
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def prefix(self) -> int:
        """Tokens before the map."""
        return int(self.class_token)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Of one image: (height, width, channels)."""
        return *self.image_size, self.in_channels

    @property
    def rates(self) -> np.ndarray | None:
        """The rate of stochastic depth of each block, [depth]; None where there is none."""
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None

    def stride(self, stage: int) -> Pair:
        """Pixels between neighbours of a stage's map."""
        h, w = (step * 2**stage for step in STRIDE)
        return h, w

    def shapes(self, stage: int) -> list[Shape]:
        """That of each block of a stage."""
        width, depth, kv_step = self.widths[stage], self.depths[stage], max(1, KV_STRIDE // 2**stage)
        following = self.widths[min(stage + 1, len(self.depths) - 1)]

        def shape(i):
            first = i == 0 and stage > 0
            before = self.widths[stage - 1] if first and self.expand_attn else width
            after = following if i == depth - 1 and not self.expand_attn else width
            step, finer = (2, min(2, kv_step)) if first else (1, 1)
            grid = map_size(map_size(self.image_size, self.stride(stage - first)), (finer, finer))
            return Shape(before, width, after, self.heads[stage], (step, step), (kv_step, kv_step), grid)

        return [shape(i) for i in range(depth)]

    def build(self, rngs: nnx.Rngs) -> "MViT":
        """The model, with parameters drawn from `rngs`."""
        return MViT(self, rngs=rngs)


def map_size(size: tuple[int, ...], stride: Pair) -> Pair:
    """(h, w) of what pooling leaves of a map or an image: rounded upwards."""
    h, w = (-(-n // step) for n, step in zip(size, stride, strict=True))
    return h, w


class Map(NamedTuple):
    """Tokens after a block.

    Attributes:
      tokens: [*B, P + h w, width].
      grid: (h, w).
      stage: that the block belongs to.
    """

    tokens: jax.Array
    grid: Pair
    stage: int


class Stage(nnx.Module):
    """The blocks of a stage: those that change the shape of tokens by themselves, the others as a scan."""

    def __init__(self, config: MViTConfig, stage: int, *, rngs: nnx.Rngs):
        shapes = config.shapes(stage)
        runs = [(len(list(run)), functools.partial(_block, config, shape)) for shape, run in itertools.groupby(shapes)]
        self.blocks = Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.changes = tuple(shape.changes for shape in shapes)

    def __call__(
        self, x: jax.Array, before: Layout, after: Layout, *, capture: tuple[int, ...], **options
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """The tokens after the last block, and after those in `capture`.

        Args:
          before, after: the layout before the first block, and after it.
          options: `rates`, `train` and `key`, as a stack takes them.
        """
        seen = {}
        for start, length in self.blocks.spans:
            layout = after if start else before
            if self.changes[start]:
                x = self.blocks.alone(start, x, layout, **options)
                outputs = {start: x} if start in capture else {}
            else:
                x, part = self.blocks(x, layout, start=start, stop=start + length, capture=capture, **options)
                outputs = part.outputs
            seen |= outputs
        return x, seen


def _block(config: MViTConfig, shape: Shape, rngs: nnx.Rngs) -> PoolingBlock:
    norm = functools.partial(dense.LayerNorm, eps=config.norm_eps)
    widens = shape.before != shape.width, shape.width != shape.after
    return PoolingBlock(
        norm1=norm(shape.before),
        attention=PoolingAttention(
            shape.before,
            shape.width,
            shape.num_heads,
            stride=shape.stride,
            kv_stride=shape.kv_stride,
            grid=shape.grid,
            padding=config.padding,
            eps=config.norm_eps,
            rngs=rngs,
        ),
        shortcut=dense.Linear(shape.before, shape.width, rngs=rngs) if widens[0] else None,
        norm2=norm(shape.width),
        mlp=dense.Mlp(shape.width, round(config.mlp_ratio * shape.width), out=shape.after, rngs=rngs),
        mlp_shortcut=dense.Linear(shape.width, shape.after, rngs=rngs) if widens[1] else None,
        dropout=config.dropout,
    )


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
            mode=config.padding,
            rngs=rngs,
        )
        self.class_token = token((config.width,), 0.02, rngs) if config.class_token else None
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C] of any size.

        Args:
          key: drives drop path and dropout; None means neither.
          train: unused; there are no batch statistics.

        Raises:
          ValueError: the model has no head.
        """
        if self.head is None:
            raise ValueError(
                "MViT: the model has no head (num_classes=None); call features, or create it with classes."
            )
        trunk_key, head_key = split(key)
        pooled = self.pooled(images, key=trunk_key, train=train)
        return self.head(dropout(pooled, self.config.dropout, head_key))

    def pooled(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """What the head reads, [*B, features]: the class token, or the mean of all tokens, after the norm."""
        last, _ = self.trunk(images, key=key, train=train)
        if self.config.class_token:
            return self.norm(last.tokens[..., 0, :])
        return self.norm(last.tokens).mean(-2)

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
        """
        for index in blocks:
            if not 0 <= index < self.config.depth:
                raise IndexError(f"MViT: there is no block {index}; the blocks are 0 to {self.config.depth - 1}.")
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
        check_images(images, config.in_channels, (1, 1))
        x, grid = self.embed(images)
        seen, first = {}, 0
        for number, stage in enumerate(self.stages):
            stop, before = first + len(stage.blocks), grid
            grid = map_size(images.shape[-3:-1], config.stride(number))
            x, part = stage(
                x,
                Layout(before, config.prefix),
                Layout(grid, config.prefix),
                capture=tuple(index - first for index in capture if first <= index < stop),
                rates=None if rates is None else rates[first:stop],
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: Map(tokens, grid, number) for index, tokens in part.items()}
            first = stop
        return Map(x, grid, len(self.stages) - 1), seen

    def embed(self, images: jax.Array) -> tuple[jax.Array, Pair]:
        """The tokens before the first block, and their grid."""
        maps = self.patch_embed(images)
        *batch, h, w, width = maps.shape
        first = jnp.zeros((0, width)) if self.class_token is None else self.class_token[...][None]
        return joined(jnp.broadcast_to(first.astype(maps.dtype), (*batch, *first.shape)), maps), (h, w)

    def _features(self, at: Map, norm: bool, blocks: dict[int, Features]) -> Features:
        tokens, stage = at.tokens, at.stage
        if norm and stage == len(self.stages) - 1:
            tokens = self.norm(tokens)
        first, maps = apart(tokens, Layout(at.grid, self.config.prefix))
        *batch, _, width = first.shape
        values = Grid(maps, self.config.stride(stage), jnp.zeros((*batch, 2), jnp.int32))
        cls = first[..., 0, :] if self.config.class_token else None
        return Features(cls, jnp.zeros((*batch, 0, width), tokens.dtype), values, blocks)


# Published sizes (MViTv2, Table 1 and the official configurations).
SIZES = {
    "t": dict(width=96, depths=(1, 2, 5, 2), num_heads=1),
    "s": dict(width=96, depths=(1, 2, 11, 2), num_heads=1),
    "b": dict(width=96, depths=(2, 3, 16, 3), num_heads=1),
    "l": dict(width=144, depths=(2, 6, 36, 4), num_heads=2, expand_attn=False),
}
NAMES = {f"mvitv2_{size}": Preset(MViTConfig, fields) for size, fields in SIZES.items()}
