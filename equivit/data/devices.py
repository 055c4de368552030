"""Batches and arrays on the devices of the current mesh, or on the default device if no mesh is set."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Batch = Mapping[str, np.ndarray | jax.Array]


def on_devices(batch: Batch) -> Batch:
    """A batch sharded by example over all devices of the current mesh; unchanged if no mesh is set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def padded(images: np.ndarray, rows: int) -> Batch:
    """Put `images` on the devices, padded to at least `rows` rows, the same number per device, with their `weight`.

    Padding has weight 0, so that one program serves every batch.
    """
    unit = 1 if jax.sharding.get_mesh().empty else jax.local_device_count()
    rows = -(-rows // unit) * unit
    padding = np.zeros((rows - len(images), *images.shape[1:]), images.dtype)
    weight = (np.arange(rows) < len(images)).astype(np.float32)
    return on_devices({"images": np.concatenate([images, padding]), "weight": weight})


def check_like_first(name: str, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    """ValueError if a batch of images does not fit the program compiled for the first batch.

    Args:
      name: the caller, for the message.
      shape, first: shapes of the images in this batch and the first.
    """
    if shape[1:] != first[1:]:
        raise ValueError(f"{name}: a batch is {shape} after one of {first}; give images of one size.")
    if shape[0] > first[0]:
        raise ValueError(f"{name}: a batch is {shape} after one of {first}; give the largest batch first.")


def scattered(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Split an array that every process holds over the current mesh; without a mesh, put it on the default device."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])
