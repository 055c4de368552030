"""ViTs with a Jumbo token, plain or equivariant: a global token J times as wide as a patch token, with its own MLP.

All families of `config.py` support it.  In equivariant blocks, the Jumbo token is either a wide field ("steerable") or
has only the invariant component ("invariant"): J times width / order channels, with a dense MLP.  D8 and D2 read its
invariants with an MLP.

`PRESETS` has the settings of four public versions: the paper's tables, the released code and checkpoints, the code of
2025, and the JAX version of Jumbo's MAE.

Source: Jumbo (arXiv 2502.15021), Sections 3 and 4.
"""

import dataclasses
import functools
from typing import Annotated, Any, Literal

from flax import nnx

from equivit.constraints import NonNegativeFloat, OneOf, PositiveFloat, PositiveInt
from equivit.intervals import LARGEST_INT
from equivit.layers import invariants
from equivit.layers.block import Block
from equivit.layers.jumbo import JumboBlock, LinearLora, MlpLora
from equivit.layers.parts import Parts
from equivit.layers.prefix import JumboRows, token
from equivit.layers.readout import JumboReadout
from equivit.models.model import Preset
from equivit.models.vit.config import HEAD_BIASES, ViTConfig
from equivit.models.vit.model import ViT
from equivit.models.vit.names import SIZES
from equivit.models.vit.parts import learned_width, make_head, parts_of, position, stack, transition

JUMBO_MLPS = ("shared", "per_layer", "none", "lora", "linear_lora")


@dataclasses.dataclass(frozen=True)
class JumboViTConfig(ViTConfig):
    """The configuration of a Jumbo ViT: the fields of `ViTConfig` and these.

    Attributes:
      jumbo: J, the width of the Jumbo token in patch tokens.
      jumbo_mlp: the MLP of the Jumbo token: "shared" by all layers; one "per_layer"; "none": the J rows use the MLP of
        the patches; "lora" and "linear_lora": shared, with a low-rank update per layer, either of the whole MLP or of
        its linear layers.
      jumbo_multiplier: ratio of hidden width to width in that MLP (Table 12).
      lora_rank: rank of the low-rank updates.
      normed_residual: whether the residual connection of that MLP starts after the norm.
      last_patch_mlp: whether the last block also applies the MLP to the patches; with pool="jumbo", logits do not
        depend on it.  `tokens`, and `features` with `norm`, always apply it.
      wide_norm: whether the final norm is over the merged Jumbo token or over each row.  With it, patches have no
        learned norm; `tokens`, and `features` with `norm`, standardise them.
      pool: the head reads the "jumbo" token, or with "jumbo_and_patches" also the mean patch token.
      head_std, head_bias: by default, as in the public code, the head starts at zero with equally likely classes.
      field: the Jumbo token in equivariant blocks, "steerable" or "invariant".
    """

    class_token: bool = False
    pool: Annotated[str, OneOf(("jumbo", "jumbo_and_patches"))] = "jumbo"
    norm_eps: PositiveFloat = 1e-5
    position_antialias: bool = True
    jumbo: PositiveInt = 6
    jumbo_mlp: Annotated[str, OneOf(JUMBO_MLPS)] = "shared"
    jumbo_multiplier: PositiveFloat = 4.0
    lora_rank: PositiveInt = 8
    normed_residual: bool = False
    last_patch_mlp: bool = False
    wide_norm: bool = True
    head_std: NonNegativeFloat = 0.0
    head_bias: Annotated[str, OneOf(HEAD_BIASES)] = "prior"
    field: Literal["steerable", "invariant"] = "steerable"

    def __post_init__(self):
        if self.class_token is not False or self.registers or self.register_mlp is not None:
            raise ValueError("JumboViT: the Jumbo token replaces class token and registers; leave them out.")
        if self.replaced:
            raise ValueError(
                "JumboViT: replaced blocks convolve the grid of patches, where the Jumbo token is not; set replaced=()."
            )
        super().__post_init__()
        if self.drop_path_groups is not None:
            raise ValueError(
                f"JumboViT: drop_path_groups={self.drop_path_groups}: blocks with a Jumbo token drop branches for each "
                "sample by itself; set it to None."
            )
        if not 1 <= self.jumbo_multiplier * self.jumbo * self.width <= LARGEST_INT:
            raise ValueError(
                f"JumboViT: jumbo_multiplier={self.jumbo_multiplier} of a Jumbo token of {self.jumbo * self.width} "
                "channels gives no valid MLP width; the paper uses 4.0."
            )
        if self.jumbo_mlp == "linear_lora" and self.mlp != "gelu":
            raise ValueError(
                f"JumboViT: jumbo_mlp='linear_lora' is for mlp='gelu', not {self.mlp!r}; 'lora' is for all."
            )
        if self.field == "invariant" and self.jumbo_mlp == "none":
            raise ValueError("JumboViT: field='invariant' needs a Jumbo MLP; jumbo_mlp='none' keeps whole fields.")
        if self.ends_with_fields and (self.pool != "jumbo" or not self.wide_norm):
            raise ValueError(
                f"JumboViT: family {self.family} reads the merged Jumbo token: pool='jumbo', wide_norm=True."
            )

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return self.jumbo

    def build(self, rngs: nnx.Rngs) -> ViT:
        return build(self, rngs)


PAPER = dict(layer_scale=1e-4)
PRESETS = {
    "paper": PAPER,
    "release": dict(layer_scale=None, last_patch_mlp=True, wide_norm=False, pool="jumbo_and_patches"),
    "legacy": dict(PAPER, jumbo_mlp="per_layer"),
    "mae_jax": dict(
        layer_scale=None,
        last_patch_mlp=True,
        wide_norm=False,
        normed_residual=True,
        norm_eps=1e-6,
        mlp="gelu_tanh",
        position="sincos_inclusive",
        token_std=0.0,
    ),
}


def build(config: JumboViTConfig, rngs: nnx.Rngs) -> ViT:
    """A ViT with a Jumbo token.  Its `features` have the merged token as `cls`, [*B, J width]."""
    parts = parts_of(config, rngs)
    last = functools.partial(_block, config, feeds_patches=False)
    if config.last_patch_mlp or config.jumbo_mlp == "none":
        last = None
    shared = config.jumbo_mlp not in ("none", "per_layer")
    return ViT(
        config,
        patch_embed=parts.patch_embed(config.patch_size, config.in_channels, config.width),
        position=position(config, rngs),
        mask_token=token((learned_width(config),), 0.0, rngs) if config.mask_token else None,
        pre_norm=parts.norm(config.width) if config.pre_norm else None,
        blocks=stack(config, functools.partial(_block, config), rngs, last),
        transition=transition(config, parts),
        **_exit(config, parts),
        prefix=JumboRows(config.jumbo, learned_width(config), std=config.token_std, rngs=rngs),
        jumbo_mlp=_jumbo_mlp(config, parts.of(None)) if shared and config.k < config.depth else None,
        isotypic_jumbo_mlp=_jumbo_mlp(config, parts) if shared and config.k else None,
    )


def _block(config: JumboViTConfig, parts: Parts, feeds_patches: bool = True) -> nnx.Module:
    branches = parts.branches(config.width, config.num_heads, config.hidden)
    if config.jumbo_mlp == "none":
        return Block(**branches)
    wide, width = _merged(config, parts)
    return JumboBlock(
        **branches,
        norm3=wide.norm(width),
        scale3=wide.scale(width),
        jumbo_mlp=_jumbo_mlp(config, parts) if config.jumbo_mlp == "per_layer" else None,
        lora=_lora(config, wide, width),
        normed_residual=config.normed_residual,
        invariant=config.field == "invariant",
        feeds_patches=feeds_patches,
    )


def _merged(config: JumboViTConfig, parts: Parts) -> tuple[Parts, int]:
    """The parts and the width of the merged Jumbo token, from the parts of the patches."""
    if parts.group is not None and config.field == "invariant":
        return parts.of(None), config.jumbo * config.width // parts.group.order
    return parts, config.jumbo * config.width


def _jumbo_mlp(config: JumboViTConfig, parts: Parts) -> nnx.Module:
    wide, width = _merged(config, parts)
    return wide.mlp(width, round(config.jumbo_multiplier * width))


def _lora(config: JumboViTConfig, wide: Parts, width: int) -> nnx.Module | None:
    linear = functools.partial(wide.linear, bias=False)
    match config.jumbo_mlp:
        case "lora":
            return MlpLora(linear, width, config.lora_rank)
        case "linear_lora":
            return LinearLora(linear, width, round(config.jumbo_multiplier * width), config.lora_rank, wide.gelu)
    return None


def _exit(config: JumboViTConfig, parts: Parts) -> dict[str, Any]:
    """Readout and head."""
    rngs = parts.rngs
    parts = parts if config.ends_with_fields else parts.of(None)
    wide, width = _merged(config, parts)
    invariant = None
    if wide.group is not None:
        invariant = invariants.create(config.invariant, width, group=wide.group, rngs=rngs)
    readout = JumboReadout(
        wide.norm(width) if config.wide_norm else parts.norm(config.width),
        standardise=parts.standardise if config.wide_norm else None,
        patches=config.pool == "jumbo_and_patches",
        invariant=invariant,
        takes_invariant=config.field == "invariant",
    )
    if not config.ends_with_fields:
        features = (config.jumbo + (config.pool != "jumbo")) * config.width
    else:
        features = width if invariant is None else invariant.out_features
    return dict(readout=readout, head=make_head(config, features, config.ends_with_fields, rngs))


# `jumbo_vit_*` is Jumbo as counted in the tables of its paper.  The others are its other public versions, and Jumbo
# with octic patches.  As in the paper, J is 3 for Base and wider, 6 for smaller models (Tables 1 and 5).
FLAVOURS = {
    "jumbo_vit": PRESETS["paper"],
    "jumbo_vit_release": PRESETS["release"],
    "jumbo_vit_legacy": PRESETS["legacy"],
    "jumbo_vit_mae": PRESETS["mae_jax"],
    "octic_jumbo_vit": dict(PRESETS["paper"], family="H8", position_std=0.16 * 2**-0.5),
}
NAMES = {
    f"{flavour}_{size}": Preset(
        JumboViTConfig, {**numbers, **fields, "jumbo": 3 if numbers["width"] >= SIZES["b16"]["width"] else 6}
    )
    for flavour, fields in FLAVOURS.items()
    for size, numbers in SIZES.items()
}
