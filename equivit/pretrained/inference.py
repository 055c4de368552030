"""What the names and shapes of a state dict tell about its model."""

import math
import re
from collections.abc import Mapping

import numpy as np

from equivit.models.vit_config import ViTConfig

# Heads of the published sizes, Pico and Nano (Jumbo), Ti, S, M, B, L, H and DINOv2's g; no file says how many.
HEADS = {96: 3, 128: 4, 192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16, 1536: 24}


def shape(state: Mapping[str, np.ndarray], source: str, name: str, axes: int) -> tuple[int, ...]:
    """The shape of a tensor; ValueError when there is none of that name, or it has another number of axes."""
    if name not in state:
        raise ValueError(
            f"{source}: no tensor {name!r} among the {len(state)} of the file, such as {', '.join(list(state)[:3])}; "
            "is it of another source, or wrapped in a way that is not known?"
        )
    if state[name].ndim != axes:
        raise ValueError(f"{source}: {name} {state[name].shape} must have {axes} axes.")
    return state[name].shape


def depth(state: Mapping[str, np.ndarray], source: str) -> int:
    """Number of blocks; ValueError when there is none, or one between others is missing."""
    indices = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))}
    if not indices:
        raise ValueError(f"{source}: no tensor of the file is named blocks.<i>...")
    if (number := len(indices)) <= max(indices):
        gap = next(i for i in range(number) if i not in indices)
        raise ValueError(f"{source}: block {gap} is missing; the file has {number} blocks, up to {max(indices)}.")
    return number


def count(state: Mapping[str, np.ndarray], name: str) -> int:
    """How many blocks have a tensor of that name."""
    return sum(bool(re.fullmatch(rf"blocks\.\d+\.{re.escape(name)}", key)) for key in state)


def heads(width: int, num_heads: int | None, source: str) -> int:
    """`num_heads`, or that of the published model of this width; ValueError when there is none."""
    if num_heads is None and width not in HEADS:
        raise ValueError(
            f"{source}: width {width} is not that of a published model ({', '.join(map(str, HEADS))}); "
            "give num_heads=, which no file tells."
        )
    if num_heads is not None and num_heads < 1:
        raise ValueError(f"{source}: {num_heads=} must be at least 1.")
    return HEADS[width] if num_heads is None else num_heads


def transformer(state: Mapping[str, np.ndarray], source: str, num_heads: int | None) -> dict:
    """The fields of the configuration that all files of plain ViTs tell in the same way."""
    width, in_channels, *patch = shape(state, source, "patch_embed.proj.weight", 4)
    return dict(
        width=width,
        depth=depth(state, source),
        num_heads=heads(width, num_heads, source),
        patch_size=tuple(patch),
        in_channels=in_channels,
        num_classes=shape(state, source, "head.weight", 2)[0] if "head.weight" in state else None,
        qkv_bias=count(state, "attn.qkv.bias") > 0,
    )


def positions(
    state: Mapping[str, np.ndarray], source: str, patch: tuple[int, int], image_size: tuple[int, int] | None
) -> tuple[tuple[int, int], bool]:
    """The image size of the table of positions, and whether its first row is the class token's.

    Raises:
      ValueError: the number of rows is not that of `image_size`, or without one of no square.
    """
    rows = shape(state, source, "pos_embed", 3)[1]
    for with_class in (False, True):
        patches = rows - with_class
        h, w = (image_size[i] // patch[i] for i in (0, 1)) if image_size else (math.isqrt(patches),) * 2
        if patches and h * w == patches:
            return image_size or (h * patch[0], w * patch[1]), with_class
    raise ValueError(
        f"{source}: pos_embed has {rows} rows, which is no square grid of patches, with or without a class token; give "
        f"image_size=(height, width) with height/{patch[0]} times width/{patch[1]} patches."
        if image_size is None
        else f"{source}: pos_embed has {rows} rows, not those of an image of {image_size[0]}x{image_size[1]} in "
        f"patches of {patch[0]}x{patch[1]}."
    )


def require(config: ViTConfig, source: str, **values) -> None:
    """ValueError when a field of the configuration has a value that the format's own code does not have."""
    for name, value in values.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(f"{source}: cannot hold a model with {name}={found!r}; its own code has {value!r}.")
