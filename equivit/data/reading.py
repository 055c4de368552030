"""Decodes the examples of a source; an unreadable one is replaced by the next readable one."""

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from equivit.data.sources import Source

MODES = {1: "L", 3: "RGB"}  # PIL's names
MAX_MISSES = 100  # this many unreadable images in a row mean a broken data set


class Reading(NamedTuple):
    """One decoded example.  `unreadable` maps each example that it replaces to the error."""

    example: dict[str, Any]
    unreadable: dict[str, str]


def read(source: Source, index: int, channels: int) -> Reading:
    """Example `index`, or the next readable one (after the last comes the first), with all its entries.

    "image" becomes a PIL image of mode L or RGB and "map" one of mode I; other entries stay as they are.  The number of
    examples read, and so the size of a batch, does not depend on how many files are damaged.

    Raises:
      OSError: 100 images in a row, or all of them, are unreadable.
    """
    unreadable = {}
    for offset in range(min(MAX_MISSES, len(source))):
        position = (index + offset) % len(source)
        try:
            return Reading(_decoded(source[position], channels), unreadable)
        except Exception as error:  # PIL's decoders raise nearly everything: OSError, SyntaxError, struct.error, ...
            unreadable[source.where(position)] = " ".join(str(error).split()) or type(error).__name__
    where, reason = next(iter(unreadable.items()))
    raise OSError(f"{len(unreadable)} images in a row cannot be read, starting with {where}: {reason}")


def decode(image: np.ndarray | bytes, channels: int) -> Image.Image:
    """A PIL image with 1 (grey) or 3 (RGB) channels from an array uint8 [H, W, C] or the bytes of an image file."""
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as file:
            return file.convert(MODES[channels])
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert(MODES[channels])


def decode_map(labels: np.ndarray | bytes) -> Image.Image:
    """A PIL image of integers (mode I) from an array [H, W] or the bytes of a PNG file, grey or with a palette.

    The mode distinguishes a map from an image, so that `crops.resize` never interpolates labels.
    """
    if isinstance(labels, bytes):
        with Image.open(io.BytesIO(labels)) as file:
            labels = np.asarray(file)
    if labels.ndim != 2:
        raise ValueError(f"a label map must have one channel, not the shape {list(labels.shape)}")
    return Image.fromarray(labels.astype(np.int32))


def check_channels(channels: int) -> None:
    """ValueError unless images can have this number of channels."""
    if channels not in MODES:
        raise ValueError(f"config.data.channels={channels} must be 1 (grey) or 3 (RGB); None uses the source's number.")


def _decoded(example: dict[str, Any], channels: int) -> dict[str, Any]:
    """The example with "image" and "map", if present, as PIL images."""
    if "image" in example:
        example = {**example, "image": decode(example["image"], channels)}
    if "map" in example:
        example = {**example, "map": decode_map(example["map"])}
        if len(sizes := {example[name].size for name in ("image", "map") if name in example}) > 1:
            raise ValueError(f"image and label map differ in size (width, height): {sorted(sizes)}")
    return example
