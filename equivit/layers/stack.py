"""A stack of blocks: like blocks share one stacked parameter and run under `jax.lax.scan`."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers.by_image import by_image
from equivit.layers.grid import Layout
from equivit.symmetry.fields import Isotypic

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Seen(NamedTuple):
    """What was asked for on a pass through a stack.

    Attributes:
      outputs: the outputs of the blocks in `capture`, by their index.
      collected: what `collect` gave, stacked over the blocks; None where nothing was asked for.
    """

    outputs: dict[int, Any]
    collected: Any = None

    def joined(self, later: "Seen") -> "Seen":
        """With what was seen in the blocks after these."""
        collected = [part for part in (self.collected, later.collected) if part is not None]
        return Seen(self.outputs | later.outputs, _concatenated(collected))


class Stack(nnx.Module):
    """Blocks 0, 1, ... as runs of like blocks.

    Each run is one block whose parameters carry a leading axis, the blocks of the run, and is applied by `lax.scan`, so
    that depth costs no compile time.  `stack[i]` is block i; `stack.replace(i, block)` puts another there, of any
    structure.

    A block is called as `block(x, layout, *shared, rate=, phase=, train=, key=)` and returns a value of the shape of x.
    What it changes in itself, such as running statistics, comes out of the scan into the stack.

    Args:
      runs: (length, make) pairs; `make(rngs)` builds one block.
      remat: "none" keeps all activations for the backward pass, "full" recomputes each block, "dots" keeps only the
        results of the large matrix products.
      unroll: writes the blocks out one after the other instead of scanning.  Compile time then grows with depth.
    """

    def __init__(
        self,
        runs: Iterable[tuple[int, Callable[[nnx.Rngs], nnx.Module]]],
        *,
        remat: str = "none",
        unroll: bool = False,
        rngs: nnx.Rngs,
    ):
        errors.one_of("Stack: remat", remat, REMAT)
        runs = [(length, make) for length, make in runs if length]
        self.remat, self.unroll = remat, unroll
        self.lengths = tuple(length for length, _ in runs)
        self.runs = nnx.List([_stacked(length, make, rngs) for length, make in runs])

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first index, length) of each run."""
        return [(sum(self.lengths[:i]), length) for i, length in enumerate(self.lengths)]

    def __getitem__(self, index: int) -> Any:
        run, offset = self._locate(index)
        return jax.tree.map(lambda a: a[offset], self.runs[run])

    def replace(self, index: int, block: nnx.Module) -> "Stack":
        """A stack with `block` at `index`; neighbouring blocks of one structure and shape share a run."""
        self.check(index)
        blocks = [block if i == index else self[i] for i in range(len(self))]
        return self.from_blocks(blocks, remat=self.remat, unroll=self.unroll)

    @classmethod
    def from_blocks(cls, blocks: list[nnx.Module], *, remat: str = "none", unroll: bool = False) -> "Stack":
        """A stack of the given blocks."""
        stack = cls((), remat=remat, unroll=unroll, rngs=nnx.Rngs(0))
        groups: list[list[nnx.Module]] = []
        for block in blocks:
            if groups and _kind(groups[-1][0]) == _kind(block):
                groups[-1].append(block)
            else:
                groups.append([block])
        stack.lengths = tuple(map(len, groups))
        stack.runs = nnx.List([jax.tree.map(lambda *a: jnp.stack(a), *group) for group in groups])
        return stack

    def __call__(
        self,
        x,
        layout: Layout | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        shared: tuple = (),
        rates: np.ndarray | None = None,
        phases: int = 1,
        capture: tuple[int, ...] = (),
        collect: Callable[[nnx.Module, Any], Any] | None = None,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> tuple[Any, Seen]:
        """Apply blocks start <= i < stop; returns x and what was asked for.

        Args:
          layout: where the tokens lie, for every block.
          shared: modules that all blocks use; their gradients add up.
          rates: [len(self)], the rate of stochastic depth of each block; None: 0.
          phases: blocks alternate with this period: block i is told `phase=i % phases`, which is static.
          capture: the blocks whose outputs are to be kept.
          collect: `collect(block, x)` is evaluated before each block, x being what the block is given.
          train: passed on; says whether batch statistics are taken and recorded.
          key: drives what is random inside the blocks: block i always gets `fold_in(key, i)`, so the result does not
            depend on how the blocks are divided into runs or calls.  None: nothing is random.
        """
        stop = len(self) if stop is None else stop
        block = functools.partial(_call, layout=layout, shared=shared, collect=collect, train=train, key=key)
        outputs, collected = {}, []
        for run, begin, end, period in self._segments(start, stop, capture, phases):
            x, part = self._scan(run, begin, end, period, x, rates, functools.partial(block, phases=phases))
            collected += [] if part is None else [part]
            if end - 1 in capture:
                outputs[end - 1] = x
        return x, Seen(outputs, _concatenated(collected))

    def _segments(self, start, stop, capture, phases):
        """(run, begin, end, period): what one scan applies, each step being `period` blocks."""
        for run, (first, length) in enumerate(self.spans):
            begin, last = max(start, first), min(stop, first + length)
            for end in sorted({last, *(i + 1 for i in capture if begin <= i < last)} if begin < last else ()):
                whole = begin + (end - begin) // phases * phases
                if begin < whole:
                    yield run, begin, whole, phases
                if whole < end:
                    yield run, whole, end, end - whole
                begin = end

    def _scan(self, run, begin, end, period, x, rates, block):
        first, length = self.spans[run]
        chosen = slice(begin - first, end - first)
        part = self.runs[run]
        part = part if end - begin == length else jax.tree.map(lambda a: a[chosen], part)
        steps = (jnp.arange(begin, end), None if rates is None else jnp.asarray(rates[begin:end]), part)
        body = functools.partial(block, phase=begin)
        if period > 1:
            steps = jax.tree.map(lambda a: a.reshape(-1, period, *a.shape[1:]), steps)
            body = functools.partial(_several, block, begin, period)
        if REMAT[self.remat] is not None:
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=self.unroll)
        number = (end - begin) // period
        x, seen = jax.lax.scan(body, x, steps, length=number, unroll=number if self.unroll else 1)
        if period > 1:
            seen = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), seen)
        changed, collected = seen
        _write(self.runs[run], changed, None if end - begin == length else chosen)
        return x, collected

    def check(self, *indices: int) -> None:
        """Raise IndexError for an index that no block has."""
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"Stack: block {index} of {len(self)}; the blocks are 0 to {len(self) - 1}.")

    def _locate(self, index: int) -> tuple[int, int]:
        self.check(index)
        return next((run, index - first) for run, (first, n) in enumerate(self.spans) if index < first + n)


def _call(x, step, *, phase, phases, layout, shared, collect, train, key):
    """One block as a body of `lax.scan`; returns x, the variables that the block changed, and what was collected."""
    index, rate, block = step
    options = dict(
        rate=0.0 if rate is None else rate,
        phase=phase % phases,
        train=train,
        key=None if key is None else jax.random.fold_in(key, index),
    )
    collected = None if collect is None else collect(block, x)
    before = _state(block)
    # A dense block's weights are as large as its activations: reading them again for each image would cost more.
    # In training the backward pass keeps all activations anyway.
    if key is None and not train and isinstance(x, Isotypic):
        x = by_image(lambda x: block(x, layout, *shared, **options), x)
    else:
        x = block(x, layout, *shared, **options)
    after = _state(block)
    if new := after.keys() - before.keys():
        raise ValueError(f"Stack: {type(block).__name__} made {sorted(new)} when called; make variables in __init__.")
    return x, ({name: value for name, value in after.items() if value is not before[name]}, collected)


def _several(block, begin, period, x, steps):
    """`period` blocks one after the other, each with a phase of its own."""
    seen = []
    for i in range(period):
        x, part = block(x, jax.tree.map(lambda a, i=i: a[i], steps), phase=begin + i)
        seen.append(part)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *seen)


def _state(module) -> dict[str, jax.Array]:
    """The arrays of a module that are no parameters, by name."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}


def _write(run, values, chosen: slice | None):
    """Put `values` into the variables of a run, or into the rows `chosen` of them."""
    if not values:
        return

    def written(path, variable):
        new, old = values.get(".".join(map(str, path))), variable.get_value()
        return variable.replace(old if new is None else new if chosen is None else old.at[chosen].set(new))

    state = nnx.to_flat_state(nnx.state(run, nnx.Not(nnx.Param)))
    nnx.update(run, nnx.from_flat_state([(path, written(path, variable)) for path, variable in state]))


def _concatenated(parts):
    """Values stacked over some blocks each as one value over all of them; None for no parts."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _stacked(length: int, make, rngs: nnx.Rngs) -> nnx.Module:
    keys = jax.random.split(rngs.params(), length)
    return jax.vmap(lambda key: make(nnx.Rngs(params=key)))(keys)


def _kind(block):
    """What two blocks must share to be stacked: structure, static fields, shapes and types."""
    leaves, structure = jax.tree.flatten(block)
    return structure, tuple((a.shape, a.dtype) for a in leaves)
