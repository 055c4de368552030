"""A model as a function from pixels to logits, and batches on the devices of the run."""

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

Batch = Mapping[str, np.ndarray | jax.Array]
Predict = Callable[[jax.Array], jax.Array]

IN_FLIGHT = 2  # batches the device may be behind: enough to keep it busy, few enough to hold little memory


def predictor(model: nnx.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> Predict:
    """`predict(images)`: the logits [B, classes] of uint8 images [B, H, W, C], compiled once for each shape.

    Args:
      model: called as `model(images)`.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
    """
    return functools.partial(_forward, tuple(mean), tuple(std), model)


@functools.partial(jax.jit, static_argnums=(0, 1))  # one for all calls: evaluating again compiles nothing
def _forward(mean, std, model, images):
    logits = model(normalize(images, mean, std))
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def measured(measure: Callable[[Batch], dict], batches: Iterable[Batch]) -> Iterator[dict]:
    """`measure(batch)` of each batch, as numpy arrays.

    Under a mesh, `batches` are this process's rows; `measure` gets global arrays, and every process gets all results.

    Raises:
      ValueError: an entry "finite" of a result is False: the model gives NaN or infinity.
    """
    pending = collections.deque()
    for batch in batches:
        pending.append(measure(on_devices(batch)))
        if len(pending) > IN_FLIGHT:
            yield _fetched(pending.popleft())
    yield from map(_fetched, pending)


def on_devices(batch: Batch) -> Batch:
    """A batch split along its examples over all devices of the current mesh; as it is where no mesh is set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def all_finite(logits: jax.Array, weight: jax.Array) -> jax.Array:
    """Whether the logits [*, B, classes] of all real examples, those of positive weight [B], are finite."""
    return (jnp.isfinite(logits).all(-1) | (weight <= 0)).all()


def _fetched(result):
    result = multihost_utils.process_allgather(result, tiled=True)
    if not result["finite"]:
        raise ValueError("evaluation: the model's logits are NaN or infinite; its parameters or data.std are broken.")
    return result
