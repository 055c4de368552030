"""The stages of an acceleration; a stage whose result exists is skipped."""

import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit import command, export, files, profile, train
from equivit.acceleration.plan import Plan, protocol
from equivit.depthwise import fit, selection
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.depthwise.training_images import TrainingImages
from equivit.evaluation import runner
from equivit.layers.grid import check_grid
from equivit.models import saved
from equivit.models.model import ModelModule
from equivit.training import checkpoints, sharding

BATCH = 16  # images whose attention is in memory at once
ROUNDS = 50  # timing rounds


class Result(NamedTuple):
    """The result of an acceleration."""

    # The name of the metric, and its values before and after; None without a head.
    metric: tuple[str, float, float] | None
    milliseconds: tuple[float, float]  # time per image of the exported models, before and after
    bytes: tuple[int, int]  # their sizes
    blocks: tuple[int, ...]  # the replaced blocks
    sigma: list[float]  # Sigma of all blocks
    errors: dict[int, float]  # the errors of the fits, by block
    conditions: str  # of the timing


def run(plan: Plan) -> Result:
    """Run all stages in order."""
    place, config = plan.workdir, plan.config("stage1")
    before = _saved(place / "start", lambda: plan.model)
    if not plan.fit_only:
        before = _trained(config, place / "stage1", place / "start")
    scores = _sigma(plan, config, before)
    blocks = selection.select(scores, plan.blocks)
    command.say(f"Replacing blocks {', '.join(map(str, blocks))}.")
    fits = place / "fits.json"
    fitted = _saved(place / "fitted", lambda: _fitted(plan, config, before, blocks), beside=fits)
    errors = {int(block): error for block, error in files.read_json(fits).items()}
    after = fitted
    if not plan.fit_only:
        after = _trained(plan.config("stage2", blocks), place / "stage2", place / "fitted")
    metric = _metric(plan, config, before, after)
    milliseconds, sizes, conditions = _timed(plan, config.data.image_size, before, after)
    return Result(metric, milliseconds, sizes, blocks, [float(score) for score in scores], errors, conditions)


def _saved(place: pathlib.Path, make: Callable[[], ModelModule], *, beside: pathlib.Path | None = None) -> ModelModule:
    """Load the saved model at a place; compute it if it, or the file `beside` it, is missing."""
    if not (place / "model.json").is_file() or (beside is not None and not beside.is_file()):
        saved.save(place, make())
    try:
        return saved.load(place)
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(error).rstrip('.')}; remove {place} to create it again.") from error


def _trained(config: ConfigDict, place: pathlib.Path, init: pathlib.Path) -> ModelModule:
    """Train a model that starts from a saved one; a finished run is not trained again."""
    if not (place / "report.json").is_file():
        config = config.copy_and_resolve_references().unlock()
        config.init = str(init)
        command.say(f"{place.name}: {place}")
        train.train(config.lock(), place)
    return checkpoints.load_run(place).model


def _images(plan: Plan, config: ConfigDict) -> TrainingImages:
    options = dict(batch_size=BATCH, seed=config.seed, workers=config.data.workers)
    return TrainingImages(config.data, plan.images, **options)


def _sigma(plan: Plan, config: ConfigDict, model: ModelModule) -> np.ndarray:
    """Compute Sigma of the blocks; sigma.json stores it with Sigma of the heads, sigma.npz its maps."""
    path = plan.workdir / "sigma.json"
    if not (path.is_file() and path.with_suffix(".npz").is_file()):
        vit = backbone(model)
        images = _images(plan, config)
        command.say(f"Sigma: of {vit.config.depth} blocks, on {images.found} training images.")
        moments = selection.moments(vit, images)
        found = selection.Sigma.from_moments(moments)
        grid = check_grid(config.data.image_size, vit.config.patch_size, "image_size")
        maps = selection.aligned(jax.vmap(selection.Moments.deviation)(moments).mean(1), grid)
        with files.replacing(path.with_suffix(".npz")) as unfinished:
            np.savez(unfinished, maps=maps)
        files.write_text(path, json.dumps(dict(blocks=found.blocks.tolist(), heads=found.heads.tolist())) + "\n")
    return np.array(files.read_json(path, "blocks")["blocks"])


def _fitted(plan: Plan, config: ConfigDict, model: ModelModule, blocks: tuple[int, ...]) -> ModelModule:
    """Replace blocks and fit their taps; fits.json stores the errors of the fits."""
    images = _images(plan, config)
    command.say(f"Least squares: the taps of {len(blocks)} blocks, on {images.found} training images.")
    vit, errors = fit.fit(backbone(model), dict.fromkeys(blocks), images)
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
            results = [runner.scalars(runner.evaluate(model, config, name)) for model in models]
        files.write_text(path, json.dumps(dict(before=results[0], after=results[1]), indent=1) + "\n")
    found = files.read_json(path, "before", "after")
    return figure, found["before"][figure], found["after"][figure]


def _timed(plan: Plan, size: tuple[int, int], *models: ModelModule):
    """Milliseconds and bytes of both exported models, and the conditions of the timing."""
    paths = [plan.workdir / f"{name}.onnx" for name in ("before", "after")]
    for path, model in zip(paths, models, strict=True):
        if not path.is_file():
            command.say(f"Exporting {path}.")
            export.write(path, model, size)
    place = plan.workdir / "profile.json"
    if not place.is_file():
        files.write_text(place, json.dumps(profile.profile(paths, runs=ROUNDS, say=command.say), indent=1) + "\n")
    found = files.read_json(place, "files", "conditions", "machine", "runtime")
    times, sizes = ([row[key] for row in found["files"]] for key in ("milliseconds", "bytes"))
    return tuple(times), tuple(sizes), f"{found['conditions']}, {found['machine']}, {found['runtime']}"
