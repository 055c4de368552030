"""The official flip-equivariant ViTs (flopping-for-flops): D2, H2 and I2.

Files of H2 and I2 have the same names and shapes, so the caller must choose.  The official models order tokens by
halves of the grid, ours row by row, which does not change logits.  Files store their order; reading checks it.
"""

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, Hints, MissingHint, State, require
from equivit.pretrained.mapping import Constant, Table
from equivit.pretrained.plain import Spelling

NAME = "flip"
IRREPS = ("sym", "asym")
SCALES = ("gamma_1", "gamma_2")
ORDER = "patch_embed.flatten_and_permute.permutation"


def token_order(grid: tuple[int, int]) -> np.ndarray:
    """The row-major position of each official token: left half row by row, then its mirror image.  int64 [h w]."""
    h, w = grid
    positions = np.arange(h * w, dtype=np.int64).reshape(h, w)
    return np.concatenate([positions[:, : w // 2].reshape(-1), positions[:, ::-1][:, : w // 2].reshape(-1)])


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `family` ("H2" or "I2") is required if there are dense blocks."""
    channels, in_channels, patch, half = state.shape("patch_embed.proj_sym.weight", 4)
    width, depth = 2 * channels, state.depth()
    k = state.count("attn.qkv.linear_sym.weight")
    config = ViTConfig(
        width=width,
        depth=depth,
        num_heads=state.heads(width, hints.num_heads),
        patch_size=(patch, 2 * half),
        image_size=hints.image_size or _image_size(state, (patch, 2 * half)),
        in_channels=in_channels,
        mlp_dim=2 * state.out("blocks.0.mlp.fc1.linear_sym"),
        isotypic_eps=1e-6,
        qkv_bias=state.count("attn.qkv.linear_sym.bias") > 0,
        layer_scale=1e-4 if state.count("gamma_1.alpha_sym") else None,
        **_family(state, k, depth, channels, hints.family),
    )
    return config, "deit"


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    require(config, NAME, isotypic_norm="official", isotypic_eps=1e-6, class_token=True, pool="class")
    require(config, NAME, class_position=False, registers=0, mask_token=False, transition_map=False)
    rows = plain.block(Spelling(scales=SCALES)) | mapping.isotypic_blocks(config.k, IRREPS, "linear", SCALES)
    rows |= {"patch_embed.bias": "patch_embed.proj_sym.bias", "readout.norm": "norm", "head": "head"}
    rows["prefix.class_token"] = mapping.reshaped("cls_token.0", lambda x: x[None, None])
    for i, irrep in enumerate(IRREPS):
        rows[f"patch_embed.{irrep}"] = mapping.moved(f"patch_embed.proj_{irrep}.weight", (2, 3, 1, 0))
        rows[f"position.{irrep}"] = mapping.reshaped(f"pos_embed.{i}", lambda x: x.reshape(1, -1, x.shape[-1]))
    if config.family == "D2":
        rows |= mapping.isotypic_norm("readout.norm", "norm", IRREPS)
    h, w = (size // patch for size, patch in zip(config.image_size, config.patch_size, strict=True))
    zeros = Constant("cls_token.1", np.zeros((1, 1, config.width // 2), np.float32), "zeros")
    order = Constant(ORDER, token_order((h, w)), f"the token order of the grid {h}x{w}")
    return mapping.table(config, rows, [zeros, order])


def _family(state, k, depth, channels, family) -> dict:
    classes, features = state.shape("head.weight", 2) if "head.weight" in state else (None, channels)
    if k == depth:
        kind = "power_spectrum" if features == 2 * channels else "linear_signed"
        return dict(family="D2", invariant=kind, num_classes=classes)
    if family not in ("H2", "I2"):
        given = "is not given" if family is None else f"is {family!r}"
        raise MissingHint(
            "family",
            f"{NAME}: family= {given}; {k} of {depth} blocks are equivariant, and files of H2 and I2 have the same "
            "names and shapes, so it must be family='H2' (hybrid_*) or family='I2' (d2_inv_early_*).",
        )
    return dict(family=family, equivariant_blocks=k, num_classes=classes)


def _image_size(state, patch_size):
    """The image size of the stored token order, whose second half begins at the end of the first row."""
    (tokens,) = state.shape(ORDER, 1)
    columns = int(state[ORDER][tokens // 2]) + 1 if state[ORDER].dtype.kind in "iu" else 0
    if columns < 1 or tokens % columns:
        raise ValueError(f"{NAME}: {ORDER} is not the token order of any grid of {tokens} tokens.")
    return tokens // columns * patch_size[0], columns * patch_size[1]


FORMAT = Format(NAME, ("deit",), ViTConfig, infer, table, mark=r"patch_embed\.proj_sym\.weight")
