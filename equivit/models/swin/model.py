"""Swin transformers: stages of blocks that attend within windows, with patch merging in between.

| version | norms                        | attention                                     | bias by relative position |
|---------|------------------------------|-----------------------------------------------|---------------------------|
| 1       | before each branch           | products of queries and keys                  | a learned table           |
| 2       | after each branch            | cosines, times a learned factor of each head  | a small MLP of distances  |

An adaptive one (`SwinConfig.adaptive`) is truly shift-equivariant.

Sources: Swin (arXiv 2103.14030); SwinV2 (arXiv 2111.09883); A-Swin and A-SwinV2 (arXiv 2305.16316).
"""

import dataclasses
import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, OneOf, PositiveFloat, PositiveInt, Size, Words
from equivit.layers import dense
from equivit.layers.dropout import dropout, split
from equivit.layers.grid import Frame, Layout, check_grid, check_images
from equivit.layers.stack import REMAT, Stack, check_blocks
from equivit.models.adaptive import SELECT, AdaptiveConfig, check_torus, placed
from equivit.models.features import Features, Grid
from equivit.models.image_config import StagedConfig
from equivit.models.model import Preset
from equivit.models.swin.merge import PatchMerging
from equivit.models.swin.window import CosineWindowAttention, Pair, WindowAttention, WindowBlock, spread
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

PARTS = ("token", "window", "merge", "position")
Window = Annotated[tuple[PositiveInt, PositiveInt], Words("(height, width) in tokens")]


@dataclasses.dataclass(frozen=True)
class SwinConfig(AdaptiveConfig, StagedConfig):
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
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (patches begin where the content
        decides; A-token), "window" (windows too, without a mask between the borders of the map; A-WSA), "merge" (what
        merging joins too; A-PMerge), "position" (where one window spans the map, distances go around it; A-RPE).  The
        weights are those of the ordinary model.
      select: how the phases of patches and of merging are chosen: by the norm of all tokens that come out ("output",
        Eq. 15 and 22), or by that of what goes in at the lattice ("input"), which costs nothing.
      anchor: a model whose every part is adaptive rolls the image into a frame of its content first, which settles ties
        and rounding (`models/adaptive.py`).
      remat, unroll: how blocks are run (`layers/stack.py`).
    """

    KNOWN_PARTS = PARTS

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
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # in this order a message names the wrong part
    select: Annotated[str, OneOf(SELECT)] = "output"
    anchor: bool = True
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        for name in ("window_size", "patch_size"):
            if isinstance(value := getattr(self, name), int):
                object.__setattr__(self, name, (value, value))
        constraints.check_fields(self, "Swin")
        self.check_stages("num_heads")
        self.check_heads(self.num_heads, self.widths)
        check_grid(self.image_size, self.patch_size, "Swin: image_size")

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    def window(self, stage: int) -> Pair:
        """(h, w) of the windows of a stage."""
        h, w = self._map(self.image_size, stage)
        return max(1, min(h, self.window_size[0])), max(1, min(w, self.window_size[1]))

    def shift(self, stage: int, image_size: tuple[int, ...]) -> Pair:
        """By how much every second block shifts its windows: by half of them, unless the map is one window."""
        (h, w), (p, q) = self._map(image_size, stage), self.window(stage)
        return p // 2 if h > p else 0, q // 2 if w > q else 0

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """ValueError unless patches, merging and windows divide an image, as an adaptive model needs it."""
        sides = []
        for axis, patch in enumerate(self.patch_size):
            windows = [patch * 2**stage * self.window(stage)[axis] for stage in range(len(self.depths))]
            sides.append(math.lcm(*windows))
        why = f"patches of {self.patch_size}, {len(self.depths)} stages, windows of {self.window_size}"
        check_torus("Swin", image_size, (sides[0], sides[1]), why)

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
    """A map of tokens.

    Attributes:
      tokens: [B, h w, width].
      grid: (h, w).
      frame: where they lie on the image.
    """

    tokens: jax.Array
    grid: Pair
    frame: Frame


class Stage(nnx.Module):
    """Patch merging, unless it is the first stage, then blocks; every second one shifts its windows."""

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        first, parts = config.version == 1, config.parts
        width, heads, window = config.widths[stage], config.num_heads[stage], config.window(stage)
        attention = WindowAttention if first else CosineWindowAttention
        torus = dict(masked="window" not in parts, around="position" in parts)

        def block(rngs):
            norms = [dense.LayerNorm(width, eps=config.norm_eps) for _ in range(2)]
            if not first:  # so that each block begins as the identity, as the official code has it
                for norm in norms:
                    norm.scale.set_value(jnp.zeros(width))
            return WindowBlock(
                norm1=norms[0],
                attention=attention(width, heads, window, **torus, rngs=rngs),
                norm2=norms[1],
                mlp=dense.Mlp(width, round(config.mlp_ratio * width), rngs=rngs),
                norm_first=first,
                dropout=config.dropout,
            )

        self.merge = PatchMerging(width // 2, norm_first=first, eps=config.norm_eps, rngs=rngs) if stage else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.window, self.parts, self.select = window, parts, config.select

    def begin(self, at: Map) -> tuple[Map, dict[str, Choice]]:
        """The input of the stage's blocks, merged and with its windows in place, and the choices made for it."""
        chosen = {}
        if self.merge is not None:
            at, chosen = self._merged(self.merge, at)
        if "window" in self.parts:
            x = at.tokens.reshape(-1, *at.grid, at.tokens.shape[-1])
            scores, places = spread(x, self.window)
            if math.prod(places) > 1:
                chosen["window"] = choice = shifts.strongest(scores)
                first = shifts.phases(choice.index, places)
                at = Map(shifts.roll(x, -first).reshape(at.tokens.shape), at.grid, at.frame.rolled(first))
        return at, chosen

    def _merged(self, merge: PatchMerging, at: Map) -> tuple[Map, dict[str, Choice]]:
        if "merge" not in self.parts:
            return Map(*merge(at.tokens, at.grid), at.frame.every((2, 2))), {}
        x, grid, choice = merge.adaptive(at.tokens, at.grid, self.select)
        frame = at.frame.rolled(shifts.phases(choice.index, (2, 2))).every((2, 2))
        return Map(x, grid, frame), {"merge": choice}


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
        """The input of the head, [*B, features]: the mean of the tokens after the norm."""
        last, _, _ = self.trunk(images, key=key, train=train)
        pooled = self.norm(last.tokens).mean(-2)
        return pooled.reshape(*images.shape[:-3], pooled.shape[-1])

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The choices of the adaptive parts for each image: the index, and the relative gap to the second best.

        Both are [B], B being all batch axes in one.  Names are "patch_embed", "stage1_merge", "stage1_window" and so
        on; indices are row-major in the phases of the stride, or the places of a window.  With an anchor they are those
        in the frame of the content, and so the same for each shift.
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

        There is no class token and no register.  With `norm` tokens of the last stage go through the final norm; those
        of the stages before have another width, and are as the block left them.

        Raises:
          IndexError: there is no such block.
          ValueError: blocks are no indices.
        """
        check_blocks("Swin", blocks, self.config.depth)
        last, seen, _ = self.trunk(images, capture=blocks, key=key, train=train)
        batch = images.shape[:-3]
        inner = {
            index: self._features(at, batch, norm and at.tokens.shape[-1] == last.tokens.shape[-1], {})
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
        config, rates = self.config, self.config.rates
        at, chosen = self._embedded(images)
        seen, first = {}, 0
        for number, stage in enumerate(self.stages):
            stop = first + len(stage.blocks)
            at, choices = stage.begin(at)
            chosen |= {f"stage{number}_{name}": choice for name, choice in choices.items()}
            x, part = stage.blocks(
                at.tokens,
                Layout(at.grid, shift=config.shift(number, images.shape[-3:-1])),
                rates=None if rates is None else rates[first:stop],
                phases=2,
                capture=tuple(index - first for index in capture if first <= index < stop),
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: at._replace(tokens=tokens) for index, tokens in part.outputs.items()}
            at, first = at._replace(tokens=x), stop
        return at, seen, chosen

    def _embedded(self, images: jax.Array) -> tuple[Map, dict[str, Choice]]:
        """The tokens of patches, and the choice of where patches begin."""
        config, embed = self.config, self.patch_embed
        grid = check_images(images, config.in_channels, config.patch_size)
        if config.parts:
            config.check_torus(images.shape[-3:-1])
        images, frame, chosen = placed(
            images.reshape(-1, *images.shape[-3:]), config, *embed.affine(), stride=config.patch_size
        )
        return Map(self.patch_norm(embed(images)), grid, frame.every(config.patch_size)), chosen

    def _features(self, at: Map, batch: tuple[int, ...], norm: bool, blocks: dict[int, Features]) -> Features:
        tokens = self.norm(at.tokens) if norm else at.tokens
        width = tokens.shape[-1]
        values = Grid(tokens.reshape(*batch, *at.grid, width), at.frame.stride, at.frame.offset.reshape(*batch, 2))
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
