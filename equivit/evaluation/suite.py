"""Protocols by name, on the evaluation split of a config."""

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit.data import corruptions, loader, sources
from equivit.evaluation import adaptation, classification, corrupted, orientation, reconstruction
from equivit.evaluation.equivariance import field_error
from equivit.evaluation.predictions import Batch, Predict, predictor
from equivit.models.decoders import MaskedAutoencoder
from equivit.models.vit import ViT

PROTOCOLS = ("accuracy", "present_classes", "orientation", "sar", "corruptions", "corruptions_sar", "reconstruction")
Track = Callable[[Iterable[Batch], int, str], Iterable[Batch]]


def evaluate(model: nnx.Module, config: ConfigDict, suite: Iterable[str], *, track: Track | None = None) -> dict:
    """Run protocols on the evaluation split of `config.data`.

    Under a mesh (`jax.set_mesh`) batches are split over all its devices; every process gets the results.

    Args:
      model: called as `model(images)`; its arrays lie on the mesh, if there is one.
      config: of the run; `data`, `evaluation`, `batch_size` and `seed` count.
      suite: names of `PROTOCOLS`.
      track: shows progress; `track(batches, total, name)` yields the batches.

    Returns:
      The results of each protocol by its name:
        accuracy: `classification.accuracy`;
        present_classes: the same among the classes that the split has examples of, and "classes", how many they are;
        orientation: `orientation.orientation`, with "field_error" (`equivariance.field_error`) where the model has
          equivariant blocks;
        sar: `adaptation.adaptation` on the shuffled split, with the settings of `config.evaluation.sar`;
        corruptions, corruptions_sar: `corrupted.corrupted` of accuracy and of sar, at `config.evaluation.severities`;
          the model is as it was at the beginning of each corruption;
        reconstruction: `reconstruction.reconstruction`, of masked autoencoders alone, which have no other protocol.

    Raises:
      ValueError: no such protocol, the model does not fit the data, or the library of corruptions is missing.
      FileNotFoundError: the data are not there.
    """
    suite = check(suite, autoencoder=isinstance(model, MaskedAutoencoder))
    run = _Run(model, config, predictor(model, config.data.mean, config.data.std), track)
    for name in suite:  # what cannot run shall say so before anything has taken its time
        run.open(_first_corrupted(config) if name.startswith("corruptions") else config.data)
    return {name: _PROTOCOLS[name](run, config.data, name) for name in suite}


def check(suite: Iterable[str], *, autoencoder: bool | None = None) -> tuple[str, ...]:
    """The names of a suite; ValueError for one that is not known, or for none.

    `autoencoder` says whether the model is a masked autoencoder; then a protocol of the other kind is a ValueError too.
    """
    suite = tuple(suite)
    for name in suite:
        if name not in PROTOCOLS:
            near = difflib.get_close_matches(name, PROTOCOLS, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            raise ValueError(f"evaluation.suite: '{name}' is not one of {', '.join(PROTOCOLS)}{hint}.")
        if autoencoder and name != "reconstruction":
            raise ValueError(
                f"evaluation.suite: '{name}' is for classifiers, and this is a masked autoencoder; its protocol is "
                "'reconstruction'.  Another run with config.init=<this run> trains a classifier from its encoder."
            )
        if autoencoder is False and name == "reconstruction":
            raise ValueError(
                "evaluation.suite: 'reconstruction' is for masked autoencoders, objective.name='mae'; this is none."
            )
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


@dataclasses.dataclass(frozen=True)
class _Run:
    model: nnx.Module
    config: ConfigDict
    predict: Predict
    track: Track | None

    def open(self, data: ConfigDict, *, batch_size: int | None = None, shuffle: bool = False):
        """The evaluation split, in batches that all devices can share; the last one is padded anyway."""
        devices = jax.device_count()
        pipeline = loader.evaluate(
            data,
            batch_size=-(-(batch_size or self.config.batch_size) // devices) * devices,
            seed=self.config.seed,
            shuffle=shuffle,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        if isinstance(self.model, MaskedAutoencoder):
            return pipeline
        images = jax.ShapeDtypeStruct((devices, *data.image_size, pipeline.channels), np.uint8)
        classes = jax.eval_shape(self.predict, images).shape[-1]
        if classes != pipeline.num_classes:
            raise ValueError(
                f"evaluation: the model tells {classes} classes apart and {data.source} has {pipeline.num_classes}; "
                "give the data that it was trained for with data.source, or another model.  Class folders with fewer "
                "classes belong beside those that it was trained for, as another split of that folder."
            )
        return pipeline

    def batches(self, pipeline, name):
        batches = pipeline.batches()
        return batches if self.track is None else self.track(batches, pipeline.num_batches, name)


def _accuracy(run, data, name):
    return classification.accuracy(run.predict, run.batches(run.open(data), name))


def _present_classes(run, data, name):
    pipeline = run.open(data)
    classes = sources.present(pipeline.source)
    allowed = np.isin(np.arange(pipeline.num_classes), classes)

    def predict(images):
        logits = run.predict(images)
        return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)

    return classification.accuracy(predict, run.batches(pipeline, name)) | {"classes": len(classes)}


def _orientation(run, data, name):
    batches = iter(run.batches(run.open(data), name))
    first = next(batches)
    result = orientation.orientation(run.predict, itertools.chain([first], batches), seed=run.config.seed)
    if isinstance(run.model, ViT) and run.model.config.k:
        result["field_error"] = field_error(run.model, first, data.mean, data.std)
    return result


def _sar(run, data, name):
    options = run.config.evaluation.sar.to_dict()
    pipeline = run.open(data, batch_size=options.pop("batch_size"), shuffle=True)
    settings, batches = adaptation.Sar(**options), run.batches(pipeline, name)
    return adaptation.adaptation(run.model, batches, mean=tuple(data.mean), std=tuple(data.std), settings=settings)


def _reconstruction(run, data, name):
    section = run.config.objective
    if section.name != "mae":
        raise ValueError(
            f"evaluation: config.objective.name={section.name!r} does not say how much a masked autoencoder sees; give "
            "a config with 'mae', such as configs/mae.py."
        )
    return reconstruction.reconstruction(
        run.model,
        run.batches(run.open(data), name),
        mean=data.mean,
        std=data.std,
        ratio=section.ratio,
        target=section.target,
        variance=section.variance,
        seed=run.config.seed,
    )


def _corrupted(protocol, run, data, name):
    def measure(data, stream):
        return protocol(run, data, f"{name}, {stream}")

    return corrupted.corrupted(measure, data, run.config.evaluation.severities)


_PROTOCOLS = {
    "accuracy": _accuracy,
    "present_classes": _present_classes,
    "orientation": _orientation,
    "sar": _sar,
    "reconstruction": _reconstruction,
    "corruptions": functools.partial(_corrupted, _accuracy),
    "corruptions_sar": functools.partial(_corrupted, _sar),
}


def _first_corrupted(config):
    return corrupted.section(config.data, corruptions.NAMES[0], config.evaluation.severities[0])
