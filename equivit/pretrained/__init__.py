"""Weights of the official implementations: loaded into our models, and written from them.

model = pretrained.load("octic_vits", "hybrid_deit_huge_patch14.pth")
reading.write("back.safetensors", pretrained.state_dict("octic_vits", model))
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from equivit import logical
from equivit.models import zoo
from equivit.models.vit import ViT
from equivit.models.vit_config import ViTConfig
from equivit.pretrained import flip, jumbo, mae, mapping, octic_vits, reading, timm

FORMATS = {format.NAME: format for format in (octic_vits, flip, timm, jumbo, mae)}


def load(
    source: str,
    weights: Mapping[str, np.ndarray] | str | os.PathLike,
    *,
    num_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    family: str | None = None,
    seed: int = 0,
    **options,
) -> ViT:
    """A model with foreign weights, in float32.  Names and shapes tell which; hints tell the rest.

    Prints the names of tensors that are left out on purpose: constants, and what the model does not use.

    Args:
      source: "octic_vits", "flip", "timm", "jumbo" or "mae" (the encoder; `mae.load_autoencoder` has the decoder too).
      weights: a state dict, or the path of a .safetensors, .npz or .pth file; containers and wrappers are taken off.
      num_heads: heads per block; None: those of the published model of that width.
      image_size: (height, width) that the table of positions belongs to; needed where it is not a square.
      num_classes: if not the file's number, the model gets a new head, drawn with `seed`.
      family: "H2" or "I2" for "flip"; else a check.
      options: other fields of the model's configuration, such as drop_path=0.1; norm_eps=1e-5 for a plain ViT of a
        code that has it, which no file tells.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a wrong hint, or one message with every tensor that is missing, unexpected or misshapen.
    """
    format = _format(source)
    content = reading.read(weights) if isinstance(weights, str | os.PathLike) else weights
    state, left_out = reading.state_dict(content, reading.OTHER_HEADS + getattr(format, "OTHERS", ()))
    config, flavour = format.infer(state, num_heads=num_heads, image_size=image_size, family=family)
    if family not in (None, config.family):
        raise ValueError(f"{source}: family={family!r}, but the weights are those of {config.family!r}.")
    config = _with_options(source, config, options)
    table = format.table(config, flavour)
    tensors = mapping.read(table, state, _shapes(config), _about(source, config, flavour))
    left_out += [constant.name for constant in table.constants]
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"{source}: {num_classes=} must be at least 1.")
    if num_classes not in (None, config.num_classes):
        left_out += [name for name in state if name.startswith("head.")]
        config = dataclasses.replace(config, num_classes=num_classes)
        tensors = {name: t for name, t in tensors.items() if not name.startswith("head.")} | _new_head(config, seed)
    if left_out:
        print(f"{source}: left out knowingly: {mapping.brief(left_out)}.")
    return logical.from_logical(_abstract(config), tensors)


def state_dict(source: str, model: ViT, *, flavour: str | None = None) -> dict[str, np.ndarray]:
    """The model's weights under the names of a foreign format, constants included; the inverse of `load`.

    Args:
      flavour: one of the format's `FLAVOURS`; None: the one that goes with the model's configuration.

    Raises:
      ValueError: no such flavour, or the format has no such model.
    """
    format, config = _format(source), model.config
    flavour = format.default_flavour(config) if flavour is None else flavour
    if flavour not in format.FLAVOURS:
        raise ValueError(f"{source}: {flavour=} is not one of {', '.join(format.FLAVOURS)}.")
    tensors = jax.device_get(logical.to_logical(model))
    return mapping.write(format.table(config, flavour), tensors, _about(source, config, flavour))


def _format(source: str):
    if source not in FORMATS:
        raise ValueError(f"pretrained: source {source!r} is not one of {', '.join(FORMATS)}.")
    return FORMATS[source]


def _with_options(source, config: ViTConfig, options) -> ViTConfig:
    valid = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, n=1)
            raise ValueError(f"{source}: {name!r} is not an option{f'; did you mean {near[0]!r}?' if near else '.'}")
    return dataclasses.replace(config, **options)


def _abstract(config: ViTConfig) -> ViT:
    """The model with shapes in place of arrays."""
    return jax.eval_shape(lambda: zoo.build(config, nnx.Rngs(params=0)))


def _shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each logical tensor."""
    tensors = jax.eval_shape(lambda: logical.to_logical(zoo.build(config, nnx.Rngs(params=0))))
    return {name: tensor.shape for name, tensor in tensors.items()}


def _new_head(config: ViTConfig, seed: int) -> dict[str, jax.Array]:
    """Logical tensors of a fresh head; under jit, so that the rest of the model is never drawn."""

    @jax.jit
    def draw():
        tensors = logical.to_logical(zoo.build(config, nnx.Rngs(params=seed)))
        return {name: tensor for name, tensor in tensors.items() if name.startswith("head.")}

    return draw()


def _about(source: str, config: ViTConfig, flavour: str) -> str:
    k = f", {config.k} of {config.depth} blocks equivariant" if config.group else f", {config.depth} blocks"
    return f"{source} ({flavour}, {config.family}, width {config.width}{k})"
