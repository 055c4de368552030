"""Parameters as plain dicts, and the logical tensors inside them.

A model is stored as a flat dict `{leaf: array}`.  A leaf may stack many of a paper's tensors along leading axes: blocks
of one kind (`layers/stack.py`) and irreps of one kind (`layers/isotypic.py`).  A *logical tensor* is one of these:
`blocks.7.attention.qkv.B1`.  Weight decay, trust ratio, learning rate, freezing, clipping and conversion are defined on
logical tensors.

Properties of a parameter are declared on creation, as metadata of `nnx.Param(x, ...)`:

    tensors=("A1", "A2")   one logical tensor per entry of axis 0; tensors="E" only renames the leaf
    decay=False            no weight decay, whatever its shape: positions, tokens
    product=True           a factor of matrix products, which low precision may round (`precision.py`)
    norm=True              the scale or bias of a layer norm

A model lists its attributes used `before` its blocks, and those that all blocks use (`throughout`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core

from equivit.layers.stack import Stack

Arrays = dict[str, jax.Array]
Kind = type | tuple[type, ...]  # of `nnx.Variable`


class Tensor(NamedTuple):
    """A logical tensor and its declared properties."""

    name: str  # "blocks.7.attention.qkv.B1"
    shape: tuple[int, ...]  # without stack axes
    decay: bool  # whether weight decay may apply to it
    product: bool  # whether it is a factor of matrix products
    norm: bool  # whether it is the scale or bias of a layer norm
    # The layers that use it: 0 before the blocks, i + 1 is block i, `last` after them; () if unknown.
    layers: tuple[int, ...]
    last: int  # number of blocks + 1

    @property
    def block(self) -> int | None:
        """The index of the block that the tensor belongs to, or None."""
        return self.layers[0] - 1 if len(self.layers) == 1 and 0 < self.layers[0] < self.last else None


def take(module: nnx.Module, kind: Kind = nnx.Param) -> Arrays:
    """The arrays of every variable of `kind`, by leaf name ("blocks.runs.0.attention.qkv.lines")."""
    return {leaf: variable.get_value() for leaf, variable in _variables(module).items() if isinstance(variable, kind)}


def take_state(module: nnx.Module) -> Arrays:
    """The untrained arrays: running statistics and buffers."""
    return {leaf: v.get_value() for leaf, v in _variables(module).items() if not isinstance(v, nnx.Param)}


def put(module: nnx.Module, arrays: Mapping[str, jax.Array]) -> nnx.Module:
    """Copy `module`, which may be abstract, with `arrays`; other leaves keep their values."""
    graph, state = nnx.split(module)
    flat = [(path, v.replace(arrays.get(_name(path), v.get_value()))) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def abstract(module: nnx.Module) -> nnx.Module:
    """The module with `jax.ShapeDtypeStruct`s in place of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), module)


def tensors(module: nnx.Module, kind: Kind = nnx.Param) -> dict[str, np.ndarray]:
    """For each leaf, its logical tensors: an array of `Tensor` whose shape is the leaf's leading stack axes."""
    places, state = _Places(module), nnx.to_flat_state(nnx.state(module))
    return {_name(path): _logical_tensors(path, v, places) for path, v in state if isinstance(v, kind)}


def names(module: nnx.Module, kind: Kind = nnx.Param) -> dict[str, np.ndarray]:
    """For each leaf, its logical names: a string array whose shape is the leaf's leading stack axes."""
    tables = tensors(module, kind)
    return {leaf: np.array([t.name for t in table.flat]).reshape(table.shape) for leaf, table in tables.items()}


def stack_axes(*modules: nnx.Module) -> dict[str, int]:
    """The number of leading axes of each leaf that stack logical tensors."""
    return {leaf: table.ndim for module in modules for leaf, table in tensors(module, nnx.Variable).items()}


def to_logical(module: nnx.Module, kind: Kind = nnx.Param) -> dict[str, Any]:
    """Split every variable of `kind` into its logical tensors: {"blocks.7.attention.qkv.B1": [C, 3C], ...}.

    They are on the host unless the module is being traced, since JAX would compile a program for each shape.
    """
    arrays, result = take(module, kind), {}
    for leaf, table in names(module, kind).items():
        whole = arrays[leaf] if isinstance(arrays[leaf], core.Tracer) else np.asarray(arrays[leaf])
        for index in np.ndindex(table.shape):
            result[str(table[index])] = whole[index]
    return result


def from_logical(
    module: nnx.Module, tensors: Mapping[str, jax.Array | np.ndarray], kind: Kind = nnx.Param
) -> nnx.Module:
    """The inverse of `to_logical`; KeyError if a logical tensor of `module` is not in `tensors`."""
    return put(module, {leaf: _stacked(table, tensors) for leaf, table in names(module, kind).items()})


def is_finite(tensor: np.ndarray) -> bool:
    """Whether a tensor has neither NaN nor infinity in float32; always true for integers."""
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return True
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite
        return bool(np.isfinite(tensor.astype(np.float32)).all())


def stacked(module: nnx.Module, tensors: Mapping[str, jax.Array], kind: Kind = nnx.Param) -> Arrays:
    """Stack the leaves of `module`, which may be abstract, whose logical tensors are all in `tensors`."""
    tables = names(module, kind)
    whole = {leaf: table for leaf, table in tables.items() if all(str(name) in tensors for name in table.flat)}
    return {leaf: _stacked(table, tensors) for leaf, table in whole.items()}


def per_tensor(table: np.ndarray, leaf: jax.Array, rule: Callable[[Tensor], float]) -> np.ndarray:
    """`rule(tensor)` for each logical tensor in a leaf, shaped to broadcast against the leaf."""
    values = np.array([rule(tensor) for tensor in table.flat])
    return values.reshape((*table.shape, *(1 for _ in leaf.shape[table.ndim :])))


def _variables(module):
    return {_name(path): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


def _name(path) -> str:
    return ".".join(map(str, path))


def _stacked(table: np.ndarray, tensors: Mapping[str, jax.Array | np.ndarray]) -> jax.Array:
    slices = [tensors[str(name)] for name in table.flat]
    shape = (*table.shape, *slices[0].shape)
    if all(isinstance(part, np.ndarray | np.generic) for part in slices):  # from files: one copy, no compilation
        return jax.device_put(np.stack(slices).reshape(shape))
    return jnp.stack(slices).reshape(shape)


class _Places:
    """The places of leaves in a model: their stack, and their position relative to the blocks.

    Blocks are numbered across all stacks of the innermost module with `before`, in the order of their paths; stacks may
    be inside stages of that module.
    """

    def __init__(self, module: nnx.Module):
        modules = dict(nnx.iter_modules(module))
        self.stacks = {path: m for path, m in modules.items() if isinstance(m, Stack)}
        self.models: dict[Any, Any] = {path: m for path, m in modules.items() if hasattr(m, "before")}
        self._first, self._depth = {}, {}
        for path in sorted(self.stacks):
            owner = self._owner(path)
            owner = path if owner is None else owner
            self._first[path] = self._depth.get(owner, 0)
            self._depth[owner] = self._first[path] + len(self.stacks[path])

    def _owner(self, path):
        above = [path[:n] for n in range(len(path) + 1) if path[:n] in self.models]
        return above[-1] if above else None

    def _stage(self, path, owner):
        """The stack in the same stage as a leaf, such as patch merging, which counts with the stage's first block.

        timm groups the parameters of Swin like this for layer-wise learning rates; SimMIM's code counts merging with
        the block before it.
        """
        inside = (stack for stack in self.stacks if len(stack) > len(owner) + 1)
        return next((stack for stack in inside if path[: len(stack) - 1] == stack[:-1]), None)

    def layers(self, path, stack=None, index=0) -> tuple[tuple[int, ...], int]:
        """`Tensor.layers` and `Tensor.last` of a leaf; in a stack, given the stack's path and the block's index."""
        owner = self._owner(path)
        if stack is not None:
            depth = self._depth[stack if owner is None else owner]
            return (self._first[stack] + index + 1,), depth + 1
        depth = self._depth.get(owner, 0)
        if owner is None or not depth:
            return (), 0
        if (stage := self._stage(path, owner)) is not None:
            return self.layers(path, stage)
        attribute, model = path[len(owner)], self.models[owner]
        if attribute in getattr(model, "throughout", ()):
            return tuple(range(1, depth + 1)), depth + 1
        return (0 if attribute in model.before else depth + 1,), depth + 1


def _logical_tensors(path, variable, places) -> np.ndarray:
    """One entry per slice.  `path` is ("blocks", "runs", 0, "attention", "qkv", "lines") for a leaf inside a stack."""
    about = variable.get_metadata()
    names = about.get("tensors")
    last = (path[-1],) if names is None else (names,) if isinstance(names, str) else names
    parent, rows = path[:-1], [("", *places.layers(path))]
    stack = next((path[:n] for n in range(len(path)) if path[:n] in places.stacks and path[n] == "runs"), None)
    if stack is not None:
        start, length = places.stacks[stack].spans[path[len(stack) + 1]]
        blocks = range(start, start + length)
        rows = [(f"{_name(stack)}.{i}.", *places.layers(path, stack, i)) for i in blocks]
        parent = path[len(stack) + 2 : -1]
    axes = (len(rows),) * (stack is not None) + (len(last),) * isinstance(names, tuple)
    decay, product, norm = (bool(about.get(name, name == "decay")) for name in ("decay", "product", "norm"))
    shape = tuple(variable.get_value().shape[len(axes) :])
    table = np.empty((len(rows), len(last)), object)
    for i, (prefix, layers, top) in enumerate(rows):
        for j, name in enumerate(last):
            table[i, j] = Tensor(prefix + _name((*parent, name)), shape, decay, product, norm, layers, top)
    return table.reshape(axes)
