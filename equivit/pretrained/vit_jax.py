"""Plain ViTs of Google's two JAX codes, .npz files with names such as "Transformer/encoderblock_0/LayerNorm_0/scale".

"vit_jax": google-research/vision_transformer, also AugReg, whose positions have a row for the class token;
"big_vision": google-research/big_vision, with "params/" before each name and no such row; without positions, those are
the fixed sin-cos table.  Heads are in the files.  Both compute GELU by its tanh approximation.
"""

import math
import re
from typing import Any

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, reading
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Pair, Table, same

NAME = "vit_jax"
IMAGE = (224, 224)  # of files without positions, unless a hint has another
BLOCK = "Transformer.encoderblock.#"
# The names of attention, second norm and MLP in a block, and the table of positions.
ATTENTION, POSITION = "MultiHeadDotProductAttention", "pos_embedding"
PARTS = {
    "vit_jax": (f"{ATTENTION}_1", "LayerNorm_2", "MlpBlock_3", f"Transformer.posembed_input.{POSITION}"),
    "big_vision": (f"{ATTENTION}_0", "LayerNorm_1", "MlpBlock_0", POSITION),
}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    *patch, in_channels, width = state.shape("embedding.kernel", 4)
    block = "Transformer.encoderblock"
    flavour = "vit_jax" if f"{block}.0.MlpBlock_3.Dense_0.kernel" in state else "big_vision"
    attention, _, mlp, position = PARTS[flavour]
    fields: dict[str, Any] = dict(position="learned", class_position=flavour == "vit_jax")
    if position in state:
        fields["image_size"] = _image_size(state, position, (patch[0], patch[1]), flavour == "vit_jax", hints)
    else:
        fields |= dict(position="sincos_inclusive", class_position=False, image_size=hints.image_size or IMAGE)
    config = ViTConfig(
        **fields,
        width=width,
        depth=state.depth(block),
        num_heads=state.shape(f"{block}.0.{attention}.query.kernel", 3)[1],
        patch_size=(patch[0], patch[1]),
        in_channels=in_channels,
        mlp="gelu_tanh",
        mlp_dim=state.shape(f"{block}.0.{mlp}.Dense_0.kernel", 2)[1],
        class_token="cls" in state,
        num_classes=state.shape("head.kernel", 2)[1] if "head.kernel" in state else None,
        layer_scale=None,
    )
    return config, flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    require(config, NAME, family="plain", registers=0, mask_token=False, norm_eps=1e-6, layer_scale=None, qkv_bias=True)
    require(config, NAME, mlp="gelu_tanh", pool="class" if config.class_token else "mean", fc_norm=False)
    require(config, NAME, class_position=flavour == "vit_jax" and config.position == "learned")
    attention, norm2, mlp, position = PARTS[flavour]
    rows: dict[str, Any] = {
        "patch_embed.kernel": "embedding.kernel",
        "prefix.class_token": mapping.reshaped("cls", lambda x: x[None, None]),
        "readout.norm.scale": "Transformer.encoder_norm.scale",
        "readout.norm.bias": "Transformer.encoder_norm.bias",
        "head.weight": "head.kernel",
    }
    rows |= {f"{name}.bias": f"{theirs}.bias" for name, theirs in (("patch_embed", "embedding"), ("head", "head"))}
    for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", norm2)):
        rows |= {f"blocks.#.{ours}.{last}": f"{BLOCK}.{theirs}.{last}" for last in ("scale", "bias")}
    for ours, theirs in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
        rows[f"blocks.#.mlp.{ours}.weight"] = f"{BLOCK}.{mlp}.{theirs}.kernel"
        rows[f"blocks.#.mlp.{ours}.bias"] = f"{BLOCK}.{mlp}.{theirs}.bias"
    rows |= _attention(config, f"{BLOCK}.{attention}")
    if not config.class_position:
        rows["position.table"] = mapping.reshaped(position, lambda x: x.reshape(1, -1, x.shape[-1]))
        return mapping.table(config, rows)
    return Table([plain.position_with_class(config, position, (1,))]) + mapping.table(config, rows)


def _attention(config: ViTConfig, theirs: str) -> dict[str, Any]:
    """Rows of an attention, whose arrays have an axis of heads: [D, heads, D / heads], last [heads, D / heads, D]."""
    heads = config.num_heads
    qkv = tuple(f"{theirs}.{name}" for name in ("query", "key", "value"))

    def apart(whole: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(part.reshape(*part.shape[:-1], heads, -1) for part in np.split(whole, 3, axis=-1))

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(*part.shape[:-2], -1) for part in parts], axis=-1)

    return {
        "blocks.#.attention.qkv.weight": Pair(tuple(f"{name}.kernel" for name in qkv), (), apart, joined),
        "blocks.#.attention.qkv.bias": Pair(tuple(f"{name}.bias" for name in qkv), (), apart, joined),
        "blocks.#.attention.proj.weight": mapping.reshaped(
            f"{theirs}.out.kernel", lambda x: x.reshape(heads, -1, x.shape[-1])
        ),
        "blocks.#.attention.proj.bias": same(f"{theirs}.out.bias"),
    }


def _image_size(state: State, position: str, patch: tuple[int, int], with_class: bool, hints: Hints) -> tuple[int, int]:
    """The image size of a table of positions."""
    patches = state.shape(position, 3)[1] - with_class
    side = math.isqrt(patches)
    if hints.image_size is None and side * side != patches:
        raise ValueError(f"{state.source}: {position} is for {patches} patches, no square; give image_size=.")
    return hints.image_size or (side * patch[0], side * patch[1])


def _rename(name: str) -> str:
    """`params/Transformer/encoderblock_0/LayerNorm_0/scale` -> `Transformer.encoderblock.0.LayerNorm_0.scale`."""
    return re.sub(r"encoderblock_(\d+)", r"encoderblock.\1", reading.unwrapped(name.replace("/", ".")))


def _written(name: str, config: ViTConfig, flavour: str) -> str:
    """The inverse of `_rename`."""
    name = re.sub(r"encoderblock\.(\d+)", r"encoderblock_\1", name).replace(".", "/")
    return name if flavour == "vit_jax" else f"params/{name}"


FORMAT = Format(
    NAME,
    ("vit_jax", "big_vision"),
    ViTConfig,
    infer,
    table,
    default_flavour=lambda config: "vit_jax" if config.class_position else "big_vision",
    rename=_rename,
    written=_written,
    mark=r"Transformer\.encoderblock\.0\.LayerNorm_0\.scale",
)
