"""The teachers of a run: models that its objective uses but does not train (`Step.teachers`)."""

from ml_collections import ConfigDict

from equivit import errors, trained_on
from equivit.models import zoo
from equivit.models.model import ModelModule
from equivit.objectives.registry import OBJECTIVES
from equivit.trained_on import TrainedOn
from equivit.training import loading


def load_teachers(config: ConfigDict) -> dict[str, ModelModule]:
    """Load the teachers of a config by name: {"teacher": model}, or {} for an objective without one.

    `objective.teacher` is a place (`loading.load_model`), or "zoo:<name>" for a test with random weights.

    Raises:
      FileNotFoundError: the place holds no model.
    """
    place = config.objective.get("teacher")
    if place is None:
        return {}
    source, _, name = place.partition(":")
    if source != "zoo":
        return {"teacher": loading.load_model(place)}
    model, data = config.model, config.data
    size = data.train_image_size or data.image_size
    options = dict(image_size=size, num_classes=model.num_classes, in_channels=model.in_channels)
    return {"teacher": zoo.create(name, **options)}


def check_teacher_classes(config: ConfigDict, data: TrainedOn) -> None:
    """ValueError if a teacher and the data have different class names; labels matter only to a head."""
    if (place := config.objective.get("teacher")) is not None and OBJECTIVES[config.objective.name].has_head:
        thing, fix = f"config.data.source={errors.shown(config.data.source)}", "give a teacher of the same classes"
        theirs = loading.trained_on(place).classes
        trained_on.check_classes(thing, data.classes, theirs, f"objective.teacher={place}", fix)
