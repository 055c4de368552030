"""The mesh (data, fsdp), and shardings derived from shapes.

Optimiser state and averaged weights are sharded like their parameters.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from equivit import errors
from equivit.constraints import PositiveInt, Words

BATCH = PartitionSpec(("data", "fsdp"))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The `mesh` section of a configuration."""

    data: Annotated[PositiveInt | Literal[-1], Words("positive, or -1 for the remaining devices")] = -1
    fsdp: PositiveInt = 1


def create_mesh(config: ConfigDict, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices in a mesh [data, fsdp]; `config.data=-1` uses the devices that remain after `fsdp`.

    Args:
      devices: None: all of this run.

    Raises ValueError if the sizes do not multiply to the number of devices.
    """
    number = jax.device_count() if devices is None else len(devices)
    fsdp = config.fsdp
    data = number // fsdp if config.data == -1 else config.data
    if data * fsdp != number:
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        raise ValueError(
            f"mesh: data={config.data} and fsdp={fsdp} do not multiply to the {number} devices here; "
            f"fsdp may be one of {divisors} with data=-1."
        )
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=kinds, devices=devices)


def check_batch(batch_size: int, accumulation: int, mesh: Mesh) -> None:
    """ValueError unless every device gets the same number of examples of each micro-batch."""
    unit = accumulation * mesh.size
    if batch_size % unit:
        raise ValueError(
            f"config.batch_size={batch_size} must be divisible by {unit} ({mesh.size} devices, accumulation "
            f"{accumulation}); {errors.multiples(batch_size, unit)}."
        )


def of_tree(mesh: Mesh, tree: Any, stack_axes: dict[str, int]) -> Any:
    """A NamedSharding for each leaf of an abstract tree.

    A leaf is split along `fsdp` on its largest divisible axis, never on a stack axis.  `stack_axes` counts the stack
    axes of each parameter; an array under a parameter's name elsewhere in the tree (moments, averages) follows it.
    """

    def rule(path, leaf):
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in stack_axes), "")
        return NamedSharding(mesh, _spec(leaf.shape, stack_axes.get(name, 0), mesh.shape["fsdp"]))

    return jax.tree.map_with_path(rule, tree)


def _spec(shape, stacked, fsdp):
    axes = [axis for axis in range(stacked, len(shape)) if shape[axis] % fsdp == 0]
    if fsdp == 1 or not axes or math.prod(shape) == 0:
        return PartitionSpec()
    largest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*(None for _ in range(largest)), "fsdp")


def to_global(mesh: Mesh, batch: dict) -> dict[str, jax.Array]:
    """Turn this process's rows of a batch into global arrays, sharded over all devices along the example axis."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
