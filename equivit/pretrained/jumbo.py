"""The official Jumbo ViTs, in three flavours that names tell apart.

"release": the checkpoints of 2026, with one Jumbo MLP and a class token that their code never uses; "legacy": those of
2025, with an MLP per block, layer scales, and the Jumbo token under the name of the class token; "plain": the baseline
of the same code, spelt as in timm.  All of them resize positions with antialiasing and have norms of epsilon 1e-5.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from equivit.layers.grid import check_grid
from equivit.models.jumbo_vit import PRESETS, JumboViTConfig
from equivit.models.vit_config import ViTConfig
from equivit.pretrained import inference, mapping, timm
from equivit.pretrained.mapping import Constant, Pair, Table

NAME = "jumbo"
EPS = 1e-5
# What the code of a flavour fixes, and its name of the Jumbo token.
VERSIONS = {
    "release": dict(PRESETS["release"], jumbo_mlp="shared"),
    "legacy": PRESETS["legacy"],
}
TOKENS = {"release": "jumbo_token", "legacy": "cls_token"}
FLAVOURS = (*VERSIONS, "plain")
SCALES = ("ls1.gamma", "ls2.gamma", "ls3.gamma")


def infer(
    state: Mapping[str, np.ndarray],
    *,
    num_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    family: str | None = None,
) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is needed where the grid of positions is not square."""
    flavour = _flavour(state)
    if flavour == "plain":
        config, _ = timm.infer(state, num_heads=num_heads, image_size=image_size, source=NAME)
        return dataclasses.replace(config, norm_eps=EPS), flavour
    fields, jumbo = inference.transformer(state, NAME, num_heads), inference.shape(state, NAME, TOKENS[flavour], 3)[1]
    mlp = "jumbo_mlp" if flavour == "release" else "blocks.0.jumbo_mlp"
    config = JumboViTConfig(
        **fields,
        **VERSIONS[flavour],
        image_size=inference.positions(state, NAME, fields["patch_size"], image_size)[0],
        mlp_dim=inference.shape(state, NAME, "blocks.0.mlp.fc1.weight", 2)[0],
        jumbo=jumbo,
        jumbo_multiplier=inference.shape(state, NAME, f"{mlp}.fc1.weight", 2)[0] / (jumbo * fields["width"]),
        norm_eps=EPS,
    )
    return config, flavour


def default_flavour(config: ViTConfig) -> str:
    """The flavour to write a model in."""
    if not isinstance(config, JumboViTConfig):
        return "plain"
    return "legacy" if config.jumbo_mlp == "per_layer" else "release"


def table(config: ViTConfig, flavour: str) -> Table:
    """Pairs and constants of a file of that flavour."""
    if flavour == "plain":
        inference.require(config, NAME, class_token=True, norm_eps=EPS, registers=0, class_position=False)
        return timm.table(config, "timm", NAME)
    _require(config, flavour)
    grid = check_grid(config.image_size, config.patch_size, "image_size")
    pairs = [mapping.same(TOKENS[flavour], "jumbo_token", ones=1), *mapping.patch_embed()]
    pairs.append(mapping.grid("pos_embed", "position.table", grid))
    for i in range(config.depth):
        pairs += _block(f"blocks.{i}", i, config)
    pairs += mapping.norm("norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head", "head")
    if flavour == "legacy":
        return Table(pairs, [])
    unused = Constant("cls_token", np.zeros((1, 1, config.width), np.float32), "unused", fixed=False)
    return Table(pairs + mapping.mlp("jumbo_mlp", "jumbo_mlp"), [unused])


def _flavour(state):
    if "jumbo_token" in state:
        return "release"
    return "legacy" if inference.count(state, "norm3.weight") else "plain"


def _require(config, flavour):
    """Refuse a model that the code of the flavour does not have."""
    version = {"class_token": False, **VERSIONS[flavour]}  # first what sets a Jumbo ViT apart
    if version["layer_scale"] is not None and config.layer_scale is not None:
        del version["layer_scale"]  # where it starts does not matter
    fixed = dict(normed_residual=False, family="plain", position="learned", mlp="gelu", norm_eps=EPS)
    inference.require(config, NAME, **version, **fixed)


def _block(at, index, config) -> list[Pair]:
    pairs = mapping.dense_block(index, config, SCALES) + mapping.norm(f"{at}.norm3", f"{at}.norm3")
    own = config.jumbo_mlp == "per_layer"
    return pairs + mapping.mlp(f"{at}.jumbo_mlp", f"{at}.jumbo_mlp") if own else pairs
