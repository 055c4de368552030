"""A stack of blocks: blocks of the same structure have stacked parameters and run under `jax.lax.scan`."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core

from equivit import errors
from equivit.kernels.dispatch import AUTO
from equivit.layers.batch_stats import check_taken, recording
from equivit.layers.dropout import Key
from equivit.layers.grid import Layout
from equivit.layers.rngs import Keys

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("product"),  # `kernels.product.named_product`
    ),
}

M = TypeVar("M", bound=nnx.Module)
Indices = tuple[int, ...]  # of blocks
Make = Callable[[nnx.Rngs], nnx.Module]
# (carry, index of the block, the block, its input) -> carry
Fold = Callable[[Any, Any, nnx.Module, Any], Any]


_UNROLL = contextvars.ContextVar("unroll", default=False)  # the meaning of `unroll=None`


@contextlib.contextmanager
def unrolled(default: bool) -> Iterator[None]:
    """A context in which stacks traced with `unroll=None` are unrolled, or not."""
    token = _UNROLL.set(default)
    try:
        yield
    finally:
        _UNROLL.reset(token)


class Stack(nnx.Module):
    """Blocks 0, 1, ..., grouped into runs of blocks of the same structure.

    Each run is one block whose parameters have a leading axis over the blocks of the run.  It is applied by `lax.scan`,
    so depth adds no compile time.  `stack[i]` is a copy of block i.  To edit a block, write it back: `model.blocks =
    model.blocks.replace(i, block)`, which takes a block of any structure.

    A block is called as `block(x, layout, *shared, rate=, train=, key=)`, with `phase=` too if blocks alternate:

    - rate: probability of dropping a branch for a sample.
    - phase: i % phases for block i.
    - train: whether batch norms use and record the statistics of this batch.
    - key: for dropout and stochastic depth; None disables both.

    It returns a value of the shape of x.  Its changes to its own variables, such as running statistics, are written
    back to the stack.

    A profile names an operation by its block, "blocks.3/attn/linear", or in a scan by all blocks, "blocks.0-11".

    Args:
      runs: pairs (length, make); `make(rngs)` builds one block.
      remat: "none" keeps all activations for the backward pass, "full" recomputes each block, "dots" keeps only the
        results of the large matrix products.
      unroll: write the blocks out without a scan, which zero-fills, writes and reads its saved activations.  A step is
        faster; compile time grows with depth, and memory too, where the compiler undoes `remat`.  None: as the context
        `unrolled` says, for training on an accelerator, and otherwise a scan.
    """

    use: Callable[[Any], Any] | None = None  # set by `used`

    def __init__(
        self, runs: Iterable[tuple[int, Make]], *, remat: str = "none", unroll: bool | None = None, rngs: nnx.Rngs
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
        self.check(index)
        run, offset = next((run, index - first) for run, (first, n) in enumerate(self.spans) if index < first + n)
        block = jax.tree.map(lambda a: a[offset], self.runs[run])
        return block if self.use is None else self.use(block)

    def replace(self, index: int, block: nnx.Module) -> "Stack":
        """A stack with `block` at `index`; neighbouring blocks of the same structure and shapes share a run."""
        self.check(index)
        blocks = [block if i == index else self[i] for i in range(len(self))]
        return self.from_blocks(blocks, remat=self.remat, unroll=self.unroll)

    @classmethod
    def from_blocks(cls, blocks: list[nnx.Module], *, remat: str = "none", unroll: bool | None = None) -> "Stack":
        """A stack of the given blocks."""
        return cls._of_groups([list(group) for _, group in itertools.groupby(blocks, _kind)], remat, unroll)

    def unstacked(self) -> "Stack":
        """The same blocks, unrolled, each a separate run with separate parameter arrays.

        A program reads these directly; it may copy each row of stacked parameters at every run.
        """
        return self._of_groups([[self[i]] for i in range(len(self))], self.remat, unroll=True)

    @classmethod
    def _of_groups(cls, groups: list[list[nnx.Module]], remat: str, unroll: bool | None) -> "Stack":
        """A stack with a run for each group of blocks."""
        stack = cls((), remat=remat, unroll=unroll, rngs=Keys(0))
        stack.lengths = tuple(map(len, groups))
        stack.runs = nnx.List([jax.tree.map(lambda *a: jnp.stack(a), *group) for group in groups])
        return stack

    def __call__(
        self,
        x: Any,
        layout: Layout | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        shared: tuple = (),
        rates: np.ndarray | None = None,
        phases: int = 1,
        fold: Fold | None = None,
        carry: Any = None,
        train: bool = False,
        key: Key = None,
    ) -> tuple[Any, Any]:
        """Apply blocks start <= i < stop; returns x and the last carry.

        A single block is called without a scan, so it may return a value of another shape.

        Args:
          layout, train: passed to every block.
          shared: modules that all blocks use; their gradients add up.
          rates: [len(self)], the stochastic-depth rate of each block; None: 0.
          phases: the period of alternating blocks; if more than 1, block i gets the static `phase=i % phases`.
          fold: `carry = fold(carry, index, block, x)` is evaluated before each block, on the block's input x.  The
            carry passes through the scan, so in-place updates need no second copy.
          carry: the value for the first block.
          key: block i always gets `fold_in(key, i)`, so the result does not depend on how the blocks are divided into
            runs or calls.  None disables dropout and stochastic depth.

        Raises:
          IndexError: start or stop is out of range.
          ValueError: a scanned block changes the shape or the dtype of x.
        """
        depth = sum(self.lengths)
        stop = depth if stop is None else stop
        if start < 0 or stop > depth:
            raise IndexError(f"Stack: start={start} and stop={stop} must lie between 0 and {depth}, the blocks.")
        block = _Block(self.use, layout, phases, fold, train, shared, key)
        for run, offset, begin, end, period in self._segments(start, stop, phases):
            x, carry = self.apply(run, offset, begin, end, period, (x, carry), rates, block)
        return x, carry

    def _segments(self, start, stop, phases):
        """(run, offset in the run, begin, end, period) of each scan; one step applies `period` blocks."""
        first, found = 0, []
        for run, length in enumerate(self.lengths):
            begin, end = max(start, first), min(stop, first + length)
            whole = begin + max(end - begin, 0) // phases * phases
            if begin < whole:
                found.append((run, begin - first, begin, whole, phases))
            if whole < end:
                found.append((run, whole - first, whole, end, end - whole))
            first += length
        return found

    def apply(self, run, offset, begin, end, period, carried, rates, block):
        """x and the carry after blocks begin <= i < end of a run, `period` of them in a step."""
        taken = recording() if block.train else contextlib.nullcontext()
        length = self.lengths[run]
        chosen, part = slice(offset, offset + end - begin), self.runs[run]
        if end - begin == 1:
            step = (begin, None if rates is None else rates[begin], jax.tree.map(lambda a: a[offset], part))
            with taken, jax.named_scope(f"blocks.{begin}"):
                policy, body = self._policy(True, part), functools.partial(block, phase=begin)
                body = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=True)
                carried, changed = body(carried, step)
            if changed:
                _write(part, {name: value[None] for name, value in changed.items()}, chosen)
            return carried
        part = part if end - begin == length else jax.tree.map(lambda a: a[chosen], part)
        steps = (jnp.arange(begin, end), None if rates is None else jnp.asarray(rates[begin:end]), part)
        if period > 1:
            steps = jax.tree.map(lambda a: a.reshape(-1, period, *a.shape[1:]), steps)
        unroll = _UNROLL.get() if self.unroll is None else self.unroll
        options: Any = dict(begin=begin, period=period, policy=self._policy(unroll, part), unroll=unroll)
        with taken, contextlib.nullcontext() if unroll else jax.named_scope(f"blocks.{begin}-{end - 1}"):
            carried, changed = _looped(block, carried, steps, **options)
        if period > 1:
            changed = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), changed)
        if changed:
            _write(self.runs[run], changed, None if end - begin == length else chosen)
        return carried

    def _policy(self, unrolled: bool, part: nnx.Module) -> Callable | None:
        if self.remat == "none" and self.use is not None and not unrolled:
            return _DependsOnTokens(frozenset(_size(a.shape[1:]) for a in jax.tree.leaves(part)))
        return REMAT[self.remat]

    def check(self, *indices: int) -> None:
        """Raise IndexError for an index out of range."""
        check_blocks("Stack", indices, len(self))


def used(module: M, use: Callable[[Any], Any]) -> M:
    """Return a copy that applies `use` to its parameters: to each block of a stack when the block runs, to others now.

    Args:
      use: maps a module to one of the same structure; hashable, as it becomes a part of that structure.
    """
    stacks = [path for path, part in nnx.iter_modules(module) if isinstance(part, Stack)]
    graph, state = nnx.split(use(module))
    before = dict(nnx.to_flat_state(nnx.state(module)))

    def choose(path, variable):
        return before[path] if any(path[: len(stack)] == stack for stack in stacks) else variable

    flat = nnx.to_flat_state(state)
    result = nnx.merge(graph, nnx.from_flat_state([(path, choose(path, variable)) for path, variable in flat]))
    for _, part in nnx.iter_modules(result):
        if isinstance(part, Stack):
            part.use = use
    return result


def captured(apply: Callable[[Any, int, int], Any], state: Any, capture: Iterable[int], start: int, stop: int) -> Any:
    """The state after blocks start <= i < stop, and the states after the blocks in `capture` by index.

    Args:
      apply: `apply(state, start, stop)` applies some blocks, such as a part of a stack.
    """
    outputs = {}
    for index in sorted({i for i in capture if start <= i < stop}):
        outputs[index] = state = apply(state, start, index + 1)
        start = index + 1
    return state if start == stop else apply(state, start, stop), outputs


def collecting(look: Callable[[nnx.Module, Any], Any], depth: int, block: nnx.Module, x: Any) -> dict[str, Any]:
    """The arguments `fold` and `carry` that stack `look(block, x)` over blocks and their inputs: [depth, ...].

    Args:
      block, x: any block and its input, for the shapes.
    """

    def fold(values, index, block, x):
        return jax.tree.map(lambda a, value: a.at[index].set(value), values, look(block, x))

    shapes = jax.eval_shape(look, block, x)
    return dict(fold=fold, carry=jax.tree.map(lambda a: jnp.zeros((depth, *a.shape), a.dtype), shapes))


def check_blocks(name: str, blocks: Any, depth: int) -> None:
    """Raise IndexError unless the model called `name` has these blocks; ValueError if they are not integers."""
    try:
        indices = [operator.index(block) for block in blocks]
    except TypeError:  # not a collection of integers
        indices = None
    if indices is None or any(isinstance(block, bool) for block in blocks):
        like = (blocks,) if isinstance(blocks, int) and not isinstance(blocks, bool) else (0,)
        raise ValueError(f"{name}: blocks={errors.shown(blocks)} must be whole numbers in a tuple, such as {like}.")
    for index in indices:
        if not 0 <= index < depth:
            raise IndexError(f"{name}: there is no block {index}; the blocks are 0 to {depth - 1}.")


@dataclasses.dataclass(frozen=True)
class _DependsOnTokens:
    """The policy of "none" in a scan: what is computed from parameters alone is computed again.

    Kept, a scan would stack it: a second copy of all parameters, rounded or multiplied.
    """

    parameters: frozenset

    def __call__(self, primitive, *operands, **_):
        return not {_size(a.shape) for a in operands} <= self.parameters | {()}


def _size(shape):
    return tuple(n for n in shape if n > 1)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shared", "key"),
    meta_fields=("use", "layout", "phases", "fold", "train"),
)
@dataclasses.dataclass(frozen=True)
class _Block:
    """How the blocks of a call run; a pytree, whose structure is part of the key of a compiled scan."""

    use: Callable[[Any], Any] | None
    layout: Layout | None
    phases: int
    fold: Fold | None
    train: bool
    shared: tuple
    key: Key

    def __call__(self, carried, step, *, phase, scanned=False):
        """One block: x and the carry, then the changed variables."""
        (x, carry), (index, rate, block) = carried, step
        block = block if self.use is None else self.use(block)
        key = None if self.key is None else jax.random.fold_in(self.key, index)
        options: dict[str, Any] = dict(rate=0.0 if rate is None else rate, train=self.train, key=key)
        options |= dict(phase=phase % self.phases) if self.phases > 1 else {}
        carry = carry if self.fold is None else self.fold(carry, index, block, x)
        before = _state(block)
        y = block(x, self.layout, *self.shared, **options)
        pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=False)
        if scanned and any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
            raise _changes_x(block, x, y)
        after = _state(block)
        if new := after.keys() - before.keys():
            raise ValueError(
                f"Stack: {type(block).__name__} created {sorted(new)} when called; create variables in __init__."
            )
        return (y, carry), {name: value for name, value in after.items() if value is not before[name]}


def _looped(block, carried, steps, *, begin, period, policy, unroll):
    """x and the carry after all steps of `period` blocks, from block `begin` on, and the changed variables."""
    leaves = jax.tree.leaves((block, carried, steps))
    eager = all(not isinstance(a, core.Tracer) or a.to_concrete_value() is not None for a in leaves)
    if eager and not unroll and block.fold is None:  # a fold is a new function at each call
        return _compiled(block, carried, steps, begin=begin, period=period, policy=policy, using=AUTO.get())
    block = functools.partial(block, scanned=not unroll)
    body = functools.partial(block, phase=begin) if period == 1 else functools.partial(_several, block, begin, period)
    body = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=unroll)
    return _written_out(body, carried, steps, begin, period) if unroll else jax.lax.scan(body, carried, steps)


# For arrays that have values, also under `jax.grad`: JAX would compile each scan again, as its body is a new function.
# In a traced function a scan is traced where it stands: a cached trace would not see what `using` changes.
@functools.partial(jax.jit, static_argnames=("begin", "period", "policy", "using"))
def _compiled(block, carried, steps, *, using, **options):
    return _looped(block, carried, steps, unroll=False, **options)


def _changes_x(block, x, y) -> ValueError:
    """The error of a block in a scan that maps x to a y of another shape or dtype."""
    before, after = (", ".join(f"{a.dtype}{list(a.shape)}" for a in jax.tree.leaves(z)) for z in (x, y))
    return ValueError(
        f"Stack: {type(block).__name__} maps x, {before}, to {after}; blocks in a scan must keep the shape and the "
        "dtype: cast x to the dtype of the result first."
    )


def _written_out(body, carried, steps, begin, period):
    """`jax.lax.scan` without its loop.  One split gives all rows, so its gradient is one array, not a sum of many.

    Args:
      begin, period: the first block, and the blocks in a step, for the names in a trace.
    """
    leaves, structure = jax.tree.flatten(steps)
    rows = [[row.squeeze(0) for row in jnp.split(leaf, len(leaf))] for leaf in leaves]
    seen = []
    for first, row in zip(itertools.count(begin, period), zip(*rows, strict=True), strict=False):
        with jax.named_scope(f"blocks.{first}" if period == 1 else f"blocks.{first}-{first + period - 1}"):
            carried, part = body(carried, jax.tree.unflatten(structure, row))
        seen.append(part)
    return carried, jax.tree.map(lambda *parts: jnp.stack(parts), *seen)


def _several(block, begin, period, carried, steps):
    """`period` consecutive blocks, each with its own phase."""
    seen = []
    for i in range(period):
        carried, part = block(carried, jax.tree.map(lambda a, i=i: a[i], steps), phase=begin + i)
        seen.append(part)
    return carried, jax.tree.map(lambda *parts: jnp.stack(parts), *seen)


def _state(module: nnx.Module) -> dict[str, jax.Array]:
    """The arrays of a module that are not parameters, by name."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return {".".join(map(str, path)): variable.get_value() for path, variable in state}


def _write(run, values, chosen: slice | None):
    """Write `values` to the variables of a run, or to their rows `chosen`."""

    def written(path, variable):
        new, old = values.get(".".join(map(str, path))), variable.get_value()
        if new is not None and isinstance(variable, nnx.BatchStat):
            check_taken("Stack", new)
        return variable.replace(old if new is None else new if chosen is None else old.at[chosen].set(new))

    state = nnx.to_flat_state(nnx.state(run, nnx.Not(nnx.Param)))
    nnx.update(run, nnx.from_flat_state([(path, written(path, variable)) for path, variable in state]))


def _stacked(length: int, make: Make, rngs: nnx.Rngs) -> nnx.Module:
    keys = jax.random.split(rngs.params(), length)
    return jax.vmap(lambda key: make(Keys(key)))(keys)


def _kind(block):
    """The key of blocks that can be stacked: structure, static fields, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(block)
    return structure, tuple((a.shape, a.dtype) for a in leaves)
