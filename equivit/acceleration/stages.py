"""The stages of an acceleration; a stage whose result exists is skipped."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit import command, export, files, profile, staged
from equivit.acceleration import nearness
from equivit.acceleration.nearness import Nearness
from equivit.acceleration.plan import Places, Plan, protocol
from equivit.depthwise import fit, selection
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.depthwise.training_images import TrainingImages
from equivit.evaluation import runner
from equivit.layers.grid import check_grid
from equivit.layers.rngs import Keys
from equivit.models.model import ModelModule
from equivit.models.vit.replaced import Replaced
from equivit.training import sharding

BATCH = 16  # images whose attention is in memory at once
ROUNDS = 50  # timing rounds


class Times(NamedTuple):
    """The exported models of a precision, before and after."""

    milliseconds: tuple[float, float]  # per image
    bytes: tuple[int, int]  # sizes of the files


class Result(NamedTuple):
    """The result of an acceleration."""

    # The name of the metric, and its values before and after; None without a head.
    metric: tuple[str, float, float] | None
    features: Nearness | None  # without a head
    times: dict[str, Times]  # by precision, float32 first
    replaced: tuple[Replaced, ...]
    sigma: list[float]  # Sigma of all blocks
    errors: dict[int, float]  # the errors of the replacements before stage 2, by block
    conditions: str  # of the timing


def run(plan: Plan) -> Result:
    """Run all stages in order."""
    place, config = plan.workdir, plan.config("stage1")
    before, data = staged.saved_model(place / "start", lambda: plan.model, plan.data), plan.data
    if not plan.fit_only:
        before = staged.trained(config, place / "stage1", place / "start")
        data = staged.trained_on(str(place / "stage1"), before)
    sigma = _sigma(plan, config, before)
    places = plan.chosen(sigma, config.seed)
    command.say(f"Replacing {shown(places)}.")
    fits = place / "fits.json"
    fitted = staged.saved_model(place / "fitted", lambda: _fitted(plan, config, before, places), data, beside=fits)
    errors = {int(block): error for block, error in files.read_json(fits).items()}
    after = fitted
    if not plan.fit_only:
        after = staged.trained(plan.config("stage2", places), place / "stage2", place / "fitted")
    metric = _metric(plan, config, before, after)
    features = _features(plan, config, before, after) if metric is None else None
    times, conditions = _timed(plan, config.data.image_size, data.classes, before, after)
    return Result(metric, features, times, plan.replaced(places), sigma.blocks.tolist(), errors, conditions)


def shown(places: Places) -> str:
    """The places in words."""
    if all(heads is None for heads in places.values()):
        return f"blocks {', '.join(map(str, places))}"
    heads = (f"{block} ({'all' if some is None else ', '.join(map(str, some))})" for block, some in places.items())
    return f"heads in blocks {', '.join(heads)}"


def _images(plan: Plan, config: ConfigDict, split: str) -> TrainingImages:
    options = dict(batch_size=BATCH, seed=config.seed, workers=config.data.workers)
    return TrainingImages(config.data, plan.images, split=split, **options)


def _sigma(plan: Plan, config: ConfigDict, model: ModelModule) -> selection.Sigma:
    """Compute Sigma; sigma.json stores it, sigma.npz its maps."""
    path = plan.workdir / "sigma.json"
    if not (path.is_file() and path.with_suffix(".npz").is_file()):
        vit = backbone(model)
        images = _images(plan, config, config.data.split)
        command.say(f"Sigma: of {vit.config.depth} blocks, on {images.found} training images.")
        moments = selection.moments(vit, images)
        found = selection.Sigma.from_moments(moments)
        grid = check_grid(config.data.image_size, vit.config.patch_size, "image_size")
        maps = selection.aligned(jax.vmap(selection.Moments.deviation)(moments).mean(1), grid)
        with files.replacing(path.with_suffix(".npz")) as unfinished:
            np.savez(unfinished, maps=maps)
        files.write_text(path, json.dumps(dict(blocks=found.blocks.tolist(), heads=found.heads.tolist())) + "\n")
    stored = files.read_json(path, "heads", "blocks")
    return selection.Sigma(np.array(stored["heads"]), np.array(stored["blocks"]))


def _fitted(plan: Plan, config: ConfigDict, model: ModelModule, places: Places) -> ModelModule:
    """Replace attention, in the start of the plan; fits.json stores the error of each block."""
    images = _images(plan, config, config.data.split)
    start = (plan.start or "start of the form").replace("_", " ")
    command.say(f"{start.capitalize()}: {len(places)} blocks by {plan.kind}, on {images.found} training images.")
    how: dict[str, Any] = dict(kind=plan.kind, form=plan.form, start=plan.start, rngs=Keys(config.seed))
    vit, errors = fit.fit(backbone(model), places, images, **how)
    files.write_text(plan.workdir / "fits.json", json.dumps(errors))
    return with_backbone(model, vit)


def _metric(plan: Plan, config: ConfigDict, *models: ModelModule) -> tuple[str, float, float] | None:
    """The main figure of the first fitting protocol, for both models; None without one."""
    name = protocol(config, models[0])
    if name is None:
        return None
    figure = f"{name}/{runner.PROTOCOLS[name].curve}"
    if not plan.fit_only:
        key, places = f"eval/{figure}", [plan.workdir / stage / "report.json" for stage in ("stage1", "stage2")]
        return figure, *(files.read_json(place, key)[key] for place in places)
    path = plan.workdir / "evaluation.json"
    if not path.is_file():
        command.say(f"Evaluating {name}, before and after.")
        with jax.set_mesh(sharding.create_mesh(config.mesh)):
            found = [runner.evaluate(model, config, name, classes=plan.data.classes) for model in models]
        results = list(map(runner.scalars, found))
        files.write_text(path, json.dumps(dict(before=results[0], after=results[1]), indent=1) + "\n")
    found = files.read_json(path, "before", "after")
    return figure, found["before"][figure], found["after"][figure]


def _features(plan: Plan, config: ConfigDict, before: ModelModule, after: ModelModule) -> Nearness:
    """How near the features of both models are; features.json stores it."""
    path = plan.workdir / "features.json"
    if not path.is_file():
        images = _images(plan, config, config.data.eval_split)
        command.say(f"Features: before and after, on {images.found} images of {config.data.eval_split}.")
        found = nearness.measure(backbone(before), backbone(after), images)
        files.write_text(path, json.dumps({name: part.tolist() for name, part in found._asdict().items()}) + "\n")
    stored = files.read_json(path, *Nearness._fields)
    return Nearness(*(np.array(stored[name]) for name in Nearness._fields))


def _timed(
    plan: Plan, size: tuple[int, int], classes: Sequence[str], *models: ModelModule
) -> tuple[dict[str, Times], str]:
    """The times of both exported models by precision, and the conditions of the timing."""
    paths: dict[str, list[pathlib.Path]] = {}
    for precision in ("float32", "float16")[: 1 + plan.half]:
        ending = "_half.onnx" if precision == "float16" else ".onnx"
        paths[precision] = [plan.workdir / f"{name}{ending}" for name in ("before", "after")]
        for path, model in zip(paths[precision], models, strict=True):
            if not path.is_file():
                command.say(f"Exporting {path}.")
                export.write(path, model, size, classes=classes, half=precision == "float16")
    found = _profiled(plan, [path for pair in paths.values() for path in pair])
    rows = iter(found["files"])
    times = {precision: Times(*_pairs([next(rows) for _ in pair])) for precision, pair in paths.items()}
    return times, f"{found['conditions']}, {found['machine']}, {found['runtime']}"


def _pairs(rows: list[dict]) -> list[tuple]:
    return [tuple(row[key] for row in rows) for key in Times._fields]


def _profiled(plan: Plan, paths: list[pathlib.Path]) -> dict:
    """The times of files; profile.json stores them, and is written again for other files or another priority."""
    place = plan.workdir / "profile.json"
    wanted = ([path.name for path in paths], plan.realtime)
    if place.is_file():
        found = files.read_json(place, "files", "conditions", "realtime", "machine", "runtime")
        if ([pathlib.Path(row["file"]).name for row in found["files"]], found["realtime"]) == wanted:
            return found
    found = profile.profile(paths, runs=ROUNDS, realtime=plan.realtime, say=command.say)
    files.write_text(place, json.dumps(found, indent=1) + "\n")
    return found
