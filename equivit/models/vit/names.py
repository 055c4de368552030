"""Names of plain, octic and flip ViTs: sizes and the papers' settings; then ViTs with public weights.

`dinov2_vit_*14` is the torch.hub model for images of 518 pixels, and `*_reg` has four registers.  `dinov3_vit_*` have
four registers and rotary positions, and `*plus` and `7b16` gated MLPs.  `clip_vit_*` are OpenAI's image encoders, with
the projection as head.  `pretrained.load` infers these configurations from the files.
"""

from collections.abc import Mapping
from typing import Any

from equivit.models.model import Preset
from equivit.models.vit.config import ViTConfig

# The sizes of octic ViTs (Table 1) and DeiT III.  "bigg" is the ViT-G of that table, in OpenCLIP's naming; DINOv2's
# ViT-g is different (`GIANT`).
SIZES = {
    "pico16": dict(width=96, depth=12, num_heads=3, patch_size=16),
    "nano16": dict(width=128, depth=12, num_heads=4, patch_size=16),
    "ti16": dict(width=192, depth=12, num_heads=3, patch_size=16),
    "s16": dict(width=384, depth=12, num_heads=6, patch_size=16),
    "b16": dict(width=768, depth=12, num_heads=12, patch_size=16),
    "l16": dict(width=1024, depth=24, num_heads=16, patch_size=16),
    "h14": dict(width=1280, depth=32, num_heads=16, patch_size=14),
    "h16": dict(width=1280, depth=32, num_heads=16, patch_size=16),
    "bigg14": dict(width=1664, depth=48, num_heads=16, mlp_dim=8192, patch_size=14),
    "e14": dict(width=1792, depth=56, num_heads=16, mlp_dim=15360, patch_size=14),
    "22b14": dict(width=6144, depth=36, num_heads=48, mlp_dim=24576, patch_size=14),
}
# `vit_*`, `octic_vit_*` and `flip_vit_*` follow DeiT III (no position on the class token, layer scale 1e-4); `dinov2_*`
# and `octic_dinov2_*` follow DINOv2 (mask token, no head).  The initial standard deviations of positions and class
# token are from the official codes.  `register_vit_*` has the head of Jumbo's public code, whose model with registers
# is not public.  Its `register_std` is larger than the default, because with the default all registers act as one in a
# short run.
FLAVOURS = {
    "vit": dict(family="plain"),
    "octic_vit": dict(family="H8", token_std=0.16, position_std=0.16 * 2**-0.5),
    "flip_vit": dict(family="H2", isotypic_eps=1e-6),
    "dinov2_vit": dict(family="plain", num_classes=None, class_position=True, mask_token=True, token_std=1e-6),
    "register_vit": dict(
        family="plain", registers=16, norm_eps=1e-5, register_std=0.02, head_std=0.0, head_bias="prior"
    ),
}
OCTIC_DINOV2 = dict(family="H8", num_classes=None, mask_token=True, token_std=1e-6, position_std=0.16 * 2**-0.5)

NAMES = {
    f"{flavour}_{size}": Preset(ViTConfig, {**numbers, **fields})
    for flavour, fields in FLAVOURS.items()
    for size, numbers in SIZES.items()
}


def _every_block(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The D8 of octic DINOv2, which projects every token to invariants, is our I8 with k = depth."""
    return dict(family="I8", equivariant_blocks=fields["depth"], isotypic_eps=1e-6)


NAMES |= {
    f"octic_dinov2_vit_{size}": Preset(ViTConfig, {**numbers, **OCTIC_DINOV2}, {"D8": _every_block})
    for size, numbers in SIZES.items()
}

# ---- With public weights.

DINOV2 = dict(FLAVOURS["dinov2_vit"], patch_size=14, image_size=(518, 518))
GIANT = dict(width=1536, depth=40, num_heads=24, mlp="swiglu", mlp_dim=4096)
DINOV2_SIZES = {"s14": SIZES["s16"], "b14": SIZES["b16"], "l14": SIZES["l16"], "g14": GIANT}
# How the official code resizes positions.
RESIZING: dict[str, dict[str, Any]] = {
    "": dict(position_offset=0.1),
    "_reg": dict(registers=4, position_antialias=True),
}

NAMES |= {
    f"dinov2_vit_{size}{suffix}": Preset(ViTConfig, {**numbers, **DINOV2, **fields})
    for suffix, fields in RESIZING.items()
    for size, numbers in DINOV2_SIZES.items()
}

DINOV3: dict[str, Any] = dict(
    num_classes=None,
    norm_eps=1e-5,
    position="rotary",
    registers=4,
    mask_token=True,
    token_std=0.02,
    register_std=0.02,
    layer_scale=1e-5,
)
DINOV3_SIZES: dict[str, dict[str, Any]] = {
    "s16": SIZES["s16"],
    "s16plus": SIZES["s16"] | dict(mlp="swiglu", mlp_dim=1536),
    "b16": SIZES["b16"],
    "l16": SIZES["l16"],
    "h16plus": SIZES["h16"] | dict(num_heads=20, mlp="swiglu", mlp_dim=5120),
    "7b16": dict(width=4096, depth=40, num_heads=32, patch_size=16, mlp="swiglu", mlp_dim=8192, qkv_bias=False),
}
NAMES |= {f"dinov3_vit_{size}": Preset(ViTConfig, {**DINOV3, **numbers}) for size, numbers in DINOV3_SIZES.items()}

CLIP: dict[str, Any] = dict(
    num_classes=None,
    mlp="quick_gelu",
    norm_eps=1e-5,
    class_position=True,
    position_antialias=True,
    patch_bias=False,
    pre_norm=True,
    layer_scale=None,
)
CLIP_SIZES: dict[str, dict[str, Any]] = {
    "b32": SIZES["b16"] | dict(patch_size=32, projection=512),
    "b16": SIZES["b16"] | dict(projection=512),
    "l14": SIZES["l16"] | dict(patch_size=14, projection=768),
    "l14_336": SIZES["l16"] | dict(patch_size=14, projection=768, image_size=(336, 336)),
}
NAMES |= {f"clip_vit_{size}": Preset(ViTConfig, {**CLIP, **numbers}) for size, numbers in CLIP_SIZES.items()}
