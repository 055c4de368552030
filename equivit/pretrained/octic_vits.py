"""The official octic ViTs (octic-vits), in three flavours.

"deit": the DeiT III classifiers; "dinov2": the DINOv2 backbones; "generic": the constructor with its default blocks.
They differ in the names of layer scales and the storage of special tokens' zeros.  Fully octic models are DINOv2's D8
(every token invariantized and projected; our I8 with k = depth), and a classifier with the paper's head, our D8.
"""

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, reading
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Constant, Pair, Table
from equivit.pretrained.plain import Spelling
from equivit.symmetry.groups import OCTIC

NAME = "octic_vits"
LINES = ("A1", "A2", "B1", "B2")
IRREPS = (*LINES, "E")
KERNELS = {"A1": "A1", "A2": "A2", "B1": "B1", "B2": "B2", "E1": "E_left", "E2": "E_right"}
REFERENCES = Pair(  # of an invariantization: [n, 8 C] <-> [n, C, 8]
    ("invariantization.references",),
    (),
    lambda x: x.reshape(len(x), 8, -1).transpose(0, 2, 1),
    lambda x: x.transpose(0, 2, 1).reshape(len(x), -1),
)
# The names that all files share, outside blocks.
ROWS = {
    "patch_embed.bias": "patch_embed.lift8.conv_A1.bias",
    "prefix.class_token": mapping.reshaped("cls_token.0", lambda x: x[None, None]),
    "prefix.registers": mapping.reshaped("register_tokens.0", lambda x: x[None]),
    "mask_token": mapping.reshaped("mask_token.0", lambda x: x[None]),
    "transition.projection": "invariant_proj",
}
ROWS |= {
    f"patch_embed.{ours}": mapping.moved(f"patch_embed.lift8.conv_{theirs}.weight", (2, 3, 1, 0))
    for ours, theirs in KERNELS.items()
}
ROWS |= {f"position.{name}": f"pos_embed.{i}" for i, name in enumerate(KERNELS)}
ROWS |= {f"{at}.invariant.reference": "invariantization.reference" for at in ("transition", "readout")}
ROWS |= {f"{at}.invariant.references": REFERENCES for at in ("transition", "readout")}
# Layer scales of an octic and of a dense block.
SCALES = {"deit": (("gamma_1", "gamma_2"), ("gamma_1", "gamma_2"))}
SCALES |= dict.fromkeys(("dinov2", "generic"), (("ls1", "ls2"), ("ls1.gamma", "ls2.gamma")))
# The invariantization by its number of features, in eighths of the width.
INVARIANTS = {1: "linear", 6: "power_spectrum", 8: "canonisation"}
INVARIANTS |= {15: "triple_correlation", 16: "max_filtering", 32: "polynomial"}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour, from names and shapes."""
    if "patch_embed.proj.weight" in state:
        raise ValueError(f"{NAME}: the file is a plain ViT, one of the baselines; load it with the source 'timm'.")
    channels, in_channels, half, _ = state.shape("patch_embed.lift8.conv_A1.weight", 4)
    side = 4 * half * state.shape("pos_embed.0", 3)[0]
    width, depth = 8 * channels, state.depth()
    flavour = _flavour(state)
    octic_scale = f"{SCALES[flavour][0][0]}.alpha_A1"
    config = ViTConfig(
        width=width,
        depth=depth,
        num_heads=state.heads(width, hints.num_heads),
        patch_size=(2 * half, 2 * half),
        image_size=hints.image_size or (side, side),
        in_channels=in_channels,
        mlp_dim=8 * state.out("blocks.0.mlp.fc1.lin_A1"),
        class_token="cls_token.0" in state,
        pool="class" if "cls_token.0" in state else "mean",
        registers=state.shape("register_tokens.0", 3)[1] if "register_tokens.0" in state else 0,
        mask_token="mask_token.0" in state,
        qkv_bias=state.count("attn.qkv.lin_A1.bias") + state.count("attn.qkv.bias") > 0,
        layer_scale=1e-4 if state.count(octic_scale) else None,
        **_family(state, depth, width),
    )
    return config, flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    eps = 1e-6 if _is_dinov2_d8(config) else 1e-5
    require(config, NAME, isotypic_norm="official", class_position=False, isotypic_eps=eps, transition_map=False)
    octic_scales, dense_scales = SCALES[flavour]
    rows = plain.block(Spelling(scales=dense_scales))
    rows |= mapping.isotypic_blocks(config.k, IRREPS, "lin", octic_scales)
    if config.family == "D8":
        rows |= mapping.isotypic_norm("readout.norm", "norm", IRREPS) | {"head.fc1": "head.1", "head.fc2": "head.3"}
    else:
        rows |= {"readout.norm": "standard_norm" if _is_dinov2_d8(config) else "norm", "head": "head"}
    return mapping.table(config, ROWS | rows, [*_zeros(config, flavour), *_actions(config), *_unused(config)])


def _flavour(state):
    if not state.count("ls1.alpha_A1"):
        return "deit"
    return "dinov2" if "cls_token.7" in state or "mask_token.0" in state else "generic"


def _family(state, depth, width) -> dict:
    """The configuration fields that depend on the layers after the octic blocks."""
    k, projection = state.count("attn.qkv.lin_A1.weight"), "invariant_proj.weight"
    if k == depth and projection not in state:
        features = state.shape("head.1.weight", 2)[1]
        classes = state.out("head.3")
        return dict(family="D8", invariant=_kind(features, width), num_classes=classes)
    classes = state.classes()
    if projection not in state:
        return dict(family="H8", equivariant_blocks=k, num_classes=classes)
    kind = _kind(state.shape(projection, 2)[1], width)
    eps = 1e-6 if k == depth else 1e-5
    return dict(family="I8", equivariant_blocks=k, invariant=kind, num_classes=classes, isotypic_eps=eps)


def _kind(features, width):
    if 8 * features % width or 8 * features // width not in INVARIANTS:
        known = ", ".join(f"{n * width // 8} ({kind})" for n, kind in INVARIANTS.items())
        raise ValueError(f"{NAME}: {features} invariants of width {width} are of an unknown kind; known are {known}.")
    return INVARIANTS[8 * features // width]


def _is_dinov2_d8(config):
    return config.family == "I8" and config.k == config.depth


def _zeros(config, flavour) -> list[Constant]:
    """The components of special tokens that are stored as zeros; only A1 is learned."""
    channels, zeros = config.width // 8, {}
    if config.class_token and flavour == "dinov2":
        zeros |= {f"cls_token.{i}": (1, 1, channels) for i in range(1, 8)}
    elif config.class_token:
        zeros |= {f"cls_token.{i}": (1, 1, channels) for i in range(1, 4)}
        zeros["cls_token.4"] = (1, 1, 2, 2 * channels)
    if config.registers:
        zeros |= {f"register_tokens.{i}": (1, config.registers, channels) for i in range(1, 8)}
    if config.mask_token:
        zeros |= {f"mask_token.{i}": (1, channels) for i in range(1, 8)}
    return [Constant(name, np.zeros(shape, np.float32), "zeros") for name, shape in zeros.items()]


def _actions(config) -> list[Constant]:
    """The group's matrices, stored with the learned references of an invariantization."""
    if config.family == "H8" or config.invariant not in ("max_filtering", "canonisation"):
        return []
    return [
        Constant(f"invariantization.{name}_action", _channel_action(g), "the group's matrix")
        for name, g in (("rotation", "r"), ("reflection", "m"))
    ]


def _channel_action(element) -> np.ndarray:
    """The action on the components A1, A2, B1, B2, E11, E12, E21, E22 as an 8 x 8 matrix."""
    (plane,) = OCTIC.planes
    matrix = np.diag([irrep(element)[0, 0] for irrep in OCTIC.lines] + [0] * 4).astype(np.float32)
    matrix[4:6, 4:6] = matrix[6:8, 6:8] = plane(element)
    return matrix


def _unused(config) -> list[Constant]:
    """The octic norm in files of DINOv2's D8."""
    if not _is_dinov2_d8(config):
        return []
    channels = config.width // 8
    values = {f"alpha_{line}": np.ones(channels, np.float32) for line in LINES}
    values |= {"alpha_E": np.ones(2 * channels, np.float32), "beta": np.zeros(channels, np.float32)}
    return [Constant(f"norm.scaling.{name}", value, "unused", fixed=False) for name, value in values.items()]


def _default(config):
    return "dinov2" if config.num_classes is None else "deit"


FORMAT = Format(
    NAME,
    tuple(SCALES),
    ViTConfig,
    infer,
    table,
    _default,
    rename=reading.unchunked,
    ignored=reading.DINOV2_HEADS,
    mark=r"patch_embed\.lift8\.conv_A1\.weight",
)
