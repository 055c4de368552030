"""Load a model by place: a run directory, a saved model, or a file of pretrained weights."""

import functools
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit import errors, pretrained
from equivit.data import config as data_config
from equivit.models import saved
from equivit.models.model import Config, ModelModule
from equivit.pretrained import described, hub, places
from equivit.pretrained.format import with_hints
from equivit.trained_on import UNKNOWN, TrainedOn
from equivit.training import checkpoints
from equivit.training import config as configs
from equivit.training.run import resuming

# OpenAI's and OpenCLIP's statistics; all other public weights expect ImageNet's, the default of `data`.
CLIP = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))


def is_run(place: pathlib.Path) -> bool:
    """Whether a path is a run directory; folders of other libraries have a config.json too."""
    return (place / "config.json").is_file() and ((place / "run.json").is_file() or (place / "checkpoints").is_dir())


def load(directory: pathlib.Path) -> tuple[ModelModule, TrainedOn, int | None]:
    """The model in a run directory, a saved model or public weights, its training data, and the step of a run.

    Raises as `pretrained.load` for weights, `checkpoints.load_run` for a run, and `saved.load` for any other directory.
    """
    step = None
    if not saved.is_saved(directory) and _is_public(str(directory)):
        model = pretrained.load(str(directory))
    elif not directory.exists():
        raise FileNotFoundError(f"{directory}: there is no such file or directory{errors.nearest_path(directory)}.")
    elif (directory / "config.json").is_file() and not saved.is_saved(directory):  # of a run
        _, model, step = checkpoints.load_run(directory)
    else:
        model = saved.load(directory)
    return model, trained_on(directory), step


def load_model(place: str, **hints: Any) -> ModelModule:
    """The model at a place that a config names; for a run, prints the step of the checkpoint.

    Args:
      place: a run directory, a saved model, or pretrained weights: "<source>:<file>", a file, a folder of
        transformers or timm, or "hf:ORG/NAME" (`pretrained.load`).
      hints: properties of pretrained weights that names and shapes do not determine.

    Raises:
      FileNotFoundError: the place holds no model.
    """
    source, file = _source_and_file(place)
    if source is not None:
        return pretrained.load(source, file, **hints)
    directory = pathlib.Path(place)
    if _is_public(place):
        return pretrained.load(place, **hints)
    if not any((directory / name).is_file() for name in ("config.json", "model.json")):
        raise FileNotFoundError(
            f"'{place}' is neither a run nor a saved model, nor weights such as 'timm:model.safetensors' (the sources "
            f"are {', '.join(pretrained.FORMATS)})."
        )
    model, _, step = load(directory)
    if step is not None and jax.process_index() == 0:
        print(f"{place}: the model of step {step}.", flush=True)
    return model


def check_exists(place: str) -> None:
    """FileNotFoundError if there is no file or directory at a place of `load_model`; the Hub is not asked."""
    path = pathlib.Path(_source_and_file(place)[1])
    if not hub.is_place(str(path)) and not path.exists():
        raise FileNotFoundError(f"config.init={place}: there is no {path}{errors.nearest_path(path)}.")


def with_config(place: str, weights: str | None = None) -> tuple[ConfigDict, ModelModule]:
    """The model at a place, and a config whose `data` prepare images for it.

    Args:
      place: as in `load_model`.
      weights: for a run, one of its objective's weights, such as "averaged"; None for the first.

    Raises:
      FileNotFoundError: the place holds no model.
      ValueError: `weights` of a place that is no run, or a model of other inputs than images.
    """
    if is_run(pathlib.Path(place)):
        config, model, _ = checkpoints.load_run(pathlib.Path(place), weights=weights)
        return config, model
    if weights is not None:
        raise ValueError(f"--weights={weights} is only for a run; {place} has one set of weights.")
    config, model = configs.get_base(), load_model(place)
    config.data.update(preparation(place, model.config))
    return config, model


def _source_and_file(place: str) -> tuple[str | None, str]:
    """The parts of "timm:FILE"; no source and the whole place without one."""
    source, colon, file = place.partition(":")
    return (source, file) if colon and source in pretrained.FORMATS else (None, place)


def _is_public(place: str) -> bool:
    """Whether a place is one of `pretrained.load` without a source: of the Hub, a file, or a folder of transformers."""
    path = pathlib.Path(place)
    return hub.is_place(place) or path.is_file() or path.is_dir() and described.is_public(places.config(path))


def load_with_hints(place: str, known: Mapping[str, Any]) -> ModelModule:
    """The model at a place, as `load_model`, with those hints among the known ones that its file does not determine."""
    hints = {name: value for name, value in known.items() if name != "image_size"}  # of the run, not of the file
    return with_hints(functools.partial(load_model, place), hints)


def preparation(place: str, model: Config) -> dict[str, Any]:
    """The values of `data` that prepare images for the model at a place: as recorded, or usual for its source.

    Where nothing is recorded, a line on the standard error says what is taken.

    Raises ValueError for a model of other inputs than images.
    """
    *size, channels = model.input_shape
    if len(size) != 2:
        raise ValueError(f"{place}: a {type(model).__name__} takes no images; give an image model.")
    recorded, pixels = trained_on(place).images, normalisation(place, model)
    if "mean" not in recorded and jax.process_index() == 0:
        print(
            f"{place}: nothing beside these weights says how images are normalised; taking "
            f"{'CLIP' if pixels else 'ImageNet'}'s mean and deviation (Google's ViTs and SigLIP use 0.5 for both).",
            file=sys.stderr,
            flush=True,
        )
    return {"image_size": tuple(size), **pixels, **recorded, "channels": channels}


def normalisation(place: str, model: Config) -> dict[str, tuple[float, ...]]:
    """The `mean` and `std` of the pixels of a model: recorded beside it, or usual for its source; {} if unknown."""
    recorded = trained_on(place).images
    if "mean" in recorded:
        return {key: tuple(recorded[key]) for key in ("mean", "std") if key in recorded}
    # A new head replaces the projection; a norm before the first block, which only CLIP's files have, stays.
    is_clip = place.startswith("clip:") or getattr(model, "projection", None) or getattr(model, "pre_norm", False)
    return dict(CLIP) if is_clip else {}


def check_pixels(place: str, model: Config, data: ConfigDict) -> None:
    """ValueError if `data` normalises pixels differently from the model at a place, where this is known."""
    for key, theirs in normalisation(place, model).items():
        ours = tuple(data[key])
        if len(ours) != len(theirs) or not np.allclose(ours, theirs, rtol=0, atol=1e-3):  # some files round them
            fix = ",".join(f"{value:g}" for value in theirs)
            raise ValueError(
                f"--config.data.{key}={ours}: the images of {place} are normalised by {key}={theirs}; give "
                f"--config.data.{key}={fix}."
            )


def trained_on(place: str | pathlib.Path) -> TrainedOn:
    """The training data of the model at a place; of pretrained weights what files beside them say."""
    _, place = _source_and_file(str(place))
    directory = pathlib.Path(place)
    if (directory / "model.json").is_file():
        return saved.trained_on(directory)
    if _is_public(place):
        return pretrained.trained_on(place)
    if not is_run(directory):
        return UNKNOWN
    images = data_config.preparation(configs.from_json(directory / "config.json").data)
    return resuming.data_before(directory)._replace(images=images)
