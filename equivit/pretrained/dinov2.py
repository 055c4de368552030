"""DINOv2's backbones, in three flavours, with linear heads, and the heads of its self-supervised training.

"hub": the official files, with or without registers; "transformers": Hugging Face's names, with separate queries, keys
and values; "timm": timm's names, without a mask token; with registers, the class token includes its position.  Training
checkpoints (`{"teacher": ...}`, also DinoBloom's) are read as "hub", without the training heads.  For all flavours,
positions are resized as in the official code: by a factor with an offset of 0.1, without antialiasing; with registers
to the exact size, with antialiasing.

A linear head makes the backbone a classifier.  It reads the class tokens of the last n blocks and the mean patch token
of the last block; its width determines n: 1 (`_linear_head.pth`) or 4 (`_linear4_head.pth`).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from equivit import logical
from equivit.layers.dino_head import DinoHead
from equivit.layers.rngs import Keys
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, reading
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Table
from equivit.pretrained.plain import Spelling

NAME = "dinov2"
HEAD = "linear_head"  # name in the hub's classifiers
SPELLINGS = {
    "hub": Spelling(registers="register_tokens", swiglu=("mlp.w12", "mlp.w3"), head=HEAD, class_position=True),
    "transformers": Spelling(
        patch_embed="embeddings.patch_embeddings.projection",
        class_token="embeddings.cls_token",
        registers="embeddings.register_tokens",
        mask_token="embeddings.mask_token",
        position="embeddings.position_embeddings",
        blocks="encoder.layer",
        qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        proj="attention.output.dense",
        swiglu=("mlp.weights_in", "mlp.weights_out"),
        scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        norm="layernorm",
        head="classifier",
        class_position=True,
    ),
    "timm": Spelling(mask_token=None, swiglu=Spelling().fc, head=HEAD),
}
# A head of the self-supervised training: three maps, and the directions and lengths of the prototypes.
HEAD_ROWS = {f"mlp.fc{i + 1}": f"mlp.{2 * i}" for i in range(3)} | {
    "directions": mapping.same("last_layer.weight_v"),
    "gains": mapping.reshaped("last_layer.weight_g", lambda x: x[:, None]),
}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    flavour = _flavour(state)
    spelling = SPELLINGS[flavour]
    if flavour == "timm":
        spelling = spelling._replace(class_position=spelling.registers not in state)
    fields = plain.fields(state, spelling, hints)
    return ViTConfig(**fields | resizing(fields["registers"]) | _pool(state, spelling, fields["width"])), flavour


def resizing(registers: int) -> dict[str, Any]:
    """The fields for the official code's resizing of positions."""
    return dict(position_antialias=registers > 0, position_offset=0.0 if registers else 0.1)


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    require(config, NAME, norm_eps=1e-6)
    if config.num_classes is not None:
        require(config, NAME, pool="class_and_mean", **dict(pool_blocks=1) if flavour != "hub" else {})
        config = dataclasses.replace(config, pool="class", pool_blocks=1)
    if flavour == "timm":
        require(config, NAME, class_position=not config.registers)
    return plain.table(config, SPELLINGS[flavour], NAME)


def load_head(weights: Mapping[str, np.ndarray] | str | os.PathLike, name: str = "dino_head") -> DinoHead:
    """A head of the self-supervised training, in float32.

    Args:
      weights: the tensors of the head, `mlp.0.weight` to `last_layer.weight_v`, or a checkpoint's tensors, or its file.
      name: the head of a checkpoint, "dino_head" or "ibot_head".

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no such head, or one message with every tensor that is missing, unexpected or misshapen.
    """
    state, _ = reading.state_dict(reading.content(weights))
    if "last_layer.weight_v" not in state:
        state = {key.removeprefix(f"{name}."): x for key, x in state.items() if key.startswith(f"{name}.")}
    if not state:
        raise ValueError(f"{NAME}: there are no tensors of {name}; if both losses share a head, it is dino_head.")
    what = f"{NAME}: {name}"
    state = State(state, what)
    width = state.shape("mlp.0.weight", 2)[1]
    hidden = state.out("mlp.2")
    prototypes, bottleneck = state.shape("last_layer.weight_v", 2)
    head = jax.eval_shape(lambda: DinoHead(width, prototypes, hidden=hidden, bottleneck=bottleneck, rngs=Keys(0)))
    shapes = {key: tensor.shape for key, tensor in logical.to_logical(head).items()}
    table = Table(mapping.pairs(shapes, HEAD_ROWS))
    return cast(DinoHead, logical.from_logical(head, mapping.read(table, state, shapes, what)))


def head_state(head: DinoHead) -> dict[str, np.ndarray]:
    """The tensors of a head under their official names; the inverse of `load_head`."""
    tensors = jax.device_get(logical.to_logical(head))
    return mapping.write(Table(mapping.pairs(tensors, HEAD_ROWS)), tensors, f"{NAME}: head")


def _flavour(state):
    if any(name.startswith("embeddings.") for name in state):
        return "transformers"
    return "hub" if is_hub(state) else "timm"


def is_hub(state: State) -> bool:
    """Whether a file with names of timm or the hub is from the hub."""
    gated = state.count("mlp.w12.weight") > 0
    return "mask_token" in state or "register_tokens" in state or gated


def _pool(state, spelling, width) -> dict:
    """The input of the head, inferred from the width of its weight."""
    name = f"{spelling.head}.weight"
    if name not in state:
        return {}
    features = state.shape(name, 2)[1]
    if features % width or features == width:
        raise ValueError(
            f"{NAME}: {name} reads {features} entries; the class tokens of n blocks and a mean patch token of width "
            f"{width} are (n + 1) x {width}."
        )
    return dict(pool="class_and_mean", pool_blocks=features // width - 1)


FORMAT = Format(
    NAME,
    tuple(SPELLINGS),
    ViTConfig,
    infer,
    table,
    rename=reading.unchunked,
    ignored=reading.DINOV2_HEADS,
    separate_head=HEAD,
    mark=r"(?<!embeddings\.)(mask_token|register_tokens)|encoder\.layer\.0\.layer_scale1\.lambda1",
)
