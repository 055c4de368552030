"""The options of `equivit.accelerate`, checked before anything is trained."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable
from typing import Annotated, Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import constraints, errors, files, logical, onnx_files
from equivit.data import loader
from equivit.depthwise import replacement
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.evaluation import runner
from equivit.intervals import Interval
from equivit.models.model import ModelModule, check_input
from equivit.training import build, loading, loop, sharding
from equivit.training import config as configs

SEVERAL = Annotated[int, Interval(2, words="2 or more")]  # Sigma is a deviation over images
STAGES = ("stage1", "stage2", "one_stage", "frozen", "gated")
ARGUMENTS = "arguments.json"
HINTS = ("num_heads", "image_size", "mlp", "checkpoint_key")
# Fields of a model that change its training, but neither its parameters nor its function.
TRAINING_FIELDS = ("drop_path", "drop_path_groups", "drop_path_fields", "dropout", "remat", "unroll")


@dataclasses.dataclass(frozen=True)
class Plan:
    """An acceleration."""

    model: ModelModule  # a model of patch tokens alone; it keeps a head that reads their mean
    file: str  # the config's file
    mode: str  # its mode without a stage
    changes: tuple[str, ...]  # overrides for the config of stage 1, such as "data.workers=2"
    blocks: int  # the number of blocks to replace
    workdir: pathlib.Path  # the directory of all stages
    images: int = 1000  # the largest number of training images for Sigma and fits
    fit_only: bool = False  # skip all training
    weights: str = ""  # a digest of the loaded weights (`fingerprint`)

    def __post_init__(self):
        constraints.check("--images", self.images, SEVERAL)
        depth = backbone(self.model).config.depth
        if not 0 < self.blocks <= depth:
            raise ValueError(f"--blocks={self.blocks} must lie between 1 and {depth}, the blocks of this model.")
        if stage := next((word for word in self.mode.split(",") if word in STAGES), None):
            raise ValueError(
                f"--config={self.file}:{self.mode}: leave out {stage}; stage1 and stage2 are both trained."
            )

    def config(self, stage: str, replaced: Iterable[int] = ()) -> ConfigDict:
        """The checked config of a stage, for this model; stage 2 halves the epochs and the batch size of stage 1.

        Args:
          replaced: the replaced blocks of stage 2.
        """
        first = self._load("stage1")
        if stage == "stage1":
            return first
        text = repr(tuple((block,) for block in replaced))
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
      ValueError: a model that is not a ViT or has replaced blocks, a number out of range, a config without stages, a
        missing library, an image size that the patch size does not divide, or a stage that cannot be trained.
      FileNotFoundError: the data are missing.
    """
    for name in ("jax2onnx", "onnxruntime"):
        onnx_files.library(name)
    file, _, mode = options.config.partition(":")
    hints = {name: getattr(options, name) for name in HINTS if getattr(options, name) is not None}
    if hints and options.input is not None:
        raise ValueError(f"--{next(iter(hints))} is only for --weights; saved models already contain it.")
    loaded = loading.load_model(options.weights or str(options.input), **hints)
    model = patches(loaded)
    fixed: dict[str, Any] = dict(images=options.images, fit_only=options.fit_only, weights=fingerprint(loaded))
    plan = Plan(model, file, mode, tuple(changes), options.blocks, options.workdir, **fixed)
    _check_config(plan)
    if options.weights is not None:
        _check_pixels(plan, options.weights)
    _check_changes(plan, first := plan.config("stage1"))
    name = protocol(first, model)
    plan.config("stage2", range(plan.blocks))
    for split in (first.data.split, first.data.eval_split):  # fail on a wrong source before creating the directory
        opened = loader.evaluate(first.data, batch_size=1, split=split)
        check_input(backbone(model).config, "config.data.image_size", first.data.image_size, opened.channels)
    if not plan.fit_only:
        _check_training(plan)
    elif name is not None:
        runner.prepare(model, first, name)
    return plan


def _check_config(plan: Plan) -> None:
    """ValueError for a config without stages, or one that sets the replaced blocks."""
    if any(change.partition("=")[0] == "model.replaced" for change in plan.changes):
        raise ValueError("--config.model.replaced: --blocks sets their number, and Sigma selects them; leave it out.")
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
    for stage, replaced in (("stage1", ()), ("stage2", range(plan.blocks))):
        config = plan.config(stage, replaced)
        pipeline = build.make_pipeline(config)
        steps, per_epoch = loop.total_steps(config, pipeline.steps_per_epoch), pipeline.steps_per_epoch
        mesh = sharding.create_mesh(config.mesh)
        try:
            with jax.set_mesh(mesh):
                build.make_program(loader.complete(config, pipeline), mesh, total=steps, per_epoch=per_epoch)
        except ValueError as error:
            raise ValueError(f"{stage}, of {steps} steps: {error}") from None


def _check_pixels(plan: Plan, weights: str) -> None:
    """ValueError if the backbone named in the config normalises pixels differently from the weights."""
    source = weights.partition(":")[0]
    theirs = any(word.startswith("clip") for word in plan.mode.split(","))
    changed = any(change.startswith(("data.mean=", "data.std=")) for change in plan.changes)
    if (source == "clip") != theirs and not changed:
        fix = "names a CLIP backbone; leave it out" if theirs else "names no CLIP backbone; add clip_b16 to its mode"
        raise ValueError(
            f"--weights={weights}: CLIP normalises pixels differently from other models, and --config={plan.file}:"
            f"{plan.mode} {fix}, or set --config.data.mean and --config.data.std."
        )


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


def fingerprint(model: ModelModule) -> str:
    """Compute the SHA-256 digest of a model's tensors, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(logical.to_logical(model, nnx.Variable).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.asarray(tensor).tobytes())
    return digest.hexdigest()


def claim(options: Any, changes: Iterable[str], weights: str) -> None:
    """Write the arguments of the command into its directory, with the `fingerprint` of the loaded model as weights.

    Raises ValueError if the directory belongs to other arguments or other weights; the file at a path may change.
    """
    source = options.weights or str(options.input)
    wanted = dict(source=source, config=options.config, changes=list(changes))
    wanted |= dict(blocks=options.blocks, images=options.images, fit_only=options.fit_only)
    wanted = json.loads(json.dumps(wanted | {name: getattr(options, name) for name in HINTS}))
    path = options.workdir / ARGUMENTS
    if path.is_file():
        before = files.read_json(path)
        for name, value in wanted.items():
            if before.get(name) != value:
                raise ValueError(
                    f"--workdir={options.workdir} was begun with {name}={errors.shown(before.get(name))}, not "
                    f"{errors.shown(value)}; give that value, or another --workdir."
                )
        if before.get("weights", weights) != weights:  # earlier versions wrote none
            raise ValueError(
                f"--workdir={options.workdir} was begun with other weights than {source} contains now; give another "
                "--workdir."
            )
    elif (options.workdir / "config.json").is_file():
        raise ValueError(f"--workdir={options.workdir}: this is the directory of a training run; give another one.")
    else:
        files.write_text(path, json.dumps(dict(wanted, weights=weights), indent=1) + "\n")
