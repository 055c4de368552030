"""The options of `equivit.accelerate`, checked before anything is trained."""

import dataclasses
import pathlib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit import constraints, errors, onnx_files, profile, staged
from equivit.data import loader
from equivit.depthwise import fit, replacement, selection
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.evaluation import runner
from equivit.intervals import Interval
from equivit.layers.depthwise import BY_HEAD, FORMS, KINDS
from equivit.models.model import ModelModule, check_input
from equivit.models.vit.replaced import Replaced
from equivit.trained_on import UNKNOWN, TrainedOn
from equivit.training import build, loading, loop, sharding
from equivit.training import config as configs

SEVERAL = Annotated[int, Interval(2, words="2 or more")]  # Sigma is a deviation over images
STAGES = ("stage1", "stage2", "one_stage", "frozen", "gated")
Places = Mapping[int, tuple[int, ...] | None]  # heads by block, None for all
KERNEL_SIZE = 3
HINTS = ("num_heads", "image_size", "mlp", "checkpoint_key")
# Arguments that decide which models the stages make, beside the source, the config and its changes.
DECISIONS = ("blocks", "heads", "kind", "form", "order", "start", "images", "fit_only", *HINTS)
# Fields of a model that change its training, but neither its parameters nor its function.
TRAINING_FIELDS = ("drop_path", "drop_path_groups", "drop_path_fields", "dropout", "remat", "unroll")


@dataclasses.dataclass(frozen=True)
class Plan:
    """An acceleration."""

    model: ModelModule  # a model of patch tokens alone; it keeps a head that reads their mean
    file: str  # the config's file
    mode: str  # its mode without a stage
    changes: tuple[str, ...]  # overrides for the config of stage 1, such as "data.workers=2"
    blocks: int | None  # the number of blocks to replace; None: of heads
    workdir: pathlib.Path  # the directory of all stages
    heads: int | None = None  # the number of single heads to replace, in any blocks
    kind: str = "dw"  # of the replacement, and its form
    form: str = "released"
    order: str = "lowest"  # of Sigma, one of `selection.ORDERS`
    start: str | None = "least_squares"  # of the taps, as in `fit.fit`
    images: int = 1000  # the largest number of training images for Sigma and fits
    fit_only: bool = False  # skip all training
    half: bool = False  # also export and time float16 files
    realtime: bool = False  # time with real-time priority
    weights: str = ""  # a digest of the loaded weights (`staged.fingerprint`)
    data: TrainedOn = UNKNOWN  # the training data of the model

    def __post_init__(self):
        constraints.check("--images", self.images, SEVERAL)
        errors.one_of("--kind", self.kind, KINDS)
        fit.check_start("accelerate", self.start, self.kind)
        errors.one_of("--form", self.form, FORMS)
        errors.one_of("--order", self.order, selection.ORDERS)
        config = backbone(self.model).config
        for what, total in (("blocks", config.depth), ("heads", config.depth * config.num_heads)):
            if (number := getattr(self, what)) is not None and not 0 < number <= total:
                raise ValueError(f"--{what}={number} must lie between 1 and {total}, the {what} of this model.")
        if self.heads is not None and self.kind not in BY_HEAD:
            raise ValueError(
                f"--heads={self.heads}: --kind={self.kind} merges all heads of a block; take --blocks, or --kind=dw."
            )
        if stage := next((word for word in self.mode.split(",") if word in STAGES), None):
            raise ValueError(
                f"--config={self.file}:{self.mode}: leave out {stage}; stage1 and stage2 are both trained."
            )

    def chosen(self, sigma: selection.Sigma, seed: int) -> Places:
        """The places to replace, by Sigma; `seed` is of a random order."""
        scores, number = (sigma.heads, self.heads) if self.blocks is None else (sigma.blocks, self.blocks)
        return selection.by_block(selection.select(scores, number or 0, self.order, seed))

    def replaced(self, places: Places) -> tuple[Replaced, ...]:
        """The entries of a model with these places replaced."""
        return replacement.entries("accelerate", places, self.kind, KERNEL_SIZE, self.form)

    def config(self, stage: str, places: Places = types.MappingProxyType({})) -> ConfigDict:
        """The checked config of a stage, for this model; stage 2 halves the epochs and the batch size of stage 1.

        Args:
          places: the replaced heads of stage 2 by block; None for all.
        """
        first = self._load("stage1")
        if stage == "stage1":
            return first
        text = repr(tuple(map(tuple, self.replaced(places))))
        second = self._load("stage2", f"model.replaced={text}").unlock()
        for key in ("epochs", "steps", "batch_size"):
            value = first[key]
            with second.ignore_type():
                second[key] = value // 2 if isinstance(value, int) and value > 1 else value
        configs.validate(second)
        return second.lock()

    def _load(self, stage: str, *more: str) -> ConfigDict:
        mode = ",".join(word for word in (self.mode, stage) if word)
        config = configs.load(f"{self.file}:{mode}", (*self.changes, *more)).unlock()
        changed = {change.partition("=")[0] for change in (*self.changes, *more)}
        theirs = backbone(self.model).config
        fields: dict[str, Any] = {field.name: getattr(theirs, field.name) for field in dataclasses.fields(theirs)}
        fields["image_size"] = config.data.image_size
        del fields["num_classes"], fields["replaced"]  # determined by the data and by the stage
        with config.model.ignore_type():
            config.model.update({name: value for name, value in fields.items() if f"model.{name}" not in changed})
        configs.validate(config)
        return config.lock()


def make(options: Any, changes: Iterable[str]) -> Plan:
    """Make the plan for the arguments of the command; see `equivit.accelerate`.

    Raises:
      ValueError: a model that is not a ViT or has replaced blocks, a number out of range, an unknown or impossible
        replacement, a config without stages, a missing library, an image size that the patch size does not divide, a
        stage that cannot be trained; with fit_only, data whose class names differ from the model's.
      FileNotFoundError: the data are missing.
      PermissionError: the system does not allow real-time priority.
    """
    for name in ("jax2onnx", "onnxruntime"):
        onnx_files.library(name)
    file, _, mode = options.config.partition(":")
    hints = {name: getattr(options, name) for name in HINTS if getattr(options, name) is not None}
    if hints and options.input is not None:
        raise ValueError(f"--{next(iter(hints))} is only for --weights; saved models already contain it.")
    place = options.weights or str(options.input)
    loaded = loading.load_model(place, **hints)
    model = patches(loaded)
    names = ("heads", "kind", "form", "order", "images", "fit_only", "half", "realtime")
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given |= dict(start=options.start or fit.best_start(options.kind), weights=staged.fingerprint(loaded))
    given |= dict(data=staged.trained_on(place, model))
    plan = Plan(model, file, mode, tuple(changes), options.blocks, options.workdir, **given)
    with profile.alone(realtime=plan.realtime):  # fails now rather than after training
        pass
    _check_config(plan)
    _check_pixels(plan, place)
    _check_changes(plan, first := plan.config("stage1"))
    name = protocol(first, model)
    plan.config("stage2", _any_places(plan))
    for split in (first.data.split, first.data.eval_split):  # fail on a wrong source before creating the directory
        opened = loader.evaluate(first.data, batch_size=1, split=split)
        check_input(backbone(model).config, "config.data.image_size", first.data.image_size, opened.channels)
    if not plan.fit_only:
        _check_training(plan)
    elif name is not None:
        runner.prepare(model, first, name, classes=plan.data.classes)
    return plan


def _any_places(plan: Plan) -> Places:
    """As many places as will be replaced: the first ones."""
    config = backbone(plan.model).config
    scores = np.arange(config.depth * config.num_heads).reshape(config.depth, config.num_heads)
    return dataclasses.replace(plan, order="lowest").chosen(selection.Sigma(scores, scores[:, 0]), seed=0)


def _check_config(plan: Plan) -> None:
    """ValueError for a config without stages, or one that sets the replaced blocks."""
    if any(change.partition("=")[0] == "model.replaced" for change in plan.changes):
        raise ValueError(
            "--config.model.replaced: --blocks or --heads sets their number, and Sigma selects them; leave it out."
        )
    configs.load(":".join(filter(None, (plan.file, plan.mode))))  # the error names a wrong mode
    try:
        plan.config("stage1")
    except ValueError as error:
        if "config mode='stage1'" not in str(error):
            raise
        raise ValueError(f"--config={plan.file} has no stage1 and stage2; use configs/depthwise.py.") from error


def _check_changes(plan: Plan, config: ConfigDict) -> None:
    """ValueError for overriding a key that the weights determine."""
    for key in (change.partition("=")[0] for change in plan.changes):
        section, _, field = key.rpartition(".")
        if key == "init" or (section == "model" and field not in TRAINING_FIELDS):
            value = errors.shown(config.model[field] if section else config.init)
            raise ValueError(
                f"--config.{key}={value}: the weights determine this; leave it out.  Only these fields of the model "
                f"can be changed: {', '.join(TRAINING_FIELDS)}."
            )


def _check_training(plan: Plan) -> None:
    """ValueError if either stage cannot be trained; called before any training."""
    for stage, places in (("stage1", {}), ("stage2", _any_places(plan))):
        config = plan.config(stage, places)
        pipeline = build.make_pipeline(config)
        steps, per_epoch = loop.total_steps(config, pipeline.steps_per_epoch), pipeline.steps_per_epoch
        mesh = sharding.create_mesh(config.mesh)
        try:
            with jax.set_mesh(mesh):
                build.make_program(loader.complete(config, pipeline), mesh, total=steps, per_epoch=per_epoch)
        except ValueError as error:
            raise ValueError(f"{stage}, of {steps} steps: {error}") from None


def _check_pixels(plan: Plan, place: str) -> None:
    """ValueError if the config normalises pixels differently from the model at a place, unless by an override."""
    if any(change.startswith(("data.mean=", "data.std=")) for change in plan.changes):
        return
    model, names_clip = backbone(plan.model).config, any(word.startswith("clip") for word in plan.mode.split(","))
    if names_clip and not loading.normalisation(place, model):
        raise ValueError(
            f"{place}: CLIP normalises pixels differently from other models, and --config={plan.file}:{plan.mode} "
            "names a CLIP backbone; leave it out, or set --config.data.mean and --config.data.std."
        )
    loading.check_pixels(place, model, plan.config("stage1").data)


def protocol(config: ConfigDict, model: ModelModule) -> str | None:
    """The first protocol with a main figure that fits the model, from the config or the model's defaults; or None."""
    names = runner.check(config.evaluation.suite, config) or runner.check(None, config, model)
    fitting = runner.fitting(model)
    return next((name for name in names if name in fitting and runner.PROTOCOLS[name].curve), None)


def patches(model: ModelModule) -> ModelModule:
    """Remove all tokens but the patches; unchanged if the model has no others."""
    vit = backbone(model)
    if getattr(vit.config, "replaced", ()):
        raise ValueError("the model already has replaced blocks; begin with the original model.")
    if getattr(vit.config, "prefix", 1) or vit.config.mask_token:
        vit = replacement.patches_only(vit)
        return with_backbone(model, vit)
    return model
