"""The base class of staged backbones, whose maps get smaller and wider from stage to stage.

    images -> embed -> (begin -> blocks) of each stage -> pool -> head

A backbone defines three functions: `embed` of images; `begin`, which changes the shape of a map before a stage's
blocks; and `pool` of the last map.  If blocks change the shape, it also defines their `stride`.  The base class checks
images, runs the stages, passes on keys and stochastic-depth rates, captures maps after single blocks, and calls the
head.

A `Map` is tokens with their position on the image, which an adaptive backbone moves.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.constraints import Below1, OneOf, PositiveFloat
from equivit.layers import dense
from equivit.layers.block import branch_path
from equivit.layers.dropout import Key, Rate, dropout, split
from equivit.layers.grid import Frame, Layout, check_images
from equivit.layers.stack import Indices, Stack, captured, check_blocks
from equivit.models.adaptive import AdaptiveConfig
from equivit.models.features import Features, Grid
from equivit.models.image_config import ImageConfig
from equivit.models.model import Switched, check_head
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedConfig(ImageConfig):
    """Base of a configuration with `depths`, the blocks of each stage; `unroll` as in `layers/stack.py`."""

    unroll: bool | None = None

    @property
    def depth(self: Any) -> int:
        """Number of blocks of all stages."""
        return sum(self.depths)

    def check_stages(self: Any, *names: str) -> None:
        """Raise ValueError unless each of these fields has as many entries as `depths`."""
        for name in names:
            if len(value := getattr(self, name)) != len(self.depths):
                raise ValueError(
                    f"{_family(self)}: {name}={value} and depths={self.depths} must have one entry per stage each."
                )

    def check_heads(self, num_heads: tuple[int, ...], widths: tuple[int, ...]) -> None:
        """Raise ValueError unless the number of heads of each stage divides its width."""
        for stage, (heads, width) in enumerate(zip(num_heads, widths, strict=True)):
            what = f"the width of stage {stage}, {width}"
            errors.divides(f"{_family(self)}: num_heads[{stage}]", heads, width, what)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedTransformerConfig(AdaptiveConfig, StagedConfig):
    """Base of the configuration of a staged transformer, which may be adaptive, and has a `norm_eps` for layer norms.

    Attributes:
      mlp_ratio: hidden width of the MLP in units of its width.
      dropout: probability of zeroing an entry of a branch or of the input of the head, used when a key is given.
      init: initialisation of the weights of blocks and merging (`dense.INITS`).
    """

    mlp_ratio: PositiveFloat = 4.0
    dropout: Below1 = 0.0
    init: Annotated[str, OneOf(dense.INITS)] = "normal"

    @property
    def weights_init(self) -> Initializer:
        """The initialiser of weights that `init` names."""
        return dense.INITS[self.init]


class Map(NamedTuple):
    """Tokens on a grid, and the position of the grid on the image.

    Attributes:
      tokens: [B, prefix + h w, width]; in convolutional backbones [B, h, w, width].
      layout: the grid (h, w), and the number of tokens before it.
      frame: offset and stride of the grid in pixels.
      choices: the choices of the adaptive parts so far, by name.
    """

    tokens: jax.Array
    layout: Layout
    frame: Frame
    choices: dict[str, Choice] = {}

    @classmethod
    def of_images(cls, images: jax.Array) -> "Map":
        """The pixels of images [B, H, W, C] as a map of stride 1."""
        number, height, width, _ = images.shape
        frame = Frame(jnp.zeros((number, 2), jnp.int32), (1, 1), (height, width))
        return cls(images, Layout((height, width)), frame)

    def strided(self, tokens: jax.Array, stride: int) -> "Map":
        """The map with tokens [B, h, w, width] computed from it by a convolution of this stride."""
        grid = tokens.shape[1], tokens.shape[2]
        return self._replace(tokens=tokens, layout=Layout(grid), frame=self.frame.every((stride, stride)))

    def record(self, name: str, choice: Choice, places: tuple[int, int]) -> "Map":
        """Record that the grid was rolled to begin at the choice among `places` (rows, columns)."""
        frame = self.frame.rolled(shifts.phases(choice.index, places))
        return self._replace(frame=frame, choices=self.choices | {name: choice})


class Staged(Switched):
    """Base of a staged backbone.

    Its configuration is an `ImageConfig`.  An optional field `dropout` is the rate before the head; an adaptive
    configuration has `parts` and `check_torus` (`models/adaptive.py`).

    Attributes:
      stages: for each stage a `Stack` of blocks, or a module with the stack as `blocks`.
      norm: norm of the last map, or None.
      head: reads the pooled map; None for a model without classes.
    """

    config: Any
    stages: Any
    norm: Any = None
    head: Any

    def embed(self, images: jax.Array, *, train: bool = False) -> Map:
        """The map of images [B, H, W, C] before the first stage."""
        raise NotImplementedError

    def begin(self, stage: int, at: Map, *, train: bool = False) -> Map:
        """The input of a stage's blocks, from the map of the previous stage."""
        return at

    def pool(self, last: Map, *, train: bool = False) -> jax.Array:
        """The input of the head, [B, features]: by default the class token or the mean token, after the norm."""
        if last.layout.prefix:
            return self.norm(last.tokens[:, 0])
        return self.norm(last.tokens).mean(1)

    def stack(self, stage: int) -> Stack:
        """The blocks of a stage."""
        part = self.stages[stage]
        return part if isinstance(part, Stack) else part.blocks

    def stride(self, stage: int, start: int, stop: int) -> int:
        """The stride of the blocks start <= i < stop of a stage, on a map [B, h, w, width]."""
        return 1

    def stage(
        self, stage: int, at: Map, *, capture: Indices, train: bool, **options: Any
    ) -> tuple[Map, dict[int, Map]]:
        """The map after a stage, and the maps after its blocks in `capture`, counted from its first block.

        Args:
          options: `rates` and `key` of a `Stack`.
        """
        at, blocks = self.begin(stage, at, train=train), self.stack(stage)

        def apply(at: Map, start: int, stop: int) -> Map:
            tokens, _ = blocks(at.tokens, at.layout, start=start, stop=stop, train=train, **options)
            stride = self.stride(stage, start, stop)
            return at._replace(tokens=tokens) if stride == 1 else at.strided(tokens, stride)

        return captured(apply, at, capture, 0, len(blocks))

    def classify(self, pooled: jax.Array, *, train: bool = False) -> jax.Array:
        """The logits of pooled maps [*B, features]."""
        return self.head(pooled)

    def __call__(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C]; arguments and errors as in `Model`."""
        check_head(self)
        key, train = self.switched(key, train)
        if (rate := getattr(self.config, "dropout", None)) is None:
            return self.classify(self.pooled(images, key=key, train=train), train=train)
        trunk_key, head_key = split(key)
        pooled = self.pooled(images, key=trunk_key, train=train)
        return self.classify(dropout(pooled, rate, head_key), train=train)

    def pooled(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """The input of the head, [*B, features]."""
        key, train = self.switched(key, train)
        last, _ = self.trunk(images, key=key, train=train)
        pooled = self.pool(last, train=train)
        return pooled.reshape(*images.shape[:-3], pooled.shape[-1])

    def features(
        self, images: jax.Array, *, blocks: Indices = (), norm: bool = True, key: Key = None, train: bool = False
    ) -> Features:
        """The features as in `Model`, with blocks counted over all stages.

        Maps of stages before the last have other widths, and are not normalised.
        """
        last, seen = self.trunk(images, capture=blocks, key=key, train=train)
        batch, final = images.shape[:-3], self.config.depth - len(self.stack(len(self.stages) - 1))
        inner = {i: self._features(at, batch, norm and i >= final, {}) for i, at in seen.items()}
        return self._features(last, batch, norm, inner)

    def embedding(self, images: jax.Array) -> Features:
        """The features before the first stage, as in `Model`."""
        return self._features(self.embedded(images), images.shape[:-3], False, {})

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The choices of the adaptive parts for each image: the index, and the relative gap to the second best.

        Both are [B], with all batch axes flattened.  Indices are row-major over the phases of a stride or the positions
        of a window.  With an anchor they refer to the frame chosen by the content, so they do not depend on shifts.
        """
        return self.evaluated().trunk(images)[0].choices

    def trunk(
        self, images: jax.Array, *, capture: Indices = (), key: Key = None, train: bool = False
    ) -> tuple[Map, dict[int, Map]]:
        """The map after the last block, before any final norm, and the maps after the blocks in `capture`.

        Their batch axes are flattened into one.
        """
        check_blocks(type(self).__name__, capture, self.config.depth)
        key, train = self.switched(key, train)
        at, seen, first, rates = self.embedded(images, train=train), {}, 0, self.config.rates
        for number in range(len(self.stages)):
            stop = first + len(self.stack(number))
            at, inner = self.stage(
                number,
                at,
                capture=tuple(index - first for index in capture if first <= index < stop),
                rates=None if rates is None else rates[first:stop],
                train=train,
                key=None if key is None else jax.random.fold_in(key, number),
            )
            seen |= {first + index: inside for index, inside in inner.items()}
            first = stop
        return at, seen

    def embedded(self, images: jax.Array, *, train: bool = False) -> Map:
        """`embed` of images with any batch axes; ValueError for images that the model does not take."""
        config = self.config
        height, width = check_images(images, config.in_channels, (1, 1))
        if getattr(config, "parts", ()):
            config.check_torus((height, width))
        return self.embed(images.reshape(-1, height, width, config.in_channels), train=train)

    def _features(self, at: Map, batch: tuple[int, ...], norm: bool, blocks: dict[int, Features]) -> Features:
        tokens = self.norm(at.tokens) if norm and self.norm is not None else at.tokens
        grid, prefix, width = at.layout.grid, at.layout.prefix, tokens.shape[-1]
        tokens = tokens.reshape(*batch, prefix + math.prod(grid), width)
        values = tokens[..., prefix:, :].reshape(*batch, *grid, width)
        patches = Grid(values, at.frame.stride, at.frame.offset.reshape(*batch, 2))
        registers = jnp.zeros((*batch, 0, width), tokens.dtype)
        return Features(tokens[..., 0, :] if prefix else None, registers, patches, blocks)


def split_prefix(x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """The tokens before the map, and the map: [*B, P + h w, C] -> [*B, P, C] and [*B, h, w, C]."""
    prefix, tokens = x[..., : layout.prefix, :], x[..., layout.prefix :, :]
    return prefix, tokens.reshape(*x.shape[:-2], *layout.grid, x.shape[-1])


def join_prefix(prefix: jax.Array, maps: jax.Array) -> jax.Array:
    """The inverse of `split_prefix`: [*B, P, C] and [*B, h, w, C] -> [*B, P + h w, C], in the dtype of the map."""
    tokens = jax.lax.collapse(maps, maps.ndim - 3, maps.ndim - 1)
    return jnp.concatenate([prefix.astype(maps.dtype), tokens], axis=-2) if prefix.shape[-2] else tokens


class TokenBlock(nnx.Module):
    """x + path(attention(norm1(x))), then x + path(mlp(norm2(x))).

    With `norm_first=False` it is x + path(norm(branch(x))), the res-post-norm of SwinV2 (Section 3.2).  `path` is
    dropout, then stochastic depth.

    Shapes: [*B, prefix + h w, width] -> the same.

    Args:
      norm1, attention, norm2, mlp: the parts.
      dropout: probability of zeroing an entry of a branch.
    """

    def __init__(self, *, norm1, attention: Callable, norm2, mlp, norm_first: bool = True, dropout: float = 0.0):
        self.norm1, self.attention = norm1, attention
        self.norm2, self.mlp = norm2, mlp
        self.norm_first, self.dropout = norm_first, dropout

    def __call__(self, x: jax.Array, layout: Layout, *, rate: Rate = 0.0, key: Key = None, **options: Any) -> jax.Array:
        """The tokens after the block; arguments as in `Stack`, where `phase` and `train` go to the attention."""
        keys = split(key)
        x = self._add(x, self.norm1, lambda y: self.attention(y, layout, **options), rate, keys[0])
        return self._add(x, self.norm2, self.mlp, rate, keys[1])

    def _add(self, x: jax.Array, norm: Callable, branch: Callable, rate: Rate, key: Key) -> jax.Array:
        y = branch(norm(x)) if self.norm_first else norm(branch(x).astype(x.dtype))
        return x + branch_path(y, self.dropout, rate, key)


def _family(config: Any) -> str:
    return type(config).__name__.removesuffix("Config")
