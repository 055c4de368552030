"""Parameters as plain dicts, and the logical tensors inside them.

Storage and meaning are kept apart.  Stored, a model is a flat dict `{leaf: array}` whose leaves may stack many tensors
of a paper along leading axes: blocks of one kind (`layers/stack.py`) and irreps of one kind (`layers/isotypic.py`).
A *logical tensor* is one of those: `blocks.7.attention.qkv.B1`.  Decay, trust ratio, learning rate, freezing, clipping
and conversion are all stated on logical tensors.

A layer declares its stacked irreps as metadata of the parameter: `nnx.Param(x, tensors=("A1", "A2", "B1", "B2"))` has
one logical tensor per entry of axis 0; `nnx.Param(x, tensors="E")` only renames the leaf.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers.stack import Stack

Arrays = dict[str, jax.Array]


class Buffer(nnx.Variable):
    """A fixed array that is saved with the model but never trained, such as a sin-cos table."""


def take(module: nnx.Module, kind: type = nnx.Param) -> Arrays:
    """The arrays of every variable of `kind`, by leaf name ("blocks.runs.0.attention.qkv.one")."""
    return {leaf: variable.get_value() for leaf, variable in _variables(module).items() if isinstance(variable, kind)}


def take_state(module: nnx.Module) -> Arrays:
    """The arrays that are not trained: running statistics and buffers."""
    return {leaf: v.get_value() for leaf, v in _variables(module).items() if not isinstance(v, nnx.Param)}


def put(module: nnx.Module, arrays: Mapping[str, jax.Array]) -> nnx.Module:
    """A copy of `module` (which may be abstract) holding `arrays`; leaves not named keep what they have."""
    graph, state = nnx.split(module)
    flat = [(path, v.replace(arrays.get(_name(path), v.get_value()))) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def abstract(module: nnx.Module) -> nnx.Module:
    """The module with shapes in place of arrays."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), module)


def names(module: nnx.Module, kind: type = nnx.Param) -> dict[str, np.ndarray]:
    """For each leaf, its logical names: a string array whose shape is the leaf's leading stack axes."""
    stacks = {path: m for path, m in nnx.iter_modules(module) if isinstance(m, Stack)}
    result = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, kind):
            result[_name(path)] = _logical_names(path, variable, stacks)
    return result


def stack_axes(module: nnx.Module) -> dict[str, int]:
    """How many leading axes of each leaf are stacks of logical tensors."""
    return {leaf: array.ndim for leaf, array in names(module).items()}


def to_logical(module: nnx.Module) -> dict[str, jax.Array]:
    """Every parameter as its logical tensors: {"blocks.7.attention.qkv.B1": [C, 3C], ...}."""
    arrays, result = take(module), {}
    for leaf, table in names(module).items():
        for index in np.ndindex(table.shape):
            result[str(table[index])] = arrays[leaf][index]
    return result


def from_logical(module: nnx.Module, tensors: Mapping[str, jax.Array]) -> nnx.Module:
    """The inverse of `to_logical`; every logical tensor of `module` must be in `tensors`."""
    arrays = {}
    for leaf, table in names(module).items():
        slices = [tensors[str(name)] for name in table.reshape(-1)]
        stack = np.stack if all(isinstance(part, np.ndarray) for part in slices) else jnp.stack  # one copy for files
        arrays[leaf] = jnp.asarray(stack(slices).reshape(*table.shape, *slices[0].shape) if table.ndim else slices[0])
    return put(module, arrays)


def per_tensor(table: np.ndarray, leaf: jax.Array, rule: Callable[[str, tuple[int, ...]], float]) -> np.ndarray:
    """`rule(name, shape)` of each logical tensor in a leaf, shaped to broadcast against the leaf."""
    shape = leaf.shape[table.ndim :]
    values = np.array([rule(str(name), shape) for name in table.reshape(-1)])
    return values.reshape((*table.shape, *(1 for _ in shape)))


def _variables(module):
    return {_name(path): variable for path, variable in nnx.to_flat_state(nnx.state(module))}


def _name(path) -> str:
    return ".".join(map(str, path))


def _logical_names(path, variable, stacks) -> np.ndarray:
    """One name per slice.  `path` is ("blocks", "runs", 0, "attention", "qkv", "one") for a leaf inside a stack."""
    tensors = variable.get_metadata().get("tensors")
    parent, last = path[:-1], (path[-1],) if tensors is None else (tensors,) if isinstance(tensors, str) else tensors
    prefixes = [""]
    for depth in range(len(parent)):
        if parent[:depth] in stacks and parent[depth] == "runs":
            start, length = stacks[parent[:depth]].spans[parent[depth + 1]]
            head, parent = ".".join(map(str, parent[:depth])), parent[depth + 2 :]
            prefixes = [f"{head}.{start + i}." for i in range(length)]
            break
    table = np.array([[prefix + ".".join(map(str, (*parent, name))) for name in last] for prefix in prefixes])
    table = table if isinstance(tensors, tuple) else table[:, 0]
    return table if prefixes != [""] else np.asarray(table[0])
