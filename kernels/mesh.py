"""Where arrays lie on the ambient mesh, for programs that XLA partitions."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

T = TypeVar("T")


def splits() -> bool:
    """Whether the ambient mesh may split arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)


def gathered(tree: T) -> T:
    """The same arrays, whole on every device; XLA splits their gradients again.

    For the parameters of a block, where the block uses them.  XLA by itself may keep a matrix split along its columns
    and gather the activations of all devices instead, which are a hundred times as large.
    """
    return jax.tree.map(_whole, tree) if splits() else tree


def on_rows(kernel: Callable, *arrays: jax.Array) -> jax.Array:
    """Apply a kernel on every device to its share of the rows, the first axis of the arguments and of the result.

    Rows of zeros make up a multiple of the number of devices.  XLA partitions a library's kernel by a rule that JAX
    defines, which fails where only a part of an axis of the mesh splits the rows.
    """
    if not splits():
        return kernel(*arrays)
    mesh, number = jax.sharding.get_abstract_mesh(), len(arrays[0])
    arrays = tuple(jnp.pad(a, [(0, -number % mesh.size), *[(0, 0)] * (a.ndim - 1)]) for a in arrays)
    rows = PartitionSpec(mesh.axis_names)
    return jax.shard_map(kernel, in_specs=(rows,) * len(arrays), out_specs=rows, check_vma=False)(*arrays)[:number]


def _whole(array):
    return jax.lax.with_sharding_constraint(array, PartitionSpec())
