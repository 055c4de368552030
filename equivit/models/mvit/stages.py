"""The stages of MViTv2: blocks that keep the shape of the map run as scans; others change its size or width."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense
from equivit.layers.convolution import Pair
from equivit.layers.grid import Layout
from equivit.layers.stack import Stack, captured
from equivit.models.mvit.attention import PoolingAttention, PoolingBlock
from equivit.models.staged import Map
from equivit.symmetry.shifts import Choice


class Shape(NamedTuple):
    """The fields that determine the shapes of a block's parameters.

    Attributes:
      before, width, after: channels of the input, within attention, and of the output.
      num_heads: heads of its attention.
      stride, kv_stride: strides of queries, and of keys and values.
      grid: (h, w) of the position tables: the finer grid of queries and keys, or on a torus the input grid.
    """

    before: int
    width: int
    after: int
    num_heads: int
    stride: Pair
    kv_stride: Pair
    grid: Pair


def map_size(size: tuple[int, ...], stride: Pair) -> Pair:
    """The size (h, w) of a map or image after pooling, rounded up."""
    h, w = (-(-n // step) for n, step in zip(size, stride, strict=True))
    return h, w


class Stage(nnx.Module):
    """The blocks of a stage: blocks that change the shape run alone, the others as a scan.

    Args:
      config: the `MViTConfig`.
      stage: 0, 1, ...
    """

    def __init__(self, config: Any, stage: int, *, rngs: nnx.Rngs):
        shapes = config.shapes(stage)
        runs = [(len(list(run)), functools.partial(_block, config, shape)) for shape, run in itertools.groupby(shapes)]
        self.blocks = Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.stride = shapes[0].stride

    def __call__(self, at: Map, name: str, *, capture: tuple[int, ...], **options: Any) -> tuple[Map, dict[int, Map]]:
        """The map after the last block, and those after the blocks in `capture`.

        Args:
          name: prefix of the names of choices.
          options: `rates`, `train` and `key` of a `Stack`.
        """
        x, layout = at.tokens, at.layout
        after = layout._replace(grid=map_size(layout.grid, self.stride))
        outputs, choices = {}, []
        for start, length in self.blocks.spans:
            x, chosen, seen = self._span(x, layout, start, start + length, capture, options)
            choices += [jax.tree.map(lambda a, i=i: a[i], chosen) for i in range(length)]
            outputs |= seen
            layout = after
        if "q" in choices[0]:  # only the first block pools queries
            at = at.record(f"{name}_block0_q", choices[0]["q"], self.stride)
        chosen = {f"{name}_block{i}_{of}": choice for i, one in enumerate(choices) for of, choice in one.items()}
        at = Map(x, after, at.frame.every(self.stride), at.choices | chosen)
        return at, {index: at._replace(tokens=tokens) for index, tokens in outputs.items()}

    def _span(
        self, x: jax.Array, layout: Layout, start: int, stop: int, capture: tuple[int, ...], options: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Choice], dict[int, jax.Array]]:
        """The tokens after a run of blocks, their stacked choices, and the tokens after the blocks in `capture`."""
        blocks, shapes = self.blocks, jax.eval_shape(lambda x: self.blocks[start]((x, {}), layout)[1], x)
        none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        chosen = jax.tree.map(lambda a: jnp.zeros((stop - start, *a.shape), a.dtype), shapes)

        def written(chosen, index, choices):
            return jax.tree.map(lambda a, choice: a.at[index - start].set(choice), chosen, choices)

        def fold(chosen, index, block, x):  # before the first block this writes to the last row, which is overwritten
            return written(chosen, index - 1, x[1])

        def apply(state, start, stop):
            return blocks(state[0], layout, start=start, stop=stop, fold=fold, carry=state[1], **options)

        ((x, last), chosen), seen = captured(apply, ((x, none), chosen), capture, start, stop)
        return x, written(chosen, stop - 1, last), {index: tokens for index, ((tokens, _), _) in seen.items()}


def _block(config: Any, shape: Shape, rngs: nnx.Rngs) -> PoolingBlock:
    norm = functools.partial(dense.LayerNorm, eps=config.norm_eps)
    strides: dict[str, Any] = dict(stride=shape.stride, kv_stride=shape.kv_stride, grid=shape.grid)
    options: dict[str, Any] = dict(padding=config.mode("pool"), eps=config.norm_eps, select=config.select)
    options |= dict(adaptive="pool" in config.parts, circular="position" in config.parts)
    draw: dict[str, Any] = dict(init=config.weights_init, rngs=rngs)
    widens = shape.before != shape.width, shape.width != shape.after
    return PoolingBlock(
        norm1=norm(shape.before),
        attention=PoolingAttention(shape.before, shape.width, shape.num_heads, **strides, **options, **draw),
        shortcut=dense.Linear(shape.before, shape.width, **draw) if widens[0] else None,
        norm2=norm(shape.width),
        mlp=dense.Mlp(shape.width, round(config.mlp_ratio * shape.width), out=shape.after, **draw),
        mlp_shortcut=dense.Linear(shape.width, shape.after, **draw) if widens[1] else None,
        dropout=config.dropout,
    )
