"""Models as functions from pixels to logits or features."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import multihost_utils

from equivit.data.devices import Batch, on_devices
from equivit.data.pixels import normalize
from equivit.models.features import Features
from equivit.precision import cast

Predict = Callable[[jax.Array], jax.Array]
Extract = Callable[[jax.Array], Features]

IN_FLIGHT = 2  # batches in flight: enough to keep the device busy, with little memory


def predictor(
    model: nnx.Module, mean: tuple[float, ...], std: tuple[float, ...], precision: str = "float32"
) -> Predict:
    """`predict(images)`: logits [B, classes] of uint8 images [B, H, W, C], compiled once per shape.

    Args:
      model: called as `model(images)`.
      mean, std: per channel (or one for all), of pixel values in 0..1.
      precision: the precision of the model, which is cast once, here.  Logits are always float32.
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


@functools.partial(jax.jit, static_argnums=(0, 1))  # shared by all calls, so later evaluations compile nothing
def _forward(mean, std, model, images):
    return _float32(model(normalize(images, mean, std)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(mean, std, model, images):
    return _float32(model.features(normalize(images, mean, std)))


def _float32(tree):
    """Cast floating-point numbers to at least float32; offsets stay integers."""

    def wide(leaf):
        return (
            leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        )

    return jax.tree.map(wide, tree)


def measured(measure: Callable[[Batch], dict], batches: Iterable[Batch]) -> Iterator[dict]:
    """Yield `measure(batch)` of each batch, as numpy arrays.

    Under a mesh, `batches` are this process's rows; `measure` gets global arrays, and every process gets all results.

    Raises:
      ValueError: "finite" is False in a result: the model returned NaN or infinity.
    """
    pending = collections.deque()
    for batch in batches:
        pending.append(measure(on_devices(batch)))
        if len(pending) > IN_FLIGHT:
            yield _fetched(pending.popleft())
    yield from map(_fetched, pending)


def all_finite(logits: jax.Array, weight: jax.Array) -> jax.Array:
    """Whether the logits [*, B, classes] of all real examples, those with a positive weight [B], are finite."""
    return (jnp.isfinite(logits).all(-1) | (weight <= 0)).all()


def _fetched(result):
    result = multihost_utils.process_allgather(result, tiled=True)
    if not result["finite"]:
        raise ValueError("evaluation: the model's outputs are NaN or infinite; check its parameters and data.std.")
    return result
