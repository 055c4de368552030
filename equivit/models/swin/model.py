"""Swin transformers: stages of blocks that attend within windows, with patch merging in between.

| version | norms                        | attention                                     | bias by relative position |
|---------|------------------------------|-----------------------------------------------|---------------------------|
| 1       | before each branch           | products of queries and keys                  | a learned table           |
| 2       | after each branch            | cosines, times a learned factor of each head  | a small MLP of distances  |

With `SwinConfig.adaptive` the model is truly shift-equivariant.

Sources: Swin (arXiv 2103.14030); SwinV2 (arXiv 2111.09883); A-Swin and A-SwinV2 (arXiv 2305.16316).
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Depth, OneOf, PositiveFloat, PositiveInt, Size, Words
from equivit.layers import dense
from equivit.layers.grid import Layout, check_grid
from equivit.layers.stack import Stack
from equivit.models.adaptive import aligned, check_torus
from equivit.models.model import Preset
from equivit.models.staged import Map, Staged, StagedTransformerConfig, TokenBlock, split_prefix
from equivit.models.swin.merge import PatchMerging
from equivit.models.swin.window import CosineWindowAttention, Pair, WindowAttention, spread
from equivit.symmetry import shifts

PARTS = ("token", "window", "merge", "position")
Window = Annotated[tuple[PositiveInt, PositiveInt], Words("(height, width) in tokens")]


@dataclasses.dataclass(frozen=True)
class SwinConfig(StagedTransformerConfig):
    """The configuration of a Swin transformer: the fields of its bases and these.

    There is no padding option: the patches of the only convolution do not overlap.

    Attributes:
      width: width of the first stage; it doubles with each stage.
      depths, num_heads: number of blocks, and heads per block, of each stage.
      version: 1 or 2, a row of the table above.
      window_size: (height, width) of a window in tokens; an int for a square.  If the map of a stage is smaller along
        an axis, the window spans the map.
      image_size: (height, width) that determines the windows; the model takes any size that the patch divides.
      patch_size: (height, width) of a patch in pixels; an int for a square.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (the content chooses the origin
        of patches; A-token), "window" (of windows, without a mask between the borders of the map; A-WSA), "merge" (of
        merging; A-PMerge), "position" (if one window spans the map, distances wrap around; A-RPE).  The weights are the
        same as in the ordinary model.
    """

    KNOWN_PARTS = PARTS

    width: PositiveInt
    depths: tuple[Depth, ...]
    num_heads: tuple[PositiveInt, ...]
    version: Literal[1, 2] = 1
    window_size: Window = (7, 7)
    patch_size: Size = (4, 4)
    norm_eps: PositiveFloat = 1e-5
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # tuple first: messages then name the wrong part

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
        """The shift of the windows in every second block: half a window, unless one window spans the map."""
        (h, w), (p, q) = self._map(image_size, stage), self.window(stage)
        return p // 2 if h > p else 0, q // 2 if w > q else 0

    @property
    def period(self) -> Pair:
        """(height, width) in pixels after which the grids of patches, merging and windows repeat."""
        sides = []
        for axis, patch in enumerate(self.patch_size):
            windows = [patch * 2**stage * self.window(stage)[axis] for stage in range(len(self.depths))]
            sides.append(math.lcm(*windows))
        return sides[0], sides[1]

    def check_torus(self, image_size: tuple[int, ...]) -> None:
        """Raise ValueError unless patches, merging and windows divide the image, as adaptive models need."""
        why = f"patches of {self.patch_size}, {len(self.depths)} stages, windows of {self.window_size}"
        check_torus("Swin", image_size, self.period, why)

    def _map(self, image_size: tuple[int, ...], stage: int) -> Pair:
        """The size of a stage's map, with halving rounded down.

        The actual map rounds up.  timm chooses windows and shifts by this size.
        """
        h, w = (size // patch // 2**stage for size, patch in zip(image_size, self.patch_size, strict=True))
        return h, w

    def build(self, rngs: nnx.Rngs) -> "Swin":
        return Swin(self, rngs=rngs)


class Stage(nnx.Module):
    """Patch merging, except in the first stage, then blocks; every second block shifts its windows."""

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        first, parts = config.version == 1, config.parts
        width, heads, window = config.widths[stage], config.num_heads[stage], config.window(stage)
        attention = WindowAttention if first else CosineWindowAttention
        torus = dict(masked="window" not in parts, circular="position" in parts)
        init = config.weights_init

        def block(rngs):
            norms = [dense.LayerNorm(width, eps=config.norm_eps) for _ in range(2)]
            if not first:  # each block starts as the identity, as in the official code
                for norm in norms:
                    norm.scale.set_value(jnp.zeros(width))
            return TokenBlock(
                norm1=norms[0],
                attention=attention(width, heads, window, **torus, init=init, rngs=rngs),
                norm2=norms[1],
                mlp=dense.Mlp(width, round(config.mlp_ratio * width), init=init, rngs=rngs),
                norm_first=first,
                dropout=config.dropout,
            )

        before, eps = width // 2, config.norm_eps
        self.merge = PatchMerging(before, norm_first=first, eps=eps, init=init, rngs=rngs) if stage else None
        self.blocks = Stack([(config.depths[stage], block)], remat=config.remat, unroll=config.unroll, rngs=rngs)


class Swin(Staged):
    """A Swin transformer of either version; see `SwinConfig`.

    The head reads the mean token of the last stage, after a norm.  Choices are called "patch_embed", "stage1_merge",
    "stage1_window" and so on.
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

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        grid = check_grid(images.shape[1:3], self.config.patch_size, "image")
        images, frame, choices = aligned(images, self.config, *self.patch_embed.affine(), stride=self.config.patch_size)
        tokens = self.patch_norm(self.patch_embed(images))
        return Map(tokens, Layout(grid), frame.every(self.config.patch_size), choices)

    def begin(self, stage: int, at: Map, *, train: bool = False) -> Map:
        """Merge patches, and put the windows in place."""
        if stage:
            at = self._merged(stage, at)
        if "window" in self.config.parts:
            at = self._windowed(stage, at)
        shift = self.config.shift(stage, at.frame.image)
        return at._replace(layout=Layout(at.layout.grid, shift=shift))

    def stage(self, stage: int, at: Map, *, train: bool, **options: Any) -> tuple[Map, dict[int, Map]]:
        return super().stage(stage, at, train=train, phases=2, **options)

    def _merged(self, stage: int, at: Map) -> Map:
        merge = self.stages[stage].merge
        if "merge" in self.config.parts:
            tokens, grid, choice = merge.adaptive(at.tokens, at.layout.grid, self.config.select)
            at = at.record(f"stage{stage}_merge", choice, (2, 2))
        else:
            tokens, grid = merge(at.tokens, at.layout.grid)
        return at._replace(tokens=tokens, layout=Layout(grid), frame=at.frame.every((2, 2)))

    def _windowed(self, stage: int, at: Map) -> Map:
        """Roll the map to the origin of windows chosen by its content."""
        x = split_prefix(at.tokens, at.layout)[1]
        scores, places = spread(x, self.config.window(stage))
        if math.prod(places) == 1:
            return at
        choice = shifts.strongest(scores)
        x = shifts.roll(x, -shifts.phases(choice.index, places))
        return at._replace(tokens=x.reshape(at.tokens.shape)).record(f"stage{stage}_window", choice, places)


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
