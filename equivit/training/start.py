"""The start of a run: its first parameters, and the models that it uses but does not train."""

import copy
import dataclasses
import pathlib
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical, models, pretrained, trained_on
from equivit.data.loader import TrainPipeline
from equivit.depthwise import replacement
from equivit.layers.rngs import Keys
from equivit.models import saved, zoo
from equivit.models.model import ModelModule
from equivit.models.segmenter.model import Segmenter, SegmenterConfig
from equivit.models.vit.config import ViTConfig
from equivit.objectives.registry import OBJECTIVES
from equivit.objectives.segmentation import Segmentation
from equivit.pretrained.inference import MissingHint
from equivit.trained_on import TrainedOn
from equivit.training import checkpoints, program, resuming

OF_THE_FUNCTION = ("num_heads", "mlp", "activation", "norm_eps")  # not determined by the shapes of parameters
OF_THE_HEAD = ("head.", "readout.norm.", "readout.fc_norm.")  # parameters that a run may draw again


def load_model(place: str, **hints: Any) -> ModelModule:
    """The model at a place that a config names; of a run, prints which step it is of.

    Args:
      place: a run directory, a saved model, or pretrained weights as "<source>:<file>" (`pretrained.load`).
      hints: for pretrained weights, where names and shapes do not tell.

    Raises:
      FileNotFoundError: there is none.
    """
    source, colon, file = place.partition(":")
    if colon and source in pretrained.FORMATS:
        return pretrained.load(source, file, **hints)
    directory = pathlib.Path(place)
    if (directory / "model.json").is_file():
        return saved.load(directory)
    if (directory / "config.json").is_file():
        loaded = checkpoints.load_run(directory)
        if jax.process_index() == 0:
            print(f"{place}: the model of step {loaded.step}.", flush=True)
        return loaded.model
    raise FileNotFoundError(
        f"'{place}' is neither a run nor a saved model, nor weights such as 'timm:model.safetensors' (the sources are "
        f"{', '.join(pretrained.FORMATS)})."
    )


def data_of(place: str) -> TrainedOn:
    """The data that the model at a place (`load_model`) was trained on; unknown for pretrained weights."""
    directory = pathlib.Path(place)
    if (directory / "model.json").is_file():
        return saved.trained_on(directory)
    return resuming.data_before(directory)


def check_teacher(config: ConfigDict, data: TrainedOn) -> None:
    """ValueError if the classes of `objective.teacher`, where there is one, have other names than those of the data."""
    if (place := config.objective.get("teacher")) is not None:
        thing, fix = f"config.data.source={errors.shown(config.data.source)}", "give a teacher of the same classes"
        trained_on.check_classes(thing, data.classes, data_of(place).classes, f"objective.teacher={place}", fix)


def given_models(config: ConfigDict) -> dict[str, nnx.Module]:
    """The models that an objective is given (`Step.given`): "teacher", where it has one.

    `objective.teacher` is a place (`load_model`), or "zoo:<name>", a model with random weights, to try a recipe out.
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


def completed(config: ConfigDict, pipeline: TrainPipeline) -> ConfigDict:
    """Write what the data determine into the `model` section, so that the run directory is complete.

    Raises ValueError where the section says otherwise; a model without a head may have `num_classes=None`.
    """
    config = copy.deepcopy(config).unlock()
    known = dict(image_size=config.data.image_size, num_classes=pipeline.num_classes, in_channels=pipeline.channels)
    config.model = {**known, **config.model}
    for key, things in (("num_classes", "classes"), ("in_channels", "channels")):
        value, right = config.model[key], known[key]
        if value != right and (key, value) != ("num_classes", None):
            raise ValueError(
                f"config.model.{key}={errors.shown(value)}: the data ({config.data.source}) have {right} {things}; set "
                f"it to {right}, or take other data."
            )
    return config.lock()


def initial_parameters(config: ConfigDict) -> dict[str, jax.Array]:
    """The parameters and statistics of the model at `config.init` (`load_model`), to begin with; empty if it is None.

    Positions are resized, those of plain models to the exact size unless `config.model.position_offset` says otherwise.
    A head for other classes is left out, so that a new one is drawn, and so is the norm before it where the model has
    another one (`fc_norm`); of a masked autoencoder the encoder is taken, and of a segmenter the backbone, with its
    decoder if the run has the same one.  For a model of patches alone the other tokens are left out, and where
    `config.model.replaced` has more blocks they are replaced.  Prints what it did.

    Raises:
      ValueError: other parameters do not fit the model of the config, or would compute something else in it; the
        message names what differs.
    """
    if config.init is None:
        return {}
    wanted, said = _wanted(config), []
    model = _loaded(config.init, wanted)
    decoder = {}
    if isinstance(model, Segmenter):
        decoder = _decoder(config, model)
        model, said = model.backbone, ["its decoder is taken too" if decoder else "its decoder is left out"]
    elif hasattr(model, "encoder") and type(model.config) is not type(wanted):
        model, said = model.encoder, ["its decoder is left out"]
    _check_function(config.init, model.config, wanted)
    try:
        if type(wanted) is type(model.config) is ViTConfig:
            model = _replaced(_alone(model, wanted, said), wanted, config.seed, said)
        tensors, changes = models.fitted(model, wanted)
    except ValueError as error:
        raise ValueError(f"config.init={config.init} and config.model: {error}") from None
    others = [name for name in (*changes.drawn, *changes.dropped) if not name.startswith(OF_THE_HEAD)]
    if others:
        raise ValueError(
            f"config.init={config.init}: {len(others)} parameters are not those of config.model: {changes}."
        )
    said += [str(changes)] if any(changes) else []
    if said and jax.process_index() == 0:
        print(f"{config.init}: {'; '.join(said)}.", flush=True)
    return logical.stacked(jax.eval_shape(lambda: wanted.build(Keys(0))), tensors, nnx.Variable) | decoder


def _wanted(config: ConfigDict) -> Any:
    """The configuration of the model that is trained; in a segmenter it has no head."""
    wanted: Any = program.model_configuration(config)
    of_pixels = issubclass(OBJECTIVES[config.objective.name], Segmentation)
    return dataclasses.replace(wanted, num_classes=None) if of_pixels else wanted


def _loaded(place: str, wanted: Any) -> ModelModule:
    """The model at a place; what a file of weights does not tell, the wanted configuration does."""
    hints: dict[str, Any] = {}
    while True:
        try:
            return load_model(place, **hints)
        except MissingHint as untold:
            if untold.hint in hints or not hasattr(wanted, untold.hint):
                raise
            hints[untold.hint] = getattr(wanted, untold.hint)


def _check_function(place: str, given: Any, wanted: Any) -> None:
    """ValueError where the weights would fit, and mean something else."""
    for field in OF_THE_FUNCTION if type(given) is type(wanted) else ():
        theirs, ours = (getattr(config, field, None) for config in (given, wanted))
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(
                f"config.model.{field}={errors.shown(ours)}: the model of config.init={place} has "
                f"{errors.shown(theirs)}, and its weights mean something else with another; set config.model.{field}="
                f"{errors.shown(theirs)}."
            )


def _decoder(config: ConfigDict, model: Segmenter) -> dict[str, jax.Array]:
    """The arrays of a segmenter beside those of its backbone, if the run trains the same decoder; else {}."""
    wanted = getattr(program.exported_model(config), "config", None)
    if not isinstance(wanted, SegmenterConfig):
        return {}
    if dataclasses.replace(wanted, backbone=model.config.backbone) != model.config:
        return {}
    arrays = logical.take(model, nnx.Variable)
    return {leaf: array for leaf, array in arrays.items() if not leaf.startswith("backbone.")}


def _alone(model: ModelModule, wanted: Any, said: list[str]) -> ModelModule:
    """The model without class, register and mask tokens, if it has some and the wanted one has none."""
    if wanted.prefix or wanted.mask_token or not (model.config.prefix or model.config.mask_token):
        return model
    model, changes = replacement.without_prefix(model)
    said.append(f"for patches alone, left out: {errors.listed(changes.dropped)}")
    return model


def _replaced(model: ModelModule, wanted: Any, seed: int, said: list[str]) -> ModelModule:
    """The model with the attention of the wanted blocks replaced; ValueError if it has other replaced ones."""
    there = set(model.config.replaced)
    if lost := sorted(there - set(wanted.replaced)):
        raise ValueError(f"its block {lost[0].block} is replaced; keep it in replaced, as {tuple(lost[0])}.")
    new = [one for one in wanted.replaced if one not in there]
    rngs = Keys(seed)
    for kind, kernel_size in sorted({(one.kind, one.kernel_size) for one in new}):
        where = {one.block: one.heads for one in new if (one.kind, one.kernel_size) == (kind, kernel_size)}
        model = replacement.replace(model, where, kind=kind, kernel_size=kernel_size, rngs=rngs)
    if new:
        said.append(f"attention replaced in {len(new)} blocks: {errors.listed(one.block for one in new)}")
    return model
