"""The mesh (data, fsdp), and shardings derived from shapes.

If `fsdp` is a larger multiple of 8, it has two axes: hosts, and the 8 devices of a host.  A matrix of 160 x 480 is then
split over 64 devices, as 20 x 60, though 64 divides neither axis.  Optimiser state and averaged weights are sharded
like their parameters.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from equivit import errors
from equivit.constraints import PositiveInt, Words
from equivit.kernels.mesh import HOST, of_parameter


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The `mesh` section of a configuration."""

    data: Annotated[PositiveInt | Literal[-1], Words("positive, or -1 for the remaining devices")] = -1
    fsdp: PositiveInt = 1


def create_mesh(config: ConfigDict, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices in a mesh [data, fsdp], or [data, hosts, 8] if `fsdp` is a larger multiple of 8.

    `config.data=-1` uses the devices that remain after `fsdp`.  The devices follow the order of their processes: so the
    rows of the processes, one after the other, are the global batch (`data.batches.Share`).

    Args:
      devices: None: all of this run.

    Raises ValueError if the sizes do not multiply to the number of devices, or processes differ in their number.
    """
    devices = jax.devices() if devices is None else devices
    _check_equal_numbers(devices)
    number = len(devices)
    fsdp = config.fsdp
    data = number // fsdp if config.data == -1 else config.data
    if data * fsdp != number:
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        raise ValueError(
            f"mesh: data={config.data} and fsdp={fsdp} do not multiply to the {number} devices here; "
            f"fsdp may be one of {divisors} with data=-1."
        )
    shape, names = (data, fsdp), ("data", "fsdp")
    if fsdp > HOST and fsdp % HOST == 0:
        shape, names = (data, fsdp // HOST, HOST), ("data", "hosts", "fsdp")
    # On a TPU, neighbours in this arrangement are neighbours in the machine, but processes may alternate in it.
    arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    by_process = sorted(arranged.flat, key=lambda device: device.process_index)
    return Mesh(np.array(by_process).reshape(shape), names, axis_types=(AxisType.Auto,) * len(shape))


def _check_equal_numbers(devices):
    """ValueError unless each process has the same number of devices; it gets an equal share of every batch."""
    counts = collections.Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        (most, larger), *_, (least, smaller) = counts.most_common()
        raise ValueError(
            f"mesh: process {most} has {larger} devices and process {least} has {smaller}, and all must have the same "
            "number; start the run on equal machines, or hide devices, such as by CUDA_VISIBLE_DEVICES."
        )


def batch(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Split the examples, the first axis of an array, over all devices."""
    return PartitionSpec(mesh.axis_names)


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

    A leaf is split along its largest divisible axis, never along a stack axis; along two if it takes two to split it
    over `hosts` too.  `stack_axes` counts the stack axes of each parameter; an array under a parameter's name elsewhere
    in the tree (moments, averages) follows it.
    """

    def rule(path, leaf):
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in stack_axes), "")
        return NamedSharding(mesh, of_parameter(leaf.shape, mesh, stack_axes.get(name, 0)))

    return jax.tree.map_with_path(rule, tree)


def to_global(mesh: Mesh, rows: dict) -> dict[str, jax.Array]:
    """Turn this process's rows of a batch into global arrays, sharded over all devices along the example axis."""
    sharding = NamedSharding(mesh, batch(mesh))
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in rows.items()}
