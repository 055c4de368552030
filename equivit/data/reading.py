"""From a source's example to a PIL image; an unreadable one gives way to the next that can be read."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image

from equivit.data.sources import Source

MODES = {1: "L", 3: "RGB"}  # PIL's names
MAX_MISSES = 100  # so many unreadable images in a row are a broken data set, not bad luck


class Reading(NamedTuple):
    """One example as read.  `unreadable` maps what could not be read in its place, and comes with the reason."""

    image: Image.Image
    label: int | tuple[int, ...]
    unreadable: dict[str, str]


def read(source: Source, index: int, channels: int) -> Reading:
    """Example `index`, or the next readable one of the source (after the last comes the first), with its own label.

    The number of examples read, and so the size of a batch, never depends on how many files are damaged.

    Raises:
      OSError: if 100 images in a row, or all of them, are unreadable.
    """
    unreadable = {}
    for offset in range(min(MAX_MISSES, len(source))):
        position = (index + offset) % len(source)
        try:
            example = source[position]
            return Reading(decode(example["image"], channels), example["label"], unreadable)
        except Exception as error:  # PIL's decoders raise nearly everything: OSError, SyntaxError, struct.error, ...
            unreadable[source.where(position)] = " ".join(str(error).split()) or type(error).__name__
    where, reason = next(iter(unreadable.items()))
    raise OSError(f"{len(unreadable)} images in a row cannot be read, from {where} on: {reason}")


def decode(image: np.ndarray | bytes, channels: int) -> Image.Image:
    """A PIL image with 1 (grey) or 3 (RGB) channels from an array uint8 [H, W, C] or the bytes of an image file."""
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as file:
            return file.convert(MODES[channels])
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert(MODES[channels])


def check_channels(channels: int) -> None:
    """Raises ValueError unless images of so many channels can be handled."""
    if channels not in MODES:
        raise ValueError(
            f"config.data.channels={channels} must be 1 (grey) or 3 (RGB); None takes the source's number."
        )
