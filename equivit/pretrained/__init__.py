"""Weights of official implementations: load them into our models, and write ours in their formats.

model = pretrained.load("deit_3_small_224_1k.pth")  # a file of any ending, or a folder; names determine the format
model = pretrained.load("octic_vits", "hybrid_deit_huge_patch14.pth")
reading.write("back.safetensors", pretrained.state_dict("octic_vits", model))
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from equivit import constraints, errors, logical
from equivit.layers.rngs import Keys
from equivit.models import saved
from equivit.models.model import ModelModule
from equivit.models.reconfiguration import reconfigure
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import described, hub, mapping, places, reading
from equivit.pretrained.format import Format, Hints, require
from equivit.pretrained.mapping import STORED
from equivit.trained_on import TrainedOn

# A new format is one file in this folder and one entry here.  The format of a file is the first whose mark it has; of
# several kinds of a source, the last is the usual one.
_FILES = ("octic_vits", "flip", "transformers", "vit_jax", "cvt", "bixt", "clip", "siglip", "jumbo", "mae", "dinov2")
_FILES += ("dinov3", "mobilenetv4", "efficientvit", "shvit", "mvit", "swin", "timm")
_MODULES = [importlib.import_module(f"{__name__}.{file}") for file in _FILES]
_ALL = [format for module in _MODULES for format in vars(module).values() if isinstance(format, Format)]
FORMATS = {format.name: format for format in _ALL}  # the usual kind of model, by source
_FURTHER = [format for format in _ALL if FORMATS[format.name] is not format]
# Fields that change a model's function and that its tensors may not determine.  CvT's activation and strides are left
# out: two codes run the same files with different ones.
_FUNCTION = ("pool", "pool_blocks", "pool_first", "fc_norm", "invariant", "padding", "mlp", "norm_eps")


def load(
    source: str | os.PathLike,
    weights: Mapping[str, np.ndarray] | str | os.PathLike | None = None,
    *,
    num_heads: int | tuple[int, ...] | None = None,
    image_size: tuple[int, int] | None = None,
    window_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    family: str | None = None,
    head: Mapping[str, np.ndarray] | str | os.PathLike | None = None,
    checkpoint_key: str | None = None,
    seed: int = 0,
    **options,
) -> ModelModule:
    """A model with foreign weights, in float32.  Names and shapes determine the model; hints determine the rest.

        load("model.safetensors"), load("folder"), load("hf:ORG/NAME"), load("timm", "model.safetensors")

    A `config.json` of transformers or timm in the folder of the weights gives hints too; arguments precede it.

    Prints the names of tensors dropped on purpose: constants and unused tensors.  Also prints the chosen entry of a
    checkpoint if others have the same tensors, such as averages of weights.

    Args:
      source: a key of `FORMATS`: "octic_vits", "flip", "timm" (also Swin, MViTv2, MobileNetV4, EfficientViT and SHViT),
        "transformers" (ViT, DeiT, ViTMAE's encoder, Swin), "vit_jax" (also big_vision), "dinov2", "dinov3", "clip",
        "siglip", "cvt", "bixt", "jumbo", "mae" (the encoder) or "mae_autoencoder".  Or the place of the weights, whose
        names then determine the source; a plain ViT of "jumbo" or "mae" is read as timm's.
      weights: a state dict, or a place: a file of safetensors, NumPy or torch with any ending, an index of shards, a
        folder with one of these, or a repository "hf:ORG/NAME" (`hub.py`).  Containers, wrappers and prefixes are
        removed.  A folder may also be a saved model, which takes only `num_classes` and `seed`.
      num_heads: heads per block; for a model with stages, one number per stage.  None: from the file, or from the
        published model of that width.
      image_size: (height, width) for the table of positions or the windows; required if it is not square, or if the
        table may or may not have a row for the class token; for Swin if the last map is not one window, and for MViTv2
        if the patch does not divide it.
      window_size: (height, width) of a window in tokens, or the side of a square; for SwinV2, whose files do not
        determine it, 8 if None.
      num_classes: if it differs from the file's number, the model gets a new head, drawn with `seed`.
      family: "H2" or "I2" for "flip"; otherwise a check.
      head: a linear head of "dinov2" from a separate file, given like `weights`; makes the model a classifier.
      checkpoint_key: the entry of a checkpoint that holds the weights, such as "state_dict_ema"; None: the first of
        `reading.CONTAINERS`, such as "model".
      options: other fields of the model's configuration, such as drop_path=0.1; norm_eps=1e-5 for a plain ViT from a
        code that uses it, which no file determines; mlp="gelu" or "quick_gelu", required for a CLIP file that is not
        OpenAI's; activation= and strides= for a CvT that differs from its flavour.

    Raises:
      OSError: there is no such file, or a repository is neither in the cache nor reachable.
      ValueError: a wrong hint, or one message with every tensor that is missing, unexpected or misshapen.
    """
    kinds, weights = (_ALL, _place(source)) if weights is None else (_kinds(str(source)), _place(weights))
    windows = (window_size, window_size) if isinstance(window_size, int) else window_size
    hints: dict[str, Any] = dict(num_heads=num_heads, image_size=image_size, family=family, window_size=windows)
    if isinstance(weights, pathlib.Path) and saved.is_saved(weights):
        given = {**hints, "head": head, "checkpoint_key": checkpoint_key, **options}
        return _saved(weights, [name for name, value in given.items() if value is not None], num_classes, seed)
    with _naming(weights):
        content, choice = reading.unpacked(reading.content(weights), checkpoint_key)
        format, state, left_out = _opened(kinds, content)
        if choice:
            print(f"{format.name}: several sets of weights; using {choice} (choose with checkpoint_key=).")
        if head is not None:
            state |= _separate_head(format, head)
        facts = described.facts(places.config(weights)) if isinstance(weights, pathlib.Path) else {}
        model, table = _model(format, state, hints, facts, options)
        left_out += [constant.name for constant in table.constants]
        if num_classes not in (None, model.config.num_classes):
            model, drawn = _with_head(format.name, model, num_classes, seed)
            left_out += [name for pair in table.pairs if pair.ours[0] in drawn for name in pair.theirs]
        if left_out:
            print(f"{format.name}: dropped on purpose: {reading.brief(left_out)}.")
    return model


def trained_on(place: str | os.PathLike) -> TrainedOn:
    """The training data of a model at a place of `load`: of a saved model, or as files beside the weights say."""
    path = _place(place)
    return saved.trained_on(path) if saved.is_saved(path) else described.trained_on(path)


def state_dict(source: str, model: ModelModule, *, flavour: str | None = None) -> dict[str, np.ndarray]:
    """The model's weights under the names of a foreign format, with constants; the inverse of `load`.

    Under the names of transformers, prints the entries that the `config.json` beside the file must have.

    Args:
      flavour: one of the format's `flavours`; None: determined by the model's configuration.

    Raises:
      ValueError: no such flavour, or the format has no such model, or its code computes another function.
    """
    kinds, config = _kinds(source), model.config
    if replaced := getattr(config, "replaced", ()):
        raise ValueError(
            f"{source}: has no names for the taps of {len(replaced)} replaced blocks; keep it as a saved model, or "
            "convert the model before the replacement."
        )
    format = next((format for format in kinds if isinstance(config, format.kind)), None)
    if format is None:
        known = " or a ".join(format.kind.__name__ for format in reversed(kinds))
        raise ValueError(f"{source}: cannot hold a {type(model).__name__}; its models have a {known}.")
    if _has_own_positions(config):
        raise ValueError(
            f"{source}: has no names for the positions around the torus of an adaptive {type(model).__name__}; keep it "
            "as a saved model, or convert the model before models.adapt."
        )
    if getattr(config, "parts", ()):
        raise ValueError(
            f"{source}: cannot hold a model with adaptive={config.adaptive!r}; its code has False: keep it as a saved "
            "model, or convert the model before models.adapt."
        )
    if flavour is None:
        flavour = format.default_flavour(config) if format.default_flavour else format.flavours[0]
    errors.one_of(f"{source}: flavour", flavour, format.flavours)
    tensors = jax.device_get(logical.to_logical(model, STORED))
    state = mapping.write(format.table(config, flavour), tensors, _what(source, flavour, config))
    _check_restored(format, flavour, config, state)
    if format.written is None:
        return state
    return {format.written(name, config, flavour): tensor for name, tensor in state.items()}


def _check_restored(format: Format, flavour: str, config: Any, state: Mapping[str, np.ndarray]) -> None:
    """ValueError if the file's readers would compute another function, unless a `config.json` has the difference."""
    fields = {field.name for field in dataclasses.fields(config)}
    if format.require is not None:  # whose readers must be given the activation
        fields.discard("mlp")
    if isinstance(config, ViTConfig) and (config.group is None or config.leaves == "dropped"):  # without invariants
        fields.discard("invariant")
    valid = [name for name in _FUNCTION if name in fields]
    if not valid:
        return
    found, _ = format.infer(state, **{hint: getattr(config, hint, None) for hint in Hints._fields})
    restored = {name: getattr(found, name) for name in valid}
    beside: dict[str, Any] = {}
    if isinstance(config, ViTConfig) and "transformers" in (format.name, flavour):
        beside = {name: restored.pop(name) for name in ("mlp", "norm_eps") if name in restored}
    require(config, format.name, **restored)
    lost = {name: getattr(config, name) for name, value in beside.items() if getattr(config, name) != value}
    if lost:
        print(f"{format.name}: the config.json beside the file must have {described.entries(lost)}.")


def describe(config: Any) -> str:
    """A configuration in one line, by its usual fields: "ViT, family H8, width 1280, ..."."""
    parts = [type(config).__name__.removesuffix("Config")]
    own = {field.name for field in dataclasses.fields(config)} | {"k"}  # fields of parts are described with the part
    for field, words in _DESCRIBED.items():
        if field in own and (value := getattr(config, field, None)):
            comma = "x" if field.endswith("_size") else "-"
            parts.append(words.format(comma.join(map(str, value)) if isinstance(value, tuple) else value))
    if replaced := getattr(config, "replaced", ()):
        parts.append("replaced blocks " + ", ".join(f"{one.block} ({one.kind})" for one in replaced))
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(part := getattr(config, field.name)):
            parts.append(f"{field.name} ({describe(part)})")
    return ", ".join(parts)


# The words of a field, by its name.
_DESCRIBED = {name: f"{name} {{}}" for name in ("family", "width", "widths", "depth", "version", "depths")}
_DESCRIBED |= {"window_size": "windows {}", "num_heads": "{} heads", "patch_size": "patch {}"}
_DESCRIBED |= {"k": "equivariant blocks {}", "decoder_width": "decoder width {}", "decoder_depth": "decoder depth {}"}
_DESCRIBED |= {"decoder_heads": "{} decoder heads"}


def _place(weights: Any) -> Any:
    """The local path of a place, downloaded if it is on the Hub; tensors are returned as they are."""
    if hub.is_place(weights):
        return hub.fetch(weights)
    if not isinstance(weights, str | os.PathLike):
        return weights
    if str(weights) in FORMATS and not os.path.exists(weights):
        raise ValueError(f"pretrained: {str(weights)!r} is a source; give its weights too: {str(weights)!r}, FILE.")
    return pathlib.Path(weights)


def _saved(path: pathlib.Path, hints: list[str], num_classes: int | None, seed: int) -> ModelModule:
    """A saved model, perhaps with a new head; ValueError for a hint."""
    if hints:
        raise ValueError(f"{path}: is a saved model, which determines all by itself; leave out {', '.join(hints)}.")
    model: Any = saved.load(path)
    if num_classes in (None, getattr(model.config, "num_classes", None)):
        return model
    return _with_head(str(path), model, num_classes, seed)[0]


def _kinds(source: str) -> list[Format]:
    """The formats of a source, one per kind of model, the usual one last."""
    errors.one_of("pretrained: source", source, FORMATS)
    return [*(format for format in _FURTHER if format.name == source), FORMATS[source]]


def _opened(kinds: list[Format], content: Any) -> tuple[Format, dict[str, np.ndarray], list[str]]:
    """The format of a file, its state dict, and the names of dropped tensors."""
    for format in kinds:
        unstacked = content if format.unstacked is None else format.unstacked(content)
        # A format's renaming may merge names of another format's file, so only marked files are read with it.
        if reading.is_marked(unstacked, format.rename, format.mark) or (format is kinds[-1] and kinds is not _ALL):
            return format, *reading.state_dict(unstacked, format.rename, format.ignored, format.mark)
    first = errors.listed(list(reading.state_dict(content)[0])[:3])
    raise ValueError(
        f"weights: names such as {first} match none of the sources {', '.join(FORMATS)}; if they are spelled "
        "differently, rename them and give the source."
    )


@contextlib.contextmanager
def _naming(weights: Any) -> Iterator[None]:
    """Prefix errors about a file's content with its path."""
    try:
        yield
    except ValueError as error:
        if isinstance(weights, str | os.PathLike) and os.fspath(weights) not in str(error):
            error.args = (f"{os.fspath(weights)}: {error}",)
        raise


def _model(
    format: Format,
    state: Mapping[str, np.ndarray],
    hints: Mapping[str, Any],
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[Any, mapping.Table]:
    """The model of a state dict and the format's table; hints precede facts, and options the fields of both."""
    if format.require is not None:
        format.require(state, {**facts, **options})
    hints = {name: facts.get(name) if hint is None else hint for name, hint in hints.items()}
    hints = {name: tuple(hint) if isinstance(hint, list) else hint for name, hint in hints.items()}
    config, flavour = format.infer(state, **hints)
    config = _with_options(format.name, config, {k: v for k, v in facts.items() if k not in hints}, options)
    if _has_own_positions(config):
        raise ValueError(
            f"{format.name}: adaptive={config.adaptive} has positions around the torus, which no file holds; load the "
            f"model without it, then call models.adapt(model, adaptive={config.adaptive})."
        )
    table, what = format.table(config, flavour), _what(format.name, flavour, config)
    shapes = mapping.shapes(config)
    mapping.check(table, shapes, what)
    tensors = mapping.read(table, state, shapes, what)
    return logical.from_logical(mapping.abstract(config), tensors, STORED), table


def _separate_head(format: Format, weights: Any) -> dict[str, np.ndarray]:
    """The tensors of a head in a separate file, with the names of a classifier's head."""
    if format.separate_head is None:
        having = ", ".join(name for name, known in FORMATS.items() if known.separate_head is not None)
        raise ValueError(f"{format.name}: head= is only for {having}; other classifiers include their head.")
    state, _ = reading.state_dict(reading.content(weights))
    return {f"{format.separate_head}.{name}": tensor for name, tensor in state.items()}


def _what(source: str, flavour: str, config: Any) -> str:
    return f"{source} ({flavour}; {describe(config)})"


def _with_options(source: str, config: Any, facts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The configuration with options in place of its fields, and before them the facts that are fields."""
    valid = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in valid:
            raise ValueError(f"{source}: {name!r} is not an option{errors.nearest(name, valid)}.")
    known = {name: fact for name, fact in facts.items() if name in valid}
    return dataclasses.replace(config, **{**known, **options})


def _with_head(source: str, model: ModelModule, num_classes: int, seed: int) -> tuple[ModelModule, Collection[str]]:
    """The model with a new head, and the names of its drawn tensors."""
    constraints.check(f"{source}: num_classes", num_classes, constraints.PositiveInt)
    if "num_classes" not in (field.name for field in dataclasses.fields(model.config)):
        raise ValueError(f"{source}: {num_classes=}, but its models have no head.")
    other = {"projection": None} if getattr(model.config, "projection", None) is not None else {}  # one head only
    model, changes = reconfigure(model, rngs=Keys(seed), num_classes=num_classes, **other)
    return model, changes.drawn


def _has_own_positions(config: Any) -> bool:
    """Whether an adaptive model's tensors differ from the ordinary model's, which the format describes."""
    if not getattr(config, "parts", ()):
        return False
    return mapping.shapes(config) != mapping.shapes(dataclasses.replace(config, adaptive=False))
