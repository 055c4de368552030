"""Protocols by name, on the evaluation split of a config."""

import difflib
import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit.data import loader
from equivit.evaluation import classification, orientation
from equivit.evaluation.equivariance import field_error
from equivit.evaluation.predictions import Batch, Predict, predictor
from equivit.models.vit import ViT

PROTOCOLS = ("accuracy", "orientation")
Track = Callable[[Iterable[Batch], int, str], Iterable[Batch]]


def evaluate(model: nnx.Module, config: ConfigDict, suite: Iterable[str], *, track: Track | None = None) -> dict:
    """Run protocols on the evaluation split of `config.data`.

    Under a mesh (`jax.set_mesh`) batches are split over all its devices; every process gets the results.

    Args:
      model: called as `model(images)`; its arrays lie on the mesh, if there is one.
      config: of the run; `data`, `batch_size` and `seed` count.
      suite: names of `PROTOCOLS`.
      track: shows progress; `track(batches, total, name)` yields the batches.

    Returns:
      The results of each protocol by its name: `classification.accuracy`; `orientation.orientation` with "field_error"
      (`equivariance.field_error`) where the model has equivariant blocks.

    Raises:
      ValueError: no such protocol, or the model does not fit the data.
      FileNotFoundError: the data are not there.
    """
    suite = check(suite)
    pipeline = _pipeline(config)
    predict = predictor(model, config.data.mean, config.data.std)
    _check_fit(predict, pipeline, config)
    results = {}
    for name in suite:
        batches = pipeline.batches()
        batches = batches if track is None else track(batches, pipeline.num_batches, name)
        if name == "accuracy":
            results[name] = classification.accuracy(predict, batches)
        else:
            batches = iter(batches)
            first = next(batches)
            results[name] = orientation.orientation(predict, itertools.chain([first], batches), seed=config.seed)
            results[name] |= _field_error(model, first, config)
    return results


def check(suite: Iterable[str]) -> tuple[str, ...]:
    """The names of a suite; ValueError for one that is not known, or for none."""
    suite = tuple(suite)
    for name in suite:
        if name not in PROTOCOLS:
            near = difflib.get_close_matches(name, PROTOCOLS, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            raise ValueError(f"evaluation.suite: '{name}' is not one of {', '.join(PROTOCOLS)}{hint}.")
    if not suite:
        raise ValueError(f"evaluation.suite is empty; name some of {', '.join(PROTOCOLS)}.")
    return suite


def scalars(results: dict) -> dict[str, float]:
    """The single numbers among the results, such as "orientation/rotated", for logs and for statistics over seeds."""
    return {
        f"{protocol}/{name}": float(value)
        for protocol, figures in results.items()
        for name, value in figures.items()
        if isinstance(value, int | float)
    }


def _pipeline(config):
    """The evaluation split, in batches that all devices can share; the last one is padded anyway."""
    devices = jax.device_count()
    return loader.evaluate(
        config.data,
        batch_size=-(-config.batch_size // devices) * devices,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def _check_fit(predict: Predict, pipeline, config):
    images = jax.ShapeDtypeStruct((jax.device_count(), *config.data.image_size, pipeline.channels), np.uint8)
    classes = jax.eval_shape(predict, images).shape[-1]
    if classes != pipeline.num_classes:
        raise ValueError(
            f"evaluation: the model tells {classes} classes apart and {config.data.source} has {pipeline.num_classes}; "
            "give the data that it was trained for with data.source, or another model."
        )


def _field_error(model, batch, config):
    if not isinstance(model, ViT) or model.config.k == 0:
        return {}
    return {"field_error": field_error(model, batch, config.data.mean, config.data.std)}
