"""The stages of an octification; a stage whose result exists is skipped."""

import json
import os
import platform
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from equivit import command, files, logical, staged
from equivit.data.config import preparation
from equivit.depthwise.training_images import TrainingImages
from equivit.evaluation import runner
from equivit.guarantees import examine, pictures
from equivit.layers.rngs import Keys
from equivit.models.reconfiguration import reconfigure
from equivit.models.vit.model import ViT
from equivit.octification import layers, measures, starts
from equivit.octification.plan import Plan
from equivit.trained_on import TrainedOn
from equivit.training import sharding

BATCH = 16  # images whose features are in memory at once
COMPARED = ("teacher", "stage2")  # the models that are timed and drawn


class Result(NamedTuple):
    """The result of an octification."""

    starts: dict[str, float]  # the relative squared error at the transition after least squares, by start
    figures: dict[str, dict[str, Any]]  # of the teacher, the start and both stages: `_measured`
    milliseconds: dict[str, Any]  # an image of the teacher and of the model, and the "machine"


def run(plan: Plan) -> Result:
    """Run all stages in order."""
    place, config = plan.workdir, plan.measured
    data = TrainedOn(images=preparation(config.data))
    teacher = staged.saved_model(place / "teacher", lambda: plan.teacher, data)
    chosen = place / "starts.json"
    start = staged.saved_model(place / "start", lambda: _start(plan, config, teacher), data, beside=chosen)
    models = dict(teacher=teacher, start=start)
    models["stage1"] = staged.trained(plan.config("stage1"), place / "stage1", place / "start")
    models["stage2"] = staged.trained(plan.config("stage2"), place / "stage2", place / "stage1")
    data = data._replace(classes=plan.classes)
    staged.saved_model(place / "model", lambda: with_head(models["stage2"], plan.loaded), data)
    figures = {name: _measured(plan, config, name, teacher, model) for name, model in models.items()}
    compared = {name: models[name] for name in COMPARED}
    _drawn(plan, config, compared)
    return Result(files.read_json(chosen), figures, _timed(plan, config, compared))


def _start(plan: Plan, config: ConfigDict, teacher: ViT) -> ViT:
    """The start with the smallest error at the transition; starts.json has the error of each."""
    images = _images(plan, config, config.data.split)
    names = starts.possible(teacher.config)
    command.say(f"Starts: {', '.join(names)}, each with least squares on {images.found} training images.")
    found = {}
    for start in names:
        model = starts.octic(teacher, plan.fields, start, Keys(config.seed))
        if start == "layers":
            model = layers.fitted(teacher, model, images)
        found[start] = starts.fitted(teacher, model, images, orientations=plan.orientations)
    files.write_text(plan.workdir / "starts.json", json.dumps({name: error for name, (_, error) in found.items()}))
    return min(found.values(), key=lambda pair: pair[1])[0]


def _images(plan: Plan, config: ConfigDict, split: str) -> TrainingImages:
    options = dict(batch_size=BATCH, seed=config.seed, workers=config.data.workers)
    return TrainingImages(config.data, plan.images, split=split, **options)


def _measured(plan: Plan, config: ConfigDict, name: str, teacher: ViT, model: ViT) -> dict[str, Any]:
    """The figures of a model, which a file stores: agreement, deviation, gigaflops and the suite of the config."""
    path = plan.workdir / "figures" / f"{name}.json"
    if not path.is_file():
        images = _images(plan, config, config.data.eval_split)
        command.say(f"Measuring {name}, on {images.found} images of {config.data.eval_split}.")
        agreement = measures.agreement(teacher, model, images, orientations=plan.orientations)
        found = dict(agreement=agreement._asdict(), deviation=measures.deviation(model, next(iter(images))))
        found |= dict(gigaflops=measures.gigaflops(model, tuple(config.data.image_size)))
        with jax.set_mesh(sharding.create_mesh(config.mesh)):
            results = runner.evaluate(model, config, config.evaluation.suite)
        path.parent.mkdir(exist_ok=True)
        files.write_text(path, json.dumps(found | dict(suite=runner.scalars(results)), indent=1) + "\n")
    return files.read_json(path, "agreement", "deviation", "gigaflops", "suite")


def _timed(plan: Plan, config: ConfigDict, models: dict[str, ViT]) -> dict[str, Any]:
    """The milliseconds of the models and the machine, which a file stores."""
    path = plan.workdir / "milliseconds.json"
    if not path.is_file():
        images = next(iter(_images(plan, config, config.data.eval_split)))
        command.say(f"Timing {' and '.join(models)}, in batches of {len(images)}.")
        found: dict[str, Any] = measures.milliseconds(models, images, config.precision)
        machine = f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores"
        found |= dict(machine=machine, batch=len(images), precision=config.precision)
        files.write_text(path, json.dumps(found, indent=1) + "\n")
    return files.read_json(path, *models, "machine", "batch", "precision")


def _drawn(plan: Plan, config: ConfigDict, models: dict[str, ViT]) -> None:
    """Draw the features of a test image and of its turned copies, moved back, by each model."""
    for name, model in models.items():
        path = plan.workdir / f"features_{name}.png"
        if not path.is_file():
            image = next(iter(_images(plan, config, config.data.eval_split)))[0]
            offset = (image.shape[0] // 3, image.shape[1] // 5)
            square = examine.takes_turned(model, image.shape[:2])
            pictures.turned_features(path, model, image, square=square, offset=offset)


def with_head(model: ViT, loaded: ViT) -> ViT:
    """The octic model with the head of the loaded one, if it has one."""
    if loaded.head is None:
        return model
    whole, _ = reconfigure(model, num_classes=loaded.config.num_classes, projection=loaded.config.projection)
    head = {name: a for name, a in logical.to_logical(loaded).items() if name.startswith("head.")}
    return starts.put(whole, head)
