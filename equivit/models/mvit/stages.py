"""The stages of MViTv2: blocks that keep their map, as scans, and those that halve it or change its width."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import Pair
from equivit.layers.grid import Frame, Layout
from equivit.layers.stack import Stack
from equivit.models.mvit.attention import PoolingAttention, PoolingBlock
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice


class Shape(NamedTuple):
    """The fields that determine the shapes of a block's parameters.

    Attributes:
      before, width, after: channels of its input, inside of attention, and of its output.
      num_heads: of its attention.
      stride, kv_stride: of queries, and of keys and values.
      grid: (h, w) that positions are learned for: of the finer of queries and keys, or around a torus of the input.
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


def map_size(size: tuple[int, ...], stride: Pair) -> Pair:
    """(h, w) of what pooling leaves of a map or an image: rounded upwards."""
    h, w = (-(-n // step) for n, step in zip(size, stride, strict=True))
    return h, w


class Map(NamedTuple):
    """Tokens after a block.

    Attributes:
      tokens: [B, P + h w, width].
      grid: (h, w).
      frame: where they lie on the image.
    """

    tokens: jax.Array
    grid: Pair
    frame: Frame


class Stage(nnx.Module):
    """The blocks of a stage: those that change the shape of tokens by themselves, the others as a scan.

    Args:
      config: the `MViTConfig`.
      stage: 0, 1, ...
    """

    def __init__(self, config: Any, stage: int, *, rngs: nnx.Rngs):
        shapes = config.shapes(stage)
        runs = [(len(list(run)), functools.partial(_block, config, shape)) for shape, run in itertools.groupby(shapes)]
        self.blocks = Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.changes = tuple(shape.changes for shape in shapes)
        self.stride, self.prefix = shapes[0].stride, config.prefix

    def __call__(
        self, at: Map, *, capture: tuple[int, ...], **options
    ) -> tuple[Map, dict[int, Map], dict[str, Choice]]:
        """The tokens after the last block; those after the blocks in `capture`; all choices.

        Args:
          options: `rates`, `train` and `key`, as a stack takes them.
        """
        x, layout, after = at.tokens, Layout(at.grid, self.prefix), map_size(at.grid, self.stride)
        seen, chosen = {}, {}
        for start, length in self.blocks.spans:
            if self.changes[start]:
                x, choices = self.blocks.alone(start, x, layout, **options)
                outputs, each = {start: x} if start in capture else {}, [choices]
            else:
                span = dict(start=start, stop=start + length, capture=capture, aux=True)
                x, part = self.blocks(x, layout, **span, **options)
                outputs, each = part.outputs, [_row(part.collected, i) for i in range(length)]
            seen |= outputs
            for i, choices in enumerate(each, start):
                chosen |= {f"block{i}_{name}": choice for name, choice in choices.items()}
            layout = Layout(after, self.prefix)
        frame = at.frame
        if "block0_q" in chosen:  # only the first block pools queries
            frame = frame.rolled(shifts.phases(chosen["block0_q"].index, self.stride))
        frame = frame.every(self.stride)
        return Map(x, after, frame), {index: Map(tokens, after, frame) for index, tokens in seen.items()}, chosen


def _row(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def _block(config: Any, shape: Shape, rngs: nnx.Rngs) -> PoolingBlock:
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
            padding=config.mode("pool"),
            eps=config.norm_eps,
            adaptive="pool" in config.parts,
            select=config.select,
            around="position" in config.parts,
            rngs=rngs,
        ),
        shortcut=dense.Linear(shape.before, shape.width, rngs=rngs) if widens[0] else None,
        norm2=norm(shape.width),
        mlp=dense.Mlp(shape.width, round(config.mlp_ratio * shape.width), out=shape.after, rngs=rngs),
        mlp_shortcut=dense.Linear(shape.width, shape.after, rngs=rngs) if widens[1] else None,
        dropout=config.dropout,
    )
