"""Plain ViTs of Google's two JAX codes, .npz files with names such as "Transformer/encoderblock_0/LayerNorm_0/scale".

"vit_jax": google-research/vision_transformer, also AugReg, whose positions have a row for the class token;
"big_vision": google-research/big_vision, with "params/" before each name and no such row; without positions, those are
the fixed sin-cos table.  A model trained under a scan has one tensor for all blocks, which is split.  SigLIP's image
encoders there pool by attention ("MAPHead_0").  Both codes compute GELU by its tanh approximation.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, reading
from equivit.pretrained.format import Format, Hints, MissingHint, State, require
from equivit.pretrained.mapping import Pair, Table, same

NAME = "vit_jax"
IMAGE = (224, 224)  # of files without positions, unless a hint has another
STACKED = re.compile(r"((?:.*/)?Transformer/encoderblock)(/.+)")
BLOCK, POOL = "Transformer.encoderblock.#", "MAPHead_0"
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
    pool: dict[str, Any] = dict(pool="attention") if f"{POOL}.probe" in state else {}
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
        **pool,
    )
    return config, flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    require(config, NAME, family="plain", registers=0, mask_token=False, norm_eps=1e-6, layer_scale=None, qkv_bias=True)
    require(config, NAME, mlp="gelu_tanh", fc_norm=False)
    if config.class_token:
        require(config, NAME, pool="class")
    require(config, NAME, class_position=flavour == "vit_jax" and config.position == "learned")
    attention, norm2, mlp, position = PARTS[flavour]
    rows: dict[str, Any] = {
        "patch_embed.kernel": "embedding.kernel",
        "prefix.class_token": mapping.reshaped("cls", lambda x: x[None, None]),
        **_norm("readout.norm", "Transformer.encoder_norm"),
        "head.weight": "head.kernel",
    }
    rows |= {f"{name}.bias": f"{theirs}.bias" for name, theirs in (("patch_embed", "embedding"), ("head", "head"))}
    rows |= _norm("blocks.#.norm1", f"{BLOCK}.LayerNorm_0") | _norm("blocks.#.norm2", f"{BLOCK}.{norm2}")
    rows |= _mlp("blocks.#.mlp", f"{BLOCK}.{mlp}") | _attention(config, "blocks.#.attention", f"{BLOCK}.{attention}")
    rows["readout.query"] = mapping.reshaped(f"{POOL}.probe", lambda x: x[None, None])
    rows |= _norm("readout.mlp_norm", f"{POOL}.LayerNorm_0") | _mlp("readout.mlp", f"{POOL}.MlpBlock_0")
    rows |= _attention(config, "readout", f"{POOL}.{ATTENTION}_0")
    if not config.class_position:
        rows["position.table"] = mapping.reshaped(position, lambda x: x.reshape(1, -1, x.shape[-1]))
        return mapping.table(config, rows)
    return Table([plain.position_with_class(config, position, (1,))]) + mapping.table(config, rows)


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{last}": f"{theirs}.{last}" for last in ("scale", "bias")}


def _mlp(ours: str, theirs: str) -> dict[str, str]:
    parts = {f"{ours}.fc{i + 1}": f"{theirs}.Dense_{i}" for i in range(2)}
    return {f"{a}.{x}": f"{b}.{y}" for a, b in parts.items() for x, y in (("weight", "kernel"), ("bias", "bias"))}


def _attention(config: ViTConfig, ours: str, theirs: str) -> dict[str, Any]:
    """Rows of an attention, whose arrays have an axis of heads: [D, heads, D / heads], last [heads, D / heads, D]."""
    heads = config.num_heads
    qkv = tuple(f"{theirs}.{name}" for name in ("query", "key", "value"))

    def split(whole: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(part.reshape(*part.shape[:-1], heads, -1) for part in np.split(whole, 3, axis=-1))

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(*part.shape[:-2], -1) for part in parts], axis=-1)

    return {
        f"{ours}.qkv.weight": Pair(tuple(f"{name}.kernel" for name in qkv), (), split, joined),
        f"{ours}.qkv.bias": Pair(tuple(f"{name}.bias" for name in qkv), (), split, joined),
        f"{ours}.proj.weight": mapping.reshaped(f"{theirs}.out.kernel", lambda x: x.reshape(heads, -1, x.shape[-1])),
        f"{ours}.proj.bias": same(f"{theirs}.out.bias"),
    }


def _image_size(state: State, position: str, patch: tuple[int, int], with_class: bool, hints: Hints) -> tuple[int, int]:
    """The image size of a table of positions."""
    patches = state.shape(position, 3)[1] - with_class
    side = math.isqrt(patches)
    if hints.image_size is None and side * side != patches:
        raise MissingHint(
            "image_size", f"{state.source}: {position} is for {patches} patches, no square; give image_size=."
        )
    return hints.image_size or (side * patch[0], side * patch[1])


def _unstacked(content: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """`encoderblock/LayerNorm_0/scale` [depth, D] -> `encoderblock_0/LayerNorm_0/scale` [D], and so on."""
    split: dict[str, np.ndarray] = {}
    for name, tensor in content.items():
        if (match := STACKED.fullmatch(str(name))) is None or not getattr(tensor, "ndim", 0):
            split[name] = tensor
            continue
        split |= {f"{match[1]}_{i}{match[2]}": block for i, block in enumerate(tensor)}
    return split


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
    unstacked=_unstacked,
    written=_written,
    mark=r"Transformer\.encoderblock\.0\.LayerNorm_0\.scale",
)
