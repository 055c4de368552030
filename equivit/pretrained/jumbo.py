"""The official Jumbo ViTs, in three flavours, recognised by names.

"release": the checkpoints of 2026, with one Jumbo MLP and an unused class token; "legacy": the checkpoints of 2025,
with an MLP per block, layer scales, and the Jumbo token named as the class token; "plain": the baseline of the same
code, with timm's names.  All resize positions with antialiasing and have norms with epsilon 1e-5.
"""

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import PRESETS, JumboViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Constant, Table
from equivit.pretrained.plain import Spelling

NAME = "jumbo"
EPS = 1e-5
# Fields fixed by each flavour's code, and its name of the Jumbo token.
VERSIONS = {"release": dict(PRESETS["release"], jumbo_mlp="shared"), "legacy": PRESETS["legacy"]}
TOKENS = {"release": "jumbo_token", "legacy": "cls_token"}
BASELINE = Spelling(registers=None, mask_token=None, class_position=False)
JUMBO = BASELINE._replace(class_token=None, scales=("ls1.gamma", "ls2.gamma", "ls3.gamma"))
# The modules beyond a plain ViT's, with the same names in all flavours.
OWN = {"blocks.#.norm3": "blocks.#.norm3"}
OWN |= {f"{at}jumbo_mlp.{fc}": f"{at}jumbo_mlp.{fc}" for at in ("", "blocks.#.") for fc in ("fc1", "fc2")}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    flavour = _flavour(state)
    if flavour == "plain":
        fields = plain.fields(state, BASELINE, hints)
        return ViTConfig(**fields, norm_eps=EPS, position_antialias=True), flavour
    jumbo = state.shape(TOKENS[flavour], 3)[1]
    mlp = "jumbo_mlp" if flavour == "release" else "blocks.0.jumbo_mlp"
    fields = plain.fields(state, JUMBO, hints) | VERSIONS[flavour]
    hidden = state.out(f"{mlp}.fc1")
    return JumboViTConfig(
        **fields, jumbo=jumbo, jumbo_multiplier=hidden / (jumbo * fields["width"]), norm_eps=EPS
    ), flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    if flavour == "plain":
        require(config, NAME, class_token=True, norm_eps=EPS, class_position=False)
        return plain.table(config, BASELINE, NAME)
    _require(config, flavour)
    token = mapping.reshaped(TOKENS[flavour], lambda x: x[None])
    whole = plain.table(config, JUMBO, NAME, {"prefix.jumbo_token": token, **OWN})
    if flavour == "legacy":
        return whole
    return whole + Table([], [Constant("cls_token", np.zeros((1, 1, config.width), np.float32), "unused", fixed=False)])


def _default_flavour(config):
    if not isinstance(config, JumboViTConfig):
        return "plain"
    return "legacy" if config.jumbo_mlp == "per_layer" else "release"


def _flavour(state):
    if "jumbo_token" in state:
        return "release"
    return "legacy" if state.count("norm3.weight") else "plain"


def _require(config, flavour):
    """Reject a model that the flavour's code does not support."""
    if not isinstance(config, JumboViTConfig):
        raise ValueError(
            f"{NAME}: flavour={flavour!r} is for models with a Jumbo token; take 'plain', or source 'timm'."
        )
    version = {"class_token": False, **VERSIONS[flavour]}  # first the fields specific to a Jumbo ViT
    if version["layer_scale"] is not None and config.layer_scale is not None:
        del version["layer_scale"]  # its initial value does not matter
    require(config, NAME, **version, normed_residual=False, mlp="gelu", norm_eps=EPS)


FORMAT = Format(
    NAME,
    (*VERSIONS, "plain"),
    ViTConfig,
    infer,
    table,
    default_flavour=_default_flavour,
    mark=r"jumbo_token|blocks\.0\.norm3\.weight",
)
