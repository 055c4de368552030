"""Start a run from the parameters of another model, `config.init`."""

import dataclasses
import itertools
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical, models
from equivit.depthwise import replacement
from equivit.layers.rngs import Keys
from equivit.models import zoo
from equivit.models.model import Config, ModelModule, abstract_model
from equivit.models.segmenter.model import Segmenter, SegmenterConfig
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.replaced import Replaced
from equivit.objectives.registry import OBJECTIVES
from equivit.objectives.segmentation import Segmentation
from equivit.training import build, loading

OF_GROUPS = ("isotypic_norm", "isotypic_eps")  # without effect in plain models
# Not determined by parameter shapes.
FUNCTION_FIELDS = ("num_heads", "mlp", "activation", "norm_eps", "normed_residual", "position", *OF_GROUPS)
HEAD = ("head.", "readout.norm.", "readout.fc_norm.")  # parameters that may be initialised randomly


def initial_parameters(config: ConfigDict, model: Any) -> dict[str, jax.Array]:
    """Load parameters and statistics of the model at `config.init` (`loading.load_model`); {} if it is None.

    Adapts them to the new model and prints each difference:

    - Positions are resized, to the exact size of a plain model unless `config.model.position_offset` is set.
    - A head for other classes is dropped, as is a norm before it that the new model lacks (`fc_norm`).
    - Of a masked autoencoder the encoder is used; of a segmenter the backbone, and the decoder if the new one is equal.
    - A model without prefix tokens drops the source's prefix tokens.
    - Blocks listed only in `config.model.replaced` are replaced.

    Args:
      config: a checked config, completed from the data.
      model: the configuration of its model.

    Raises:
      FileNotFoundError: `config.init` holds no model.
      ValueError: other parameters do not fit the model, or would compute a different function in it; the message
        names the difference.
    """
    if config.init is None:
        return {}
    of_pixels = issubclass(OBJECTIVES[config.objective.name], Segmentation)  # the model becomes a backbone
    wanted, messages = dataclasses.replace(model, num_classes=None) if of_pixels else model, []
    known = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    source = loading.load_with_hints(config.init, known)
    decoder = _decoder(config, model, source)
    source = _backbone(source, wanted, bool(decoder), messages)
    _check_kind(config, source.config, wanted)
    _check_function(config.init, source.config, wanted)
    try:
        if type(wanted) is type(source.config) is ViTConfig:
            source = _without_prefix_tokens(source, wanted, messages)
            source = _with_replaced_blocks(source, wanted, config.seed, messages)
        tensors, changes = models.fitting_tensors(source, wanted)
    except ValueError as error:
        _check_shapes(config.init, source.config, wanted)
        raise ValueError(f"config.init={config.init} and config.model: {error}") from None
    others = [name for name in (*changes.drawn, *changes.dropped) if not name.startswith(HEAD)]
    if others:
        _check_shapes(config.init, source.config, wanted)
        raise ValueError(f"config.init={config.init}: {len(others)} parameters do not match config.model: {changes}.")
    messages += [str(changes)] if any(changes) else []
    if messages and jax.process_index() == 0:
        print(f"{config.init}: {'; '.join(messages)}.", flush=True)
    return logical.stacked(abstract_model(wanted), tensors, nnx.Variable) | decoder


def _decoder(config: ConfigDict, model: Config, source: ModelModule) -> dict[str, jax.Array]:
    """The arrays of a segmenter outside its backbone, if the run trains the same decoder; else {}."""
    if not isinstance(source, Segmenter):
        return {}
    wanted = getattr(build.exported_model(build.make_objective(config), model), "config", None)
    backbone = source.config.backbone
    if not isinstance(wanted, SegmenterConfig) or dataclasses.replace(wanted, backbone=backbone) != source.config:
        return {}
    arrays = logical.take(source, nnx.Variable)
    return {leaf: array for leaf, array in arrays.items() if not leaf.startswith("backbone.")}


def _backbone(source: ModelModule, wanted: Any, keeps_decoder: bool, messages: list[str]) -> ModelModule:
    """The part of the source that corresponds to the wanted model: its backbone, its encoder, or all of it."""
    if isinstance(source, Segmenter):
        messages.append("its decoder is taken too" if keeps_decoder else "its decoder is left out")
        return source.backbone
    if hasattr(source, "encoder") and type(source.config) is not type(wanted):
        messages.append("its decoder is left out")
        return source.encoder
    return source


def _check_kind(config: ConfigDict, source: Any, wanted: Any) -> None:
    """ValueError if the weights belong to another architecture."""
    if type(source) is not type(wanted):
        raise ValueError(
            f"config.model.name={config.model.name!r} is a {_kind(wanted)}, and the model of config.init={config.init} "
            f"a {_kind(source)}; set config.model.name={errors.shown(zoo.options(source)['name'])}, or take the model "
            "from the weights with configs/finetune_folder.py."
        )


def _kind(config: Any) -> str:
    return type(config).__name__.removesuffix("Config")


def _check_shapes(place: str, source: Any, wanted: Any) -> None:
    """ValueError with each field of the wanted model that changes the parameters of the source's model."""
    lines = [
        f"config.model.{field.name}={errors.shown(getattr(wanted, field.name))} instead of "
        f"{errors.shown(getattr(source, field.name))}"
        for field in dataclasses.fields(source)
        if field.name not in ("num_classes", "replaced")
        and _changes_shapes(source, field.name, getattr(wanted, field.name))
    ]
    if lines:
        raise ValueError(f"config.init={place} holds the weights of another model: {'; '.join(lines)}.")


def _changes_shapes(config: Any, field: str, value: Any) -> bool:
    """Whether a value of one field changes the parameters, or does not fit the other fields."""
    if getattr(config, field) == value:
        return False
    try:
        return _shapes(dataclasses.replace(config, **{field: value})) != _shapes(config)
    except ValueError:
        return True


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters, by logical name."""
    tables = logical.tensors(abstract_model(config), nnx.Variable).values()
    return {tensor.name: tensor.shape for table in tables for tensor in table.flat}


def _check_function(place: str, source: Any, wanted: Any) -> None:
    """ValueError if the weights fit the wanted model but would compute a different function in it."""
    for field in _function_fields(source, wanted):
        theirs, ours = (getattr(config, field) for config in (source, wanted))
        if theirs != ours:
            raise ValueError(
                f"config.model.{field}={errors.shown(ours)}: the model of config.init={place} has "
                f"{errors.shown(theirs)}, and its weights require it; set config.model.{field}="
                f"{errors.shown(theirs)}."
            )


def _function_fields(source: Any, wanted: Any) -> list[str]:
    """The FUNCTION_FIELDS to compare; shapes show whether groups differ and whether positions are learned."""
    group, without = getattr(wanted, "group", None), set()
    if group is None or group is not source.group:
        without |= set(OF_GROUPS)
    if "learned" in (getattr(config, "position", None) for config in (source, wanted)):
        without.add("position")
    return [name for name in FUNCTION_FIELDS if hasattr(wanted, name) and name not in without]


def _without_prefix_tokens(source: ModelModule, wanted: Any, messages: list[str]) -> ModelModule:
    """The source without class, register and mask tokens, if the wanted model has none of them."""
    if wanted.prefix or wanted.mask_token or not (source.config.prefix or source.config.mask_token):
        return source
    source, changes = replacement.without_prefix(source)
    messages.append(f"for patches alone, left out: {errors.listed(changes.dropped)}")
    return source


def _with_replaced_blocks(source: ModelModule, wanted: Any, seed: int, messages: list[str]) -> ModelModule:
    """The source with the attention of the wanted blocks replaced; ValueError if it has other replaced blocks."""
    existing = set(source.config.replaced)
    if lost := sorted(existing - set(wanted.replaced)):
        raise ValueError(f"its block {lost[0].block} is replaced; keep it in replaced, as {tuple(lost[0])}.")
    new = [entry for entry in wanted.replaced if entry not in existing]
    rngs = Keys(seed)
    for how, alike in itertools.groupby(sorted(new, key=_how), _how):
        where = {entry.block: entry.heads for entry in alike}
        source = replacement.replace(source, where, **dict(how), rngs=rngs)
    if new:
        messages.append(f"attention replaced in {len(new)} blocks: {errors.listed(entry.block for entry in new)}")
    return source


def _how(entry: Replaced) -> tuple[tuple[str, Any], ...]:
    return ("kind", entry.kind), ("kernel_size", entry.kernel_size), ("form", entry.form)
