"""Where arrays lie on the ambient mesh, for programs that XLA partitions."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from equivit.derivatives import linear

HOST = 8  # devices of a host
SPLIT = ("hosts", "fsdp")  # axes that parameters are split along, if the mesh has them
T = TypeVar("T")


def splits() -> bool:
    """Whether the ambient mesh may split arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)


def even(size: int, groups: int) -> int:
    """The least number of rows, at least `size`, of which `groups` times as many split evenly over all devices."""
    devices = jax.sharding.get_abstract_mesh().size if splits() else 1
    unit = devices // math.gcd(devices, groups)
    return -(-size // unit) * unit


def split_images(x: jax.Array) -> jax.Array:
    """The same array [..., B, N, C], with its images split over all devices, which must divide their number."""
    if not splits():
        return x
    axes = jax.sharding.get_abstract_mesh().axis_names
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 3), axes))


def gathered(tree: T) -> T:
    """The same arrays, whole on every device; XLA splits their gradients again.

    For the parameters of a block, where the block uses them.  XLA by itself may keep a matrix split along its columns
    and gather the activations of all devices instead, which are a hundred times as large.
    """
    return jax.tree.map(_gathered, tree) if splits() else tree


def of_parameter(shape: tuple[int, ...], mesh: Mesh | AbstractMesh, stacked: int = 0) -> PartitionSpec:
    """How a mesh splits a parameter: one axis over all of SPLIT if there is one, or else an axis for each.

    The largest axes are split, but not the first `stacked` ones.
    """
    sizes = {name: mesh.shape[name] for name in SPLIT if mesh.shape.get(name, 1) > 1}
    if math.prod(shape) == 0:
        return PartitionSpec()
    whole = math.prod(sizes.values())
    together = any(size % whole == 0 for size in shape[stacked:])
    parts: list[int] = list(shape)
    split: list[tuple[str, ...]] = [()] * len(parts)
    apart = [(name,) for name in sorted(sizes, key=lambda name: -sizes[name])]
    for names in [tuple(sizes)] if together else apart:
        number = math.prod(sizes[name] for name in names)
        axes = [axis for axis in range(stacked, len(shape)) if parts[axis] % number == 0]
        if axes:
            largest = max(axes, key=lambda axis: parts[axis])
            parts[largest] //= number
            split[largest] += names
    last = max((axis + 1 for axis, names in enumerate(split) if names), default=0)
    return PartitionSpec(*(names or None for names in split[:last]))


def held_share(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, stacked: Mapping[str, int]) -> float:
    """The share of all parameters that each device holds; arguments by name, as in `of_parameter`."""
    placed = {name: NamedSharding(mesh, of_parameter(shape, mesh, stacked[name])) for name, shape in shapes.items()}
    here = sum(math.prod(placed[name].shard_shape(shape)) for name, shape in shapes.items())
    return here / sum(map(math.prod, shapes.values()))


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


def _gathered(array):
    return linear(_whole, _split, (), array)


def _whole(_, array):
    return jax.lax.with_sharding_constraint(array, PartitionSpec())


def _split(_, gradient):
    """Whole, and then split at once, from which XLA makes a reduce-scatter.

    Whole alone would be an all-reduce; split alone also splits the activations that the gradient is a product of.
    """
    spec = of_parameter(gradient.shape, jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(_whole((), gradient), spec)
