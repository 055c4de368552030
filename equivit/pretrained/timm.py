"""Plain ViTs in the layout of timm, in three spellings.

"timm": layer scales `ls1.gamma`, registers `reg_token`; "deit3": the official DeiT III files, `gamma_1`; "dinov2": the
official DINOv2 files, with a mask token and `register_tokens`.  They also differ in how positions are resized.
"""

import math
from collections.abc import Mapping

import numpy as np

from equivit.models.vit import ViTConfig
from equivit.pretrained import inference, mapping
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"
SCALES = {"timm": ("ls1.gamma", "ls2.gamma"), "deit3": ("gamma_1", "gamma_2"), "dinov2": ("ls1.gamma", "ls2.gamma")}
REGISTERS = {"timm": "reg_token", "deit3": "reg_token", "dinov2": "register_tokens"}
FLAVOURS = tuple(SCALES)


def infer(
    state: Mapping[str, np.ndarray],
    *,
    num_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    family: str | None = None,
) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is needed where the grid of positions is not square."""
    width, in_channels, *patch = inference.shape(state, NAME, "patch_embed.proj.weight", 4)
    flavour, mlp_dim = _flavour(state), _mlp_dim(state)
    registers = REGISTERS[flavour] in state and inference.shape(state, NAME, REGISTERS[flavour], 3)[1]
    size, class_position = _grid(state, patch, image_size)
    config = ViTConfig(
        width=width,
        depth=inference.depth(state, NAME),
        num_heads=inference.heads(width, num_heads, NAME),
        patch_size=tuple(patch),
        image_size=size,
        in_channels=in_channels,
        mlp_dim=mlp_dim,
        num_classes=inference.shape(state, NAME, "head.weight", 2)[0] if "head.weight" in state else None,
        class_position=class_position,
        registers=int(registers),
        mask_token="mask_token" in state,
        qkv_bias=inference.count(state, "attn.qkv.bias") > 0,
        layer_scale=1e-4 if inference.count(state, SCALES[flavour][0]) else None,
        position_antialias=flavour == "timm" or (flavour == "dinov2" and bool(registers)),
        position_offset=0.1 if flavour == "dinov2" and not registers else 0.0,
    )
    return config, flavour


def default_flavour(config: ViTConfig) -> str:
    """The flavour to write a model in."""
    return "dinov2" if config.mask_token else "timm"


def table(config: ViTConfig, flavour: str) -> Table:
    """The pairs of a file of that flavour; there are no constants."""
    inference.require(config, NAME, family="plain", class_token=True, pool="class")
    h, w = (size // patch for size, patch in zip(config.image_size, config.patch_size, strict=True))
    pairs = [
        mapping.same("cls_token", "class_token", ones=2),
        mapping.moved("patch_embed.proj.weight", "patch_embed.kernel", (2, 3, 1, 0)),
        mapping.same("patch_embed.proj.bias", "patch_embed.bias"),
        _position_with_class((h, w)) if config.class_position else _position((h, w)),
    ]
    if config.registers:
        pairs.append(mapping.same(REGISTERS[flavour], "registers", ones=1))
    if config.mask_token:
        pairs.append(mapping.same("mask_token", "mask_token", ones=1))
    for i in range(config.depth):
        pairs += mapping.dense_block(i, config, SCALES[flavour])
    pairs += mapping.norm("norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head", "head")
    return Table(pairs, [])


def _flavour(state):
    if inference.count(state, "gamma_1"):
        return "deit3"
    return "dinov2" if "mask_token" in state or REGISTERS["dinov2"] in state else "timm"


def _mlp_dim(state):
    if inference.count(state, "mlp.w12.weight"):
        raise ValueError(f"{NAME}: the MLPs are SwiGLU (mlp.w12, mlp.w3), which is not supported yet.")
    hidden = inference.shape(state, NAME, "blocks.0.mlp.fc1.weight", 2)[0]
    inner = inference.shape(state, NAME, "blocks.0.mlp.fc2.weight", 2)[1]
    if hidden == 2 * inner:
        raise ValueError(
            f"{NAME}: the MLPs are SwiGLU (fc1 gives {hidden}, fc2 takes {inner}), which is not supported yet."
        )
    return hidden


def _grid(state, patch, image_size) -> tuple[tuple[int, int], bool]:
    """The image size of the table of positions, and whether its first row is the class token's."""
    rows = inference.shape(state, NAME, "pos_embed", 3)[1]
    for with_class in (False, True):
        patches = rows - with_class
        h, w = (image_size[i] // patch[i] for i in (0, 1)) if image_size else (math.isqrt(patches),) * 2
        if patches and h * w == patches:
            return image_size or (h * patch[0], w * patch[1]), with_class
    raise ValueError(
        f"{NAME}: pos_embed has {rows} rows, which is no square grid of patches, with or without a class token; give "
        f"image_size=(height, width) with height/{patch[0]} times width/{patch[1]} patches."
        if image_size is None
        else f"{NAME}: pos_embed has {rows} rows, not those of an image of {image_size[0]}x{image_size[1]} in patches "
        f"of {patch[0]}x{patch[1]}."
    )


def _position(grid) -> Pair:
    """[1, h w, D] <-> [h, w, D]."""
    return Pair(
        "pos_embed", ("position.table",), lambda x: (x.reshape(*grid, -1),), lambda x: x.reshape(1, -1, x.shape[-1])
    )


def _position_with_class(grid) -> Pair:
    """[1, 1 + h w, D] <-> [D] and [h, w, D]."""
    return Pair(
        "pos_embed",
        ("class_position", "position.table"),
        lambda x: (x[0, 0], x[0, 1:].reshape(*grid, -1)),
        lambda token, patches: np.concatenate([token[None], patches.reshape(-1, len(token))])[None],
    )
