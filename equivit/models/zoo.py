"""Named models.  `create("octic_vit_h14", family="I8")` builds one; overrides are fields of its configuration.

Sizes are those of octic ViTs, Table 1, and of DeiT III.  `vit_*`, `octic_vit_*` and `flip_vit_*` follow DeiT III (no
position on the class token, layer scale 1e-4); `dinov2_*` and `octic_dinov2_*` follow DINOv2 (mask token, no head).

`jumbo_vit_*` is Jumbo as its paper's tables count it, `jumbo_vit_release_*`, `jumbo_vit_legacy_*` and `jumbo_vit_mae_*`
the other public versions (`models/jumbo_vit.py`), `octic_jumbo_vit_*` Jumbo among octic patches, and `register_vit_*`
its baseline with 16 registers; `register_mlp=` gives the alternative designs of its Section 4.7, and
`width=1024, num_heads=16` of `register_vit_b16` the wider baseline.
"""

import dataclasses
import difflib

import jax
from flax import nnx

from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.models.jumbo_vit import PRESETS, JumboViT, JumboViTConfig
from equivit.models.vit import ViT
from equivit.models.vit_config import ViTConfig


def _masked_autoencoder(config: MaskedAutoencoderConfig, *, rngs: nnx.Rngs) -> MaskedAutoencoder:
    return MaskedAutoencoder(config, build(config.encoder, rngs), rngs=rngs)


KINDS = {  # configuration and model
    "vit": (ViTConfig, ViT),
    "jumbo_vit": (JumboViTConfig, JumboViT),
    "masked_autoencoder": (MaskedAutoencoderConfig, _masked_autoencoder),
}
SIZES = {
    "pico": dict(width=96, depth=12, num_heads=3),
    "nano": dict(width=128, depth=12, num_heads=4),
    "ti": dict(width=192, depth=12, num_heads=3),
    "s": dict(width=384, depth=12, num_heads=6),
    "b": dict(width=768, depth=12, num_heads=12),
    "l": dict(width=1024, depth=24, num_heads=16),
    "h": dict(width=1280, depth=32, num_heads=16),
    "g": dict(width=1664, depth=48, num_heads=16, mlp_dim=8192),
    "e": dict(width=1792, depth=56, num_heads=16, mlp_dim=15360),
    "22b": dict(width=6144, depth=36, num_heads=48, mlp_dim=24576),
}
VARIANTS = ("pico16", "nano16", "ti16", "s16", "b16", "l16", "h14", "h16", "g14", "e14", "22b14")
# Deviations of positions and class token at the start are those of the official codes.  The Jumbo authors' code of
# Registers is not public; begun as close together as elsewhere, they stay one register, repeated, in a short run.
FLAVOURS = {
    "vit": dict(family="plain"),
    "octic_vit": dict(family="H8", token_std=0.16, position_std=0.16 * 2**-0.5),
    "flip_vit": dict(family="H2", isotypic_eps=1e-6),
    "dinov2_vit": dict(family="plain", num_classes=None, class_position=True, mask_token=True, token_std=1e-6),
    "octic_dinov2_vit": dict(
        family="H8", num_classes=None, mask_token=True, token_std=1e-6, position_std=0.16 * 2**-0.5
    ),
    "register_vit": dict(family="plain", registers=16, norm_eps=1e-5, register_std=0.02),
    "jumbo_vit": PRESETS["paper"],
    "jumbo_vit_release": PRESETS["release"],
    "jumbo_vit_legacy": PRESETS["legacy"],
    "jumbo_vit_mae": PRESETS["mae_jax"],
    "octic_jumbo_vit": dict(PRESETS["paper"], family="H8", position_std=0.16 * 2**-0.5),
}
# J of the paper: 6, and 3 from the width of Base on (Tables 1 and 5).
JUMBO = {"b": 3, "l": 3, "h": 3, "g": 3, "e": 3, "22b": 3}


def names() -> list[str]:
    """All names that `create` knows."""
    return [f"{flavour}_{variant}" for flavour in FLAVOURS for variant in VARIANTS]


def configuration(name: str, **overrides) -> ViTConfig:
    """The configuration of a named model with some fields replaced.

    Raises:
      ValueError: no such name, or no such field; the message gives the nearest.
    """
    if name not in names():
        raise ValueError(f"model {name!r} is not known; {_nearest(name, names())}")
    flavour, variant = name.rsplit("_", 1)
    kind = JumboViTConfig if "jumbo" in flavour else ViTConfig
    valid = [field.name for field in dataclasses.fields(kind)]
    for key in overrides:
        if key not in valid:
            raise ValueError(f"model {name}: {key!r} is not one of its options; {_nearest(key, valid)}")
    size, patch = variant[:-2], int(variant[-2:])
    jumbo = {"jumbo": JUMBO.get(size, 6)} if kind is JumboViTConfig else {}
    fields = {**SIZES[size], **jumbo, **FLAVOURS[flavour], "patch_size": patch, **overrides}
    chosen = {key: value for key, value in overrides.items() if key != "family"}
    return kind(**{**_readout(flavour, fields), **chosen})


def create(name: str, *, rngs: nnx.Rngs | None = None, **overrides) -> nnx.Module:
    """Build a named model, with parameters drawn from `rngs` (seed 0 if None)."""
    return build(configuration(name, **overrides), rngs or nnx.Rngs(params=0))


def build(config: ViTConfig | MaskedAutoencoderConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The model of a configuration."""
    return KINDS[kind(config)][1](config, rngs=rngs)


def kind(config: ViTConfig | MaskedAutoencoderConfig) -> str:
    """The key of `KINDS` that a configuration belongs to."""
    return next(name for name, (known, _) in KINDS.items() if type(config) is known)


def abstract(name: str, **overrides) -> nnx.Module:
    """The named model with shapes in place of arrays; costs no memory."""
    return jax.eval_shape(lambda: create(name, **overrides))


def _readout(flavour: str, fields: dict) -> dict:
    """The readout that goes with a family."""
    if fields.get("family") == "D8" and flavour == "octic_dinov2_vit":
        # Octic DINOv2's D8 projects every token to invariants; see models/vit.py.
        return {**fields, "family": "I8", "equivariant_blocks": fields["depth"], "isotypic_eps": 1e-6}
    if fields.get("family") == "D8" and "jumbo" not in fields:
        return {**fields, "class_token": False, "pool": "mean"}
    if fields.get("family") == "D2":
        return {**fields, "invariant": "linear_signed"}
    return fields


def _nearest(word: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(word, valid, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(valid)}."
