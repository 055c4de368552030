"""Weights of official implementations: load them into our models, and write ours in their formats.

model = pretrained.load("octic_vits", "hybrid_deit_huge_patch14.pth")
reading.write("back.safetensors", pretrained.state_dict("octic_vits", model))
"""

import contextlib
import dataclasses
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from equivit import constraints, errors, logical
from equivit.layers.rngs import Keys
from equivit.models.model import ModelModule
from equivit.models.reconfiguration import reconfigure
from equivit.pretrained import mapping, reading
from equivit.pretrained.format import Format
from equivit.pretrained.mapping import STORED

# A new format is one file in this folder and one entry here.
_FILES = ("octic_vits", "flip", "timm", "dinov2", "clip", "mobilenetv4", "efficientvit", "shvit", "mvit", "swin", "cvt")
_FILES += ("bixt", "jumbo", "mae")
_MODULES = [importlib.import_module(f"{__name__}.{file}") for file in _FILES]
_ALL = [format for module in _MODULES for format in vars(module).values() if isinstance(format, Format)]
FORMATS = {format.name: format for format in _ALL if format.mark is None}  # the usual kind of model, by source


def load(
    source: str,
    weights: Mapping[str, np.ndarray] | str | os.PathLike,
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

    Prints the names of tensors dropped on purpose: constants and unused tensors.  Also prints the chosen entry of a
    checkpoint if others have the same tensors, such as averages of weights.

    Args:
      source: a key of `FORMATS`: "octic_vits", "flip", "timm" (also Swin, MViTv2, MobileNetV4, EfficientViT and SHViT),
        "dinov2", "clip", "cvt", "bixt", "jumbo", "mae" (the encoder) or "mae_autoencoder".
      weights: a state dict, or the path of a .safetensors, .npz or .pth file; containers and wrappers are removed.
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
        "model", "teacher", "state_dict" and "model_state".
      options: other fields of the model's configuration, such as drop_path=0.1; norm_eps=1e-5 for a plain ViT from a
        code that uses it, which no file determines; mlp="gelu" or "quick_gelu", required for a CLIP file that is not
        OpenAI's; activation= and strides= for a CvT that differs from its flavour.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a wrong hint, or one message with every tensor that is missing, unexpected or misshapen.
    """
    kinds = _kinds(source)
    with _naming(weights):
        content, choice = reading.unpacked(reading.content(weights), checkpoint_key)
        if choice:
            print(f"{source}: several sets of weights; using {choice} (choose with checkpoint_key=).")
        format, state, left_out = _opened(kinds, content)
        if head is not None:
            state |= _separate_head(format, head)
        if format.require is not None:
            format.require(state, options)
        windows = (window_size, window_size) if isinstance(window_size, int) else window_size
        hints = dict(num_heads=num_heads, image_size=image_size, family=family, window_size=windows)
        hints = {name: tuple(hint) if isinstance(hint, list) else hint for name, hint in hints.items()}
        config, flavour = format.infer(state, **hints)
        config = _with_options(source, config, options)
        if _has_own_positions(config):
            raise ValueError(
                f"{source}: adaptive={config.adaptive} has positions around the torus, which no file holds; load the "
                f"model without it, then call models.adapt(model, adaptive={config.adaptive})."
            )
        table, what = format.table(config, flavour), _what(source, flavour, config)
        shapes = mapping.shapes(config)
        mapping.check(table, shapes, what)
        tensors = mapping.read(table, state, shapes, what)
        left_out += [constant.name for constant in table.constants]
        model = logical.from_logical(mapping.abstract(config), tensors, STORED)
        if num_classes not in (None, config.num_classes):
            constraints.check(f"{source}: num_classes", num_classes, constraints.PositiveInt)
            if "num_classes" not in (field.name for field in dataclasses.fields(config)):
                raise ValueError(f"{source}: {num_classes=}, but its models have no head.")
            other = {"projection": None} if getattr(config, "projection", None) is not None else {}  # one head only
            model, changes = reconfigure(model, rngs=Keys(seed), num_classes=num_classes, **other)
            left_out += [name for pair in table.pairs if pair.ours[0] in changes.drawn for name in pair.theirs]
        if left_out:
            print(f"{source}: dropped on purpose: {reading.brief(left_out)}.")
    return model


def state_dict(source: str, model: ModelModule, *, flavour: str | None = None) -> dict[str, np.ndarray]:
    """The model's weights under the names of a foreign format, with constants; the inverse of `load`.

    Args:
      flavour: one of the format's `flavours`; None: determined by the model's configuration.

    Raises:
      ValueError: no such flavour, or the format has no such model.
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
    if flavour is None:
        flavour = format.default_flavour(config) if format.default_flavour else format.flavours[0]
    errors.one_of(f"{source}: flavour", flavour, format.flavours)
    tensors = jax.device_get(logical.to_logical(model, STORED))
    return mapping.write(format.table(config, flavour), tensors, _what(source, flavour, config))


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


def _kinds(source: str) -> list[Format]:
    """The formats of a source, one per kind of model, the usual one last."""
    errors.one_of("pretrained: source", source, FORMATS)
    return [*(format for format in _ALL if format.mark is not None and format.name == source), FORMATS[source]]


def _opened(kinds: list[Format], content: Any) -> tuple[Format, dict[str, np.ndarray], list[str]]:
    """The format of a file, its state dict, and the names of dropped tensors."""
    *marked, usual = kinds
    for format in marked:
        state, left_out = reading.state_dict(content, format.rename, format.ignored)
        if any(re.search(str(format.mark), name) for name in state):
            return format, state, left_out
    return usual, *reading.state_dict(content, usual.rename, usual.ignored)


@contextlib.contextmanager
def _naming(weights: Any) -> Iterator[None]:
    """Prefix errors about a file's content with its path."""
    try:
        yield
    except ValueError as error:
        if isinstance(weights, str | os.PathLike) and os.fspath(weights) not in str(error):
            error.args = (f"{os.fspath(weights)}: {error}",)
        raise


def _separate_head(format: Format, weights: Any) -> dict[str, np.ndarray]:
    """The tensors of a head in a separate file, with the names of a classifier's head."""
    if format.separate_head is None:
        having = ", ".join(name for name, known in FORMATS.items() if known.separate_head is not None)
        raise ValueError(f"{format.name}: head= is only for {having}; other classifiers include their head.")
    state, _ = reading.state_dict(reading.content(weights))
    return {f"{format.separate_head}.{name}": tensor for name, tensor in state.items()}


def _what(source: str, flavour: str, config: Any) -> str:
    return f"{source} ({flavour}; {describe(config)})"


def _with_options(source: str, config: Any, options: Mapping[str, Any]) -> Any:
    valid = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in valid:
            raise ValueError(f"{source}: {name!r} is not an option{errors.nearest(name, valid)}.")
    return dataclasses.replace(config, **options)


def _has_own_positions(config: Any) -> bool:
    """Whether an adaptive model's tensors differ from the ordinary model's, which the format describes."""
    if not getattr(config, "parts", ()):
        return False
    return mapping.shapes(config) != mapping.shapes(dataclasses.replace(config, adaptive=False))
