"""Swin transformers: stages of blocks that attend within windows, with patch merging in between.

| version | norms                        | attention                                     | bias by relative position |
|---------|------------------------------|-----------------------------------------------|---------------------------|
| 1       | before each branch           | products of queries and keys                  | a learned table           |
| 2       | after each branch            | cosines, times a learned factor of each head  | a small MLP of distances  |

Sources: Swin (arXiv 2103.14030); SwinV2 (arXiv 2111.09883).
"""

import dataclasses
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, OneOf, PositiveFloat, PositiveInt, Size, Words
from equivit.layers import dense
from equivit.layers.drop import dropout, split
from equivit.layers.grid import Layout, check_grid, check_images
from equivit.layers.merge import PatchMerging
from equivit.layers.stack import REMAT, Stack
from equivit.layers.window import CosineWindowAttention, Pair, WindowAttention, WindowBlock
from equivit.models.features import Features, Grid
from equivit.models.model import Preset

Window = Annotated[tuple[PositiveInt, PositiveInt], Words("(height, width) in tokens")]


@dataclasses.dataclass(frozen=True)
class SwinConfig:
    """The choices that make one Swin transformer.

    No convolution of a Swin transformer pads: the patches of its only one do not overlap.

    Attributes:
      width: of the first stage; each further stage has twice the width of the one before.
      depths, num_heads: blocks, and heads per block, of each stage.
      version: 1 or 2, a row of the table above.
      window_size: (height, width) of a window in tokens; an int for a square.  Along an axis where the map of a stage
        is smaller, the window is the map.
      image_size: (height, width) that the windows are chosen for; images of any size that the patch divides can be
        used.
      patch_size: (height, width) of a patch in pixels; an int for a square.
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
    num_heads: tuple[PositiveInt, ...]
    version: Literal[1, 2] = 1
    window_size: Window = (7, 7)
    image_size: Size = (224, 224)
    patch_size: Size = (4, 4)
    in_channels: PositiveInt = 3
    num_classes: PositiveInt | None = 1000
    mlp_ratio: PositiveFloat = 4.0
    norm_eps: PositiveFloat = 1e-5
    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    dropout: Below1 = 0.0
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        for name in ("window_size", "patch_size"):
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, (value, value))
        constraints.check_fields(self, "Swin")
        if len(self.num_heads) != len(self.depths):
            raise ValueError(
                f"Swin: num_heads={self.num_heads} and depths={self.depths} must have one entry per stage each."
            )
        for stage, heads in enumerate(self.num_heads):
            if self.widths[stage] % heads:
                raise ValueError(
                    f"Swin: num_heads={self.num_heads}: the {heads} heads of stage {stage} must divide its width, "
                    f"{self.widths[stage]}."
                )
        check_grid(self.image_size, self.patch_size, "Swin: image_size")

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

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
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None

    def window(self, stage: int) -> Pair:
        """(h, w) of the windows of a stage."""
        h, w = self._map(self.image_size, stage)
        return max(1, min(h, self.window_size[0])), max(1, min(w, self.window_size[1]))

    def shift(self, stage: int, image_size: tuple[int, ...]) -> Pair:
        """By how much every second block shifts its windows: by half of them, unless the map is one window."""
        (h, w), (p, q) = self._map(image_size, stage), self.window(stage)
        return p // 2 if h > p else 0, q // 2 if w > q else 0

    def _map(self, image_size: tuple[int, ...], stage: int) -> Pair:
        """The size of a stage's map, odd ones halved downwards.

        The map itself is halved upwards.  timm chooses windows and shifts by this one.
        """
        h, w = (size // patch // 2**stage for size, patch in zip(image_size, self.patch_size, strict=True))
        return h, w

    def build(self, rngs: nnx.Rngs) -> "Swin":
        """The model, with parameters drawn from `rngs`."""
        return Swin(self, rngs=rngs)


class Map(NamedTuple):
    """Tokens after a block.

    Attributes:
      tokens: [*B, h w, width].
      grid: (h, w).
      stage: that the block belongs to.
    """

    tokens: jax.Array
    grid: Pair
    stage: int


class Stage(nnx.Module):
    """Patch merging, unless it is the first stage, then blocks; every second one shifts its windows."""

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        first = config.version == 1
        width, heads, window = config.widths[stage], config.num_heads[stage], config.window(stage)
        attention = WindowAttention if first else CosineWindowAttention

        def block(rngs):
            norms = [dense.LayerNorm(width, eps=config.norm_eps) for _ in range(2)]
            if not first:  # so that each block begins as the identity, as the official code has it
                for norm in norms:
                    norm.scale.set_value(jnp.zeros(width))
            return WindowBlock(
                norm1=norms[0],
                attention=attention(width, heads, window, rngs=rngs),
                norm2=norms[1],
                mlp=dense.Mlp(width, round(config.mlp_ratio * width), rngs=rngs),
                norm_first=first,
                dropout=config.dropout,
            )

        self.merge = PatchMerging(width // 2, norm_first=first, eps=config.norm_eps, rngs=rngs) if stage else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)


class Swin(nnx.Module):
    """A Swin transformer of either version; see `SwinConfig`.

    The head reads the mean of the last stage's tokens after a norm.
    """

    before = ("patch_embed", "patch_norm")

    def __init__(self, config: SwinConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = dense.PatchEmbed(config.patch_size, config.in_channels, config.width, rngs=rngs)
        self.patch_norm = dense.LayerNorm(config.width, eps=config.norm_eps)
        self.stages = nnx.List([Stage(config, stage, rngs=rngs) for stage in range(len(config.depths))])
        features, classes = config.widths[-1], config.num_classes
        self.norm = dense.LayerNorm(features, eps=config.norm_eps)
        self.head = None if classes is None else dense.Linear(features, classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C].

        Args:
          key: drives drop path and dropout; None means neither.
          train: unused; there are no batch statistics.

        Raises:
          ValueError: the patch does not divide the image, or the model has no head.
        """
        if self.head is None:
            raise ValueError(
                "Swin: the model has no head (num_classes=None); call features, or create it with classes."
            )
        trunk_key, head_key = split(key)
        pooled = self.pooled(images, key=trunk_key, train=train)
        return self.head(dropout(pooled, self.config.dropout, head_key))

    def pooled(self, images: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        """What the head reads, [*B, features]: the mean of the tokens after the norm."""
        last, _ = self.trunk(images, key=key, train=train)
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

        There is no class token and no register.  With `norm` tokens of the last stage go through the final norm; those
        of the stages before have another width, and are as the block left them.

        Raises:
          IndexError: there is no such block.
        """
        for index in blocks:
            if not 0 <= index < self.config.depth:
                raise IndexError(f"Swin: there is no block {index}; the blocks are 0 to {self.config.depth - 1}.")
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
        grid = check_images(images, config.in_channels, config.patch_size)
        x, seen, first = self.patch_norm(self.patch_embed(images)), {}, 0
        for number, stage in enumerate(self.stages):
            stop = first + len(stage.blocks)
            if stage.merge is not None:
                x, grid = stage.merge(x, grid)
            x, part = stage.blocks(
                x,
                Layout(grid, shift=config.shift(number, images.shape[-3:-1])),
                rates=None if rates is None else rates[first:stop],
                phases=2,
                capture=tuple(index - first for index in capture if first <= index < stop),
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: Map(tokens, grid, number) for index, tokens in part.outputs.items()}
            first = stop
        return Map(x, grid, len(self.stages) - 1), seen

    def _features(self, at: Map, norm: bool, blocks: dict[int, Features]) -> Features:
        tokens, grid, stage = at
        if norm and stage == len(self.stages) - 1:
            tokens = self.norm(tokens)
        *batch, _, width = tokens.shape
        stride = tuple(2**stage * side for side in self.config.patch_size)
        values = Grid(tokens.reshape(*batch, *grid, width), stride, jnp.zeros((*batch, 2), jnp.int32))
        return Features(None, jnp.zeros((*batch, 0, width), tokens.dtype), values, blocks)


# Published sizes (Swin, Section 3.3; SwinV2, Appendix A1).
SIZES = {
    "t": dict(width=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    "s": dict(width=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    "b": dict(width=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
    "l": dict(width=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48)),
}
V2 = dict(version=2, window_size=(8, 8), image_size=(256, 256))
NAMES = {f"swin_{size}": Preset(SwinConfig, fields) for size, fields in SIZES.items()}
NAMES |= {f"swinv2_{size}": Preset(SwinConfig, SIZES[size] | V2) for size in "tsb"}
