"""Plain ViTs in the layout of timm, in three spellings.

"timm": layer scales `ls1.gamma`, registers `reg_token`; "deit3": the official DeiT III files, `gamma_1`; "dinov2": the
official DINOv2 files, with a mask token, `register_tokens`, and `mlp.w12` and `mlp.w3` for the maps of a SwiGLU.  They
also differ in how positions are resized.
"""

from collections.abc import Mapping

import numpy as np

from equivit.layers.grid import check_grid
from equivit.models.vit_config import ViTConfig
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
    source: str = NAME,
) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is needed where the grid of positions is not square."""
    fields, flavour = inference.transformer(state, source, num_heads), _flavour(state)
    registers = REGISTERS[flavour] in state and inference.shape(state, source, REGISTERS[flavour], 3)[1]
    size, class_position = inference.positions(state, source, fields["patch_size"], image_size)
    mlp, mlp_dim = _mlp(state, flavour, source)
    config = ViTConfig(
        **fields,
        image_size=size,
        mlp=mlp,
        mlp_dim=mlp_dim,
        class_position=class_position,
        registers=int(registers),
        mask_token="mask_token" in state,
        layer_scale=1e-4 if inference.count(state, SCALES[flavour][0]) else None,
        position_antialias=flavour == "timm" or (flavour == "dinov2" and bool(registers)),
        position_offset=0.1 if flavour == "dinov2" and not registers else 0.0,
    )
    return config, flavour


def default_flavour(config: ViTConfig) -> str:
    """The flavour to write a model in."""
    return "dinov2" if config.mask_token else "timm"


def table(config: ViTConfig, flavour: str, source: str = NAME) -> Table:
    """The pairs of a file of that flavour; there are no constants."""
    inference.require(config, source, family="plain", class_token=True, pool="class")
    grid = check_grid(config.image_size, config.patch_size, "image_size")
    pairs = [mapping.same("cls_token", "class_token", ones=2), *mapping.patch_embed()]
    with_class = config.class_position
    pairs.append(_position_with_class(grid) if with_class else mapping.grid("pos_embed", "position.table", grid))
    if config.registers:
        pairs.append(mapping.same(REGISTERS[flavour], "registers", ones=1))
    if config.mask_token:
        pairs.append(mapping.same("mask_token", "mask_token", ones=1))
    for i in range(config.depth):
        pairs += mapping.dense_block(i, config, SCALES[flavour], _maps(config.mlp, flavour))
    pairs += mapping.norm("norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head", "head")
    return Table(pairs, [])


def _flavour(state):
    if inference.count(state, "gamma_1"):
        return "deit3"
    hub = "mask_token" in state or REGISTERS["dinov2"] in state or inference.count(state, "mlp.w12.weight")
    return "dinov2" if hub else "timm"


def _maps(mlp: str, flavour: str) -> tuple[str, str]:
    """Foreign names of the linear maps of an MLP."""
    return ("w12", "w3") if mlp == "swiglu" and flavour == "dinov2" else ("fc1", "fc2")


def _mlp(state, flavour, source) -> tuple[str, int]:
    """Kind and hidden width: a SwiGLU's first map gives twice what its second takes, the gates before the values."""
    kind = "swiglu" if inference.count(state, "mlp.w12.weight") else "gelu"
    first, second = (f"blocks.0.mlp.{name}.weight" for name in _maps(kind, flavour))
    given, taken = inference.shape(state, source, first, 2)[0], inference.shape(state, source, second, 2)[1]
    return "swiglu" if given == 2 * taken else kind, taken


def _position_with_class(grid) -> Pair:
    """[1, 1 + h w, D] <-> [D] and [h, w, D]."""
    return Pair(
        "pos_embed",
        ("class_position", "position.table"),
        lambda x: (x[0, 0], x[0, 1:].reshape(*grid, -1)),
        lambda token, patches: np.concatenate([token[None], patches.reshape(-1, len(token))])[None],
    )
