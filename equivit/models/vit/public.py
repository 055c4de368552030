"""ViTs with public weights, under the sizes and the rules that these have.

`dinov2_vit_*14` is the hub's model for images of 518 pixels, `*_reg` that with four registers; `clip_vit_*` are
OpenAI's image encoders, with the projection as head.  `pretrained.load` finds these configurations from the files.
"""

from typing import Any

from equivit.models.model import Preset
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.names import FLAVOURS, SIZES

DINOV2 = dict(FLAVOURS["dinov2_vit"], patch_size=14, image_size=(518, 518))
GIANT = dict(width=1536, depth=40, num_heads=24, mlp="swiglu", mlp_dim=4096)
DINOV2_SIZES = {"s14": SIZES["s16"], "b14": SIZES["b16"], "l14": SIZES["l16"], "g14": GIANT}
# How the official code resizes positions.
RESIZING: dict[str, dict[str, Any]] = {
    "": dict(position_offset=0.1),
    "_reg": dict(registers=4, position_antialias=True),
}

NAMES = {
    f"dinov2_vit_{size}{suffix}": Preset(ViTConfig, {**numbers, **DINOV2, **fields})
    for suffix, fields in RESIZING.items()
    for size, numbers in DINOV2_SIZES.items()
}

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
