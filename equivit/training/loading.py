"""Load a model by place (a run directory, a saved model, or a file of pretrained weights), and teachers of a run."""

import pathlib
from typing import Any

import jax
from ml_collections import ConfigDict

from equivit import errors, pretrained
from equivit import trained_on as facts
from equivit.models import saved, zoo
from equivit.models.model import ModelModule
from equivit.trained_on import TrainedOn
from equivit.training import checkpoints
from equivit.training.run import resuming


def load(directory: pathlib.Path) -> tuple[ModelModule, TrainedOn, int | None]:
    """The model in a run directory or a saved model, its training data, and the step of the checkpoint of a run.

    Raises as `checkpoints.load_run` for a run and as `saved.load` for any other directory.
    """
    if (directory / "config.json").is_file():
        _, model, step = checkpoints.load_run(directory)
    else:
        model, step = saved.load(directory), None
    return model, trained_on(directory), step


def load_model(place: str, **hints: Any) -> ModelModule:
    """The model at a place that a config names; for a run, prints the step of the checkpoint.

    Args:
      place: a run directory, a saved model, or pretrained weights as "<source>:<file>" (`pretrained.load`).
      hints: properties of pretrained weights that names and shapes do not determine.

    Raises:
      FileNotFoundError: the place holds no model.
    """
    source, colon, file = place.partition(":")
    if colon and source in pretrained.FORMATS:
        return pretrained.load(source, file, **hints)
    directory = pathlib.Path(place)
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


def load_teachers(config: ConfigDict) -> dict[str, ModelModule]:
    """The teachers of a config by name (`Step.teachers`): {"teacher": model}, or {} for an objective without one.

    `objective.teacher` is a place (`load_model`), or "zoo:<name>" for a test with random weights.

    Raises:
      FileNotFoundError: the place holds no model.
    """
    place = config.objective.get("teacher")
    if place is None:
        return {}
    source, _, name = place.partition(":")
    if source != "zoo":
        return {"teacher": load_model(place)}
    model, data = config.model, config.data
    size = data.train_image_size or data.image_size
    options = dict(image_size=size, num_classes=model.num_classes, in_channels=model.in_channels)
    return {"teacher": zoo.create(name, **options)}


def check_teacher_classes(config: ConfigDict, data: TrainedOn) -> None:
    """ValueError if a teacher and the data have different class names."""
    if (place := config.objective.get("teacher")) is not None:
        thing, fix = f"config.data.source={errors.shown(config.data.source)}", "give a teacher of the same classes"
        theirs = trained_on(place).classes
        facts.check_classes(thing, data.classes, theirs, f"objective.teacher={place}", fix)
