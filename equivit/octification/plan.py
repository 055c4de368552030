"""The options of `equivit.octify`, checked before anything is trained."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from equivit import command, errors, staged
from equivit.data import loader
from equivit.evaluation import runner
from equivit.models import zoo
from equivit.models.model import abstract_model, check_input
from equivit.models.reconfiguration import reconfigure
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT
from equivit.training import config as configs
from equivit.training import loading

FAMILIES = ("H8", "I8", "D8")
HINTS = ("num_heads", "image_size", "mlp", "checkpoint_key")
# Arguments that decide which models the stages make, beside the source, the config and its changes.
DECISIONS = ("family", "blocks", "images", *HINTS)
# Keys of the config that the command sets.
DETERMINED = ("init", "objective.teacher", "objective.place", "objective.orientations")
FIRST = 1 / 6  # of all steps: stage 1, for which good starts leave little
LABELLED = ("knn", "linear_probe")  # protocols on the labels of both splits


@dataclasses.dataclass(frozen=True)
class Plan:
    """An octification."""

    loaded: ViT  # with its head, if it has one
    teacher: ViT  # without a head, with positions for the image size of the config
    octic: ViTConfig
    file: str  # the config, with its mode
    changes: tuple[str, ...]  # overrides of the config, such as "data.workers=2"
    workdir: pathlib.Path  # the directory of all stages
    orientations: bool  # whether the targets are averaged over the eight orientations
    images: int  # the largest number of images for fits and agreement
    suite: tuple[str, ...] | None  # protocols that measure every model
    classes: tuple[str, ...]  # names of the classes of the loaded head; () if there is none, or they are unknown

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the octic model that differ from the teacher's."""
        before = self.teacher.config
        each = {field.name: getattr(self.octic, field.name) for field in dataclasses.fields(self.octic)}
        return {name: value for name, value in each.items() if value != getattr(before, name)}

    def config(self, stage: str) -> ConfigDict:
        """The checked config of "stage1", at the transition, or "stage2", of the last features, without evaluation."""
        config = self.measured.copy_and_resolve_references().unlock()
        for key in ("epochs", "steps"):
            if (total := config[key]) is not None:
                share = FIRST if stage == "stage1" else 1 - FIRST
                config[key] = max(1, round(share * total)) if key == "steps" else share * total
        config.evaluation.suite = None
        config.objective.place = "transition" if stage == "stage1" else "last"
        config.objective.orientations = self.orientations
        configs.validate(config)
        return config.lock()

    @property
    def measured(self) -> ConfigDict:
        """The checked config that measures all models."""
        config = configs.load(self.file, (*self.changes, f"objective.teacher={self.workdir / 'teacher'}")).unlock()
        config.model, config.evaluation.suite = zoo.options(self.octic), self.suite
        configs.validate(config)
        return config.lock()


def make(options: Any, changes: Iterable[str]) -> Plan:
    """Make the plan for the arguments of the command; see `equivit.octify`.

    Raises:
      ValueError: a model that is no plain ViT, or that octic layers cannot follow; a number of blocks out of range; an
        override of what the weights determine; an image size that does not fit; a split with fewer than two images.
      FileNotFoundError: the data or the weights are missing.
    """
    changes = tuple(changes)
    for key in (change.partition("=")[0] for change in changes):
        if key in DETERMINED or key.startswith("model."):
            raise ValueError(f"--config.{key}: the weights and --family determine this; leave it out.")
    config = _loaded(options.config, changes)
    hints = {name: getattr(options, name) for name in HINTS if getattr(options, name) is not None}
    if hints and options.input is not None:
        raise ValueError(f"--{next(iter(hints))} is only for --weights; saved models already contain it.")
    place = options.weights or str(options.input)
    loaded = loading.load_model(place, **hints)
    _check_model(loaded)
    loading.check_pixels(place, loaded.config, config.data)
    size = tuple(config.data.image_size)
    teacher, _ = reconfigure(loaded, num_classes=None, projection=None, image_size=size)
    octic = _octic(teacher.config, options.family, options.blocks)
    splits = config.data.split, config.data.eval_split
    opened = [loader.evaluate(config.data, batch_size=1, split=split) for split in splits]
    for split, each in zip(splits, opened, strict=True):
        check_input(octic, "config.data.image_size", size, each.channels)
        if each.num_examples < 2:
            raise ValueError(
                f"octify: the number of images of the split {split!r}, {each.num_examples}, must be at least 2, as "
                "features are compared between images; take a larger split."
            )
    suite = _suite(config, teacher, labelled=all("label" in each.shapes() for each in opened))
    given: dict[str, Any] = dict(workdir=options.workdir, images=options.images, orientations=options.family != "H8")
    given |= dict(suite=suite, classes=staged.trained_on(place, loaded).classes)
    return Plan(loaded, teacher, octic, options.config, changes, **given)


def _suite(config: ConfigDict, teacher: ViT, *, labelled: bool) -> tuple[str, ...] | None:
    """Select the config's protocols, without LABELLED if there are no labels.  ValueError if one cannot run."""
    names = runner.check(config.evaluation.suite, config, teacher)
    suite = tuple(name for name in names if labelled or name not in LABELLED)
    if missing := [name for name in names if name not in suite]:
        command.say(f"{config.data.source}: these images have no labels; {' and '.join(missing)} are left out.")
    if suite:
        runner.prepare(teacher, config, suite)
    return suite or None


def _loaded(file: str, changes: tuple[str, ...]) -> ConfigDict:
    wrong = ValueError(f"--config={file}: its objective is not 'feature_matching'; use configs/octify.py.")
    try:
        config = configs.load(file, (*changes, "objective.teacher=teacher"))
    except ValueError as error:
        raise wrong if "objective.teacher: no key" in str(error) else error from None
    if config.objective.name != "feature_matching":
        raise wrong
    return config


def _check_model(model: Any) -> None:
    config = model.config
    if type(config) is not ViTConfig or config.family != "plain":
        kind = f"{type(config).__name__.removesuffix('Config')} of family {getattr(config, 'family', 'none')}"
        raise ValueError(f"octify makes plain ViTs octic; this model is a {kind}.")
    if config.replaced or config.adaptive:
        what = "replaced blocks" if config.replaced else "adaptive patches"
        raise ValueError(f"octify: this model has {what}; begin with the original model.")
    if config.position == "rotary":
        raise ValueError(
            "octify: this model has rotary positions, which octic blocks lack; take one without, as DINOv2."
        )


def _octic(teacher: ViTConfig, family: str, blocks: int | None) -> ViTConfig:
    """The configuration of the octic model; D8 is an I8 whose blocks are all octic, as in octic DINOv2."""
    errors.one_of("--family", family, FAMILIES)
    if family == "D8" and blocks not in (None, teacher.depth):
        raise ValueError(f"--blocks={blocks}: all {teacher.depth} blocks of D8 are octic; leave it out.")
    k = teacher.depth if family == "D8" else (teacher.depth // 2 if blocks is None else blocks)
    if not 0 < k <= teacher.depth - (family == "H8"):
        raise ValueError(f"--blocks={k} must lie between 1 and {teacher.depth - (family == 'H8')}, for {family}.")
    fields: dict[str, Any] = dict(family="H8" if family == "H8" else "I8", equivariant_blocks=k, position="learned")
    try:
        octic = dataclasses.replace(teacher, **fields, transition_map=family == "H8", position_offset=0.0)
        abstract_model(octic)
    except ValueError as error:
        raise ValueError(f"octify: octic layers cannot follow this model: {error}") from None
    return octic
