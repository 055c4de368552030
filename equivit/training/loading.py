"""Load a model by place: a run directory, a saved model, or a file of pretrained weights."""

import pathlib
from typing import Any

import jax

from equivit import pretrained
from equivit.models import saved
from equivit.models.model import ModelModule
from equivit.pretrained import described, hub, places
from equivit.trained_on import TrainedOn
from equivit.training import checkpoints
from equivit.training.run import resuming


def load(directory: pathlib.Path) -> tuple[ModelModule, TrainedOn, int | None]:
    """The model in a run directory or a saved model, its training data, and the step of the checkpoint of a run.

    Raises as `checkpoints.load_run` for a run and as `saved.load` for any other directory.
    """
    if (directory / "config.json").is_file() and not saved.is_saved(directory):  # of a run
        _, model, step = checkpoints.load_run(directory)
    else:
        model, step = saved.load(directory), None
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
    source, colon, file = place.partition(":")
    if colon and source in pretrained.FORMATS:
        return pretrained.load(source, file, **hints)
    directory = pathlib.Path(place)
    public = directory.is_dir() and described.is_public(places.config(directory))
    if hub.is_place(place) or directory.is_file() or public:
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


def trained_on(place: str | pathlib.Path) -> TrainedOn:
    """The training data of the model at a place; unknown for pretrained weights."""
    directory = pathlib.Path(place)
    if (directory / "model.json").is_file():
        return saved.trained_on(directory)
    return resuming.data_before(directory)
