"""Names of timm and of torch.hub for models of the zoo: "vit_tiny_patch16_224" is `vit_ti16`."""

import re
from typing import Any

LETTERS = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h", "giant": "g"}
SIZE = "(?P<size>tiny|small|base|large|huge|giant)"
# Patterns of names, and the names of the zoo, with {size}; `image` and `window` are sides in pixels and tokens.
PATTERNS = {
    r"dinov2_vit(?P<letter>[sblg])14(?P<registers>_reg)?": "dinov2_vit_{letter}14{registers}",
    rf"vit_{SIZE}_patch14_(?P<registers>reg4_)?dinov2": "dinov2_vit_{size}14{registers}",
    rf"vit_{SIZE}(?P<plus>_plus)?_patch16_dinov3": "dinov3_vit_{size}16{plus}",
    r"vit_7b_patch16_dinov3": "dinov3_vit_7b16",
    r"dinov3_vit(?P<letter>[sblh]|7b)16(?P<plus>plus)?": "dinov3_vit_{letter}16{plus}",
    rf"vit_{SIZE}_patch(?P<patch>\d+)_clip_quickgelu_(?P<image>\d+)": "clip_vit_{size}{patch}",
    rf"(?:vit|deit|deit3)_{SIZE}_patch(?P<patch>\d+)_(?P<image>\d+)": "vit_{size}{patch}",
    rf"swin_{SIZE}_patch4_window(?P<window>\d+)_(?P<image>\d+)": "swin_{size}",
    rf"swinv2_{SIZE}_window(?P<window>\d+)_(?P<image>\d+)": "swinv2_{size}",
    rf"mvitv2_{SIZE}": "mvitv2_{size}",
}


def translated(name: str) -> tuple[str, dict[str, Any]] | None:
    """The name in the zoo and the fields in a name of timm, whose tag (".augreg_in21k") is ignored; None if it is none.

    A model has the zoo's defaults, as for its own name: layer scale and positions are DeiT III's.
    """
    for pattern, ours in PATTERNS.items():
        if (match := re.fullmatch(rf"{pattern}(?:\..*)?", name)) is None:
            continue
        found = match.groupdict()
        if size := found.get("size"):
            found["size"] = LETTERS[size] if ours.startswith(("vit", "dinov", "clip")) else LETTERS[size][0]
        found["registers"] = "_reg" if found.get("registers") else ""
        found["plus"] = "plus" if found.get("plus") else ""
        fields: dict[str, Any] = {}
        if image := found.get("image"):
            fields["image_size"] = (int(image), int(image))
        if window := found.get("window"):
            fields["window_size"] = (int(window), int(window))
        return ours.format(**found), fields
    return None


def spelled(name: str) -> str:
    """A name without separators and with short sizes, to compare spellings: "ViT-Small/16" -> "vits16"."""
    name = name.lower()
    for word, letters in LETTERS.items():
        name = name.replace(word, letters)
    return re.sub(r"[^a-z0-9]|patch", "", name)
