"""Models as functions from pixels to logits or features, and their results over a data set."""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from equivit.data.devices import Batch, on_devices
from equivit.data.pixels import normalize
from equivit.models.features import Features
from equivit.precision import cast
from equivit.symmetry import fields

Predict = Callable[[jax.Array], jax.Array]
Extract = Callable[[jax.Array], Features]

IN_FLIGHT = 2  # batches in flight: enough to keep the device busy, with little memory

turned = jax.jit(fields.act_on_image, static_argnums=0)  # images, by an element of the octic group


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
    """`extract(images)`: the result of `model.features` for uint8 images [B, H, W, C]; otherwise as `predictor`."""
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
        is_real = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if is_real else leaf

    return jax.tree.map(wide, tree)


def measured(measure: Callable[[Batch], dict], batches: Iterable[Batch]) -> Iterator[dict]:
    """Yield `measure(batch)` of each batch, with the batch's "weight" [B] (0 for padding), as numpy arrays.

    Under a mesh, `batches` are this process's rows; `measure` gets global arrays, and every process gets all results.
    A result's "finite" [*, B] is whether the outputs for each example are finite; ValueError if they are not.
    """
    pending = collections.deque()
    for batch in map(on_devices, batches):
        pending.append({**measure(batch), "weight": batch["weight"]})
        if len(pending) > IN_FLIGHT:
            yield _fetched(pending.popleft())
    yield from map(_fetched, pending)


def by_example(
    measure: Callable[[Batch], dict], batches: Iterable[Batch], axis: int = -1, split: str = "evaluation split"
) -> dict[str, Any]:
    """The results of `measured` for all examples, without padding, joined along their axis of examples.

    Raises ValueError if the split, whose name is for the message, has no examples.
    """
    parts, examples = [], 0
    for result in measured(measure, batches):
        rows = np.flatnonzero(result.pop("weight") > 0)
        parts.append(jax.tree.map(lambda array, rows=rows: array.take(rows, axis), result))
        examples += len(rows)
    if not examples:
        raise ValueError(f"evaluation: the {split} has no readable examples.")
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis), *parts)


def _fetched(result):
    result = multihost_utils.process_allgather(result, tiled=True)
    if not (result.pop("finite") | (result["weight"] <= 0)).all():
        raise ValueError("evaluation: the model's outputs are NaN or infinite; check its parameters and data.std.")
    return result
