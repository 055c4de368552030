"""A stack of blocks: like blocks share one stacked parameter and run under `jax.lax.scan`."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nnx.Module):
    """Blocks 0, 1, ... as runs of like blocks.

    Each run is one block whose parameters carry a leading axis, the blocks of the run, and is applied by `lax.scan`, so
    that depth costs no compile time.  `stack[i]` is block i; `stack.replace(i, block)` puts another there, of any
    structure.  A block is called as `block(x, *shared, key=...)` and returns a value of the shape of x.

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
        if remat not in REMAT:
            raise ValueError(f"Stack: {remat=} is not one of {sorted(REMAT)}.")
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

    def __getitem__(self, index: int) -> nnx.Module:
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
        self, x, *, start: int = 0, stop: int | None = None, capture: tuple[int, ...] = (), shared: tuple = (), key=None
    ):
        """Apply blocks start <= i < stop; returns x and {i: output of block i} for each i in `capture`.

        `key` drives what is random inside the blocks (drop path, dropout): block i always gets `fold_in(key, i)`, so
        the result does not depend on how the blocks are divided into runs or calls.  None: nothing is random.
        `shared` goes to every block: modules that all of them use, whose gradients add up.
        """
        stop, captured = len(self) if stop is None else stop, {}
        for run, (first, length) in zip(self.runs, self.spans, strict=True):
            begin, end = max(start, first), min(stop, first + length)
            cuts = [i + 1 for i in sorted(set(capture)) if begin <= i < end]
            for cut in [*cuts, end] if begin < end else []:
                if begin < cut:
                    x, begin = self._apply(run, x, begin, cut, first, shared, key), cut
                if cut - 1 in capture:
                    captured[cut - 1] = x
        return x, captured

    def _apply(self, run, x, begin, end, first, shared, key):
        part = run if end - begin == _length(run) else jax.tree.map(lambda a: a[begin - first : end - first], run)

        def body(x, index_block):
            index, block = index_block
            return block(x, *shared, key=None if key is None else jax.random.fold_in(key, index)), None

        if REMAT[self.remat] is not None:
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=self.unroll)
        return jax.lax.scan(body, x, (jnp.arange(begin, end), part), unroll=end - begin if self.unroll else 1)[0]

    def check(self, *indices: int) -> None:
        """Raise IndexError for an index that no block has."""
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"Stack: block {index} of {len(self)}; the blocks are 0 to {len(self) - 1}.")

    def _locate(self, index: int) -> tuple[int, int]:
        self.check(index)
        return next((run, index - first) for run, (first, n) in enumerate(self.spans) if index < first + n)


def _stacked(length: int, make, rngs: nnx.Rngs) -> nnx.Module:
    keys = jax.random.split(rngs.params(), length)
    return jax.vmap(lambda key: make(nnx.Rngs(params=key)))(keys)


def _length(run) -> int:
    return jax.tree.leaves(run)[0].shape[0]


def _kind(block):
    """What two blocks must share to be stacked: structure, static fields, shapes and types."""
    leaves, structure = jax.tree.flatten(block)
    return structure, tuple((a.shape, a.dtype) for a in leaves)
