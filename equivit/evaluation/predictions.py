"""A model as a function from pixels to logits or features, and batches on the devices of the run."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from equivit.data.pixels import normalize
from equivit.models.features import Features
from equivit.precision import cast

Batch = Mapping[str, np.ndarray | jax.Array]
Predict = Callable[[jax.Array], jax.Array]
Extract = Callable[[jax.Array], Features]

IN_FLIGHT = 2  # batches in flight: enough to keep the device busy, few enough to use little memory


def predictor(
    model: nnx.Module, mean: tuple[float, ...], std: tuple[float, ...], precision: str = "float32"
) -> Predict:
    """`predict(images)`: logits [B, classes] of uint8 images [B, H, W, C], compiled once per shape.

    Args:
      model: called as `model(images)`.
      mean, std: per channel (or one for all), of pixel values in 0..1.
      precision: in which the model computes; it is cast once, here.  Logits are always float32.
    """
    return functools.partial(_forward, tuple(mean), tuple(std), cast(model, precision))


def extractor(
    model: nnx.Module, mean: tuple[float, ...], std: tuple[float, ...], precision: str = "float32"
) -> Extract:
    """`extract(images)`: the `Features` of uint8 images [B, H, W, C]; no head is needed.  Otherwise as `predictor`.

    Args:
      model: called as `model.features(images)`.
    """
    return functools.partial(_features, tuple(mean), tuple(std), cast(model, precision))


@functools.partial(jax.jit, static_argnums=(0, 1))  # shared by all calls: evaluating again compiles nothing
def _forward(mean, std, model, images):
    return _float32(model(normalize(images, mean, std)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(mean, std, model, images):
    return _float32(model.features(normalize(images, mean, std)))


def _float32(tree):
    """Floating point numbers in at least float32; offsets stay integers."""

    def wide(leaf):
        return (
            leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        )

    return jax.tree.map(wide, tree)


def measured(measure: Callable[[Batch], dict], batches: Iterable[Batch]) -> Iterator[dict]:
    """`measure(batch)` of each batch, as numpy arrays.

    Under a mesh, `batches` are this process's rows; `measure` gets global arrays, and every process gets all results.

    Raises:
      ValueError: the entry "finite" of a result is False: the model returns NaN or infinity.
    """
    pending = collections.deque()
    for batch in batches:
        pending.append(measure(on_devices(batch)))
        if len(pending) > IN_FLIGHT:
            yield _fetched(pending.popleft())
    yield from map(_fetched, pending)


def on_devices(batch: Batch) -> Batch:
    """A batch sharded by example over all devices of the current mesh; unchanged if no mesh is set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def check_batch(name: str, shape: tuple[int, ...], first: tuple[int, ...]) -> None:
    """ValueError where a batch of images cannot follow the first, which one program for all is compiled for."""
    if shape[1:] != first[1:]:
        raise ValueError(f"{name}: a batch is {shape} after one of {first}; give images of one size.")
    if shape[0] > first[0]:
        raise ValueError(f"{name}: a batch is {shape} after one of {first}; give the largest batch first.")


def filled(images: np.ndarray, rows: int) -> Batch:
    """`images` on the devices, filled up to at least `rows`, as many for each device, and their `weight`.

    What was filled up has the weight 0, so that one program takes every batch.
    """
    unit = 1 if jax.sharding.get_mesh().empty else jax.local_device_count()
    rows = -(-rows // unit) * unit
    nothing = np.zeros((rows - len(images), *images.shape[1:]), images.dtype)
    weight = (np.arange(rows) < len(images)).astype(np.float32)
    return on_devices({"images": np.concatenate([images, nothing]), "weight": weight})


def scattered(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """An array that every process holds whole, split over the current mesh; on the default device if no mesh is set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])


def all_finite(logits: jax.Array, weight: jax.Array) -> jax.Array:
    """Whether the logits [*, B, classes] of all real examples, those with a positive weight [B], are finite."""
    return (jnp.isfinite(logits).all(-1) | (weight <= 0)).all()


def _fetched(result):
    result = multihost_utils.process_allgather(result, tiled=True)
    if not result["finite"]:
        raise ValueError("evaluation: the model's outputs are NaN or infinite; check its parameters and data.std.")
    return result
