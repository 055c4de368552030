"""Decodes the examples of a source; an unreadable one is replaced by the next readable one."""

import io
import warnings
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from equivit import errors
from equivit.data import directories, sources
from equivit.data.label_maps import Legend, MapError
from equivit.data.sources import Source

MODES = {1: "L", 3: "RGB"}  # PIL's names
MAX_MISSES = 100  # this many unreadable images in a row mean a broken data set
MAX_PIXELS = 50_000_000  # of an image file, by default: 150 MB as RGB, and more while it is resized
PIL_PIXELS = 178_956_970  # Pillow opens no larger files
FORMATS = tuple(set(directories.FORMATS.values()))  # other formats could start programs: PostScript starts Ghostscript
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")  # PIL's modes


# Pillow warns of each damaged TIFF entry; unreadable files are reported anyway.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


class Reading(NamedTuple):
    """One decoded example.  `unreadable` maps each example it replaces to the error."""

    example: dict[str, Any]
    unreadable: dict[str, str]


def read(source: Source, index: int, channels: int, max_pixels: int = MAX_PIXELS) -> Reading:
    """Read example `index`, or the next readable one (the first follows the last), with all its entries.

    "image" becomes a PIL image of mode L or RGB, and "map" one of mode I with labels 0..classes-1 and VOID; other
    entries stay.  Damaged files do not change the number of examples or the batch size.  A file of more than
    `max_pixels` counts as unreadable.

    Raises:
      OSError: 100 images in a row, or all of them, are unreadable.
      MapError: a label map is in colour, differs in size from its image, or has unknown numbers.
      MemoryError: there is not enough memory to decode an image.
    """
    unreadable = {}
    for offset in range(min(MAX_MISSES, len(source))):
        position = (index + offset) % len(source)
        try:
            return Reading(_decoded(source[position], channels, max_pixels, sources.legend(source)), unreadable)
        except MapError as error:
            raise MapError(f"{errors.line(source.where(position))}: {error}") from None
        except MemoryError as error:  # not the file's fault
            raise MemoryError(
                f"there is not enough memory to decode {source.where(position)}; fewer data.workers or a smaller "
                "batch_size take less."
            ) from error
        except Exception as error:  # PIL's decoders raise nearly everything: OSError, SyntaxError, struct.error, ...
            unreadable[source.where(position)] = errors.line(str(error)) or type(error).__name__
    where, reason = next(iter(unreadable.items()))
    raise OSError(f"{len(unreadable)} images in a row cannot be read, starting with {errors.line(where)}: {reason}")


def decode(image: np.ndarray | bytes, channels: int, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an array [H, W, C] or the bytes of an image file to a PIL image with 1 (grey) or 3 (RGB) channels.

    16-bit values, 0..65535, are divided by 257 and rounded.

    Raises:
      ValueError: not an image file, more than `max_pixels`, a long strip, or values of neither 8 nor 16 bits, whose
        range is unknown.
    """
    if isinstance(image, bytes):
        with _opened(image, max_pixels) as file:
            return _in_mode(_eight_bits(file), MODES[channels])
    if image.ndim != 3 or image.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"an image must be an array [H, W, C] of uint8 or uint16, not {image.dtype} {list(image.shape)}; scale it "
            "to 0..255"
        )
    image = _scaled(image)
    return _in_mode(Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image), MODES[channels])


def decode_map(labels: np.ndarray | bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode an array [H, W] or the bytes of a PNG file, grey or with a palette, to a PIL image of integers (mode I).

    The mode distinguishes a map from an image, so that `crops.resize` never interpolates labels.

    Raises:
      MapError: an image of colours, or numbers that are not whole.
      ValueError: not an image file, or more than `max_pixels`.
    """
    mode = ""
    if isinstance(labels, bytes):
        with _opened(labels, max_pixels) as file:
            labels, mode = np.asarray(file), f" (mode {file.mode})"
    if labels.ndim != 2:
        raise MapError(
            f"a label map must have one channel, not the shape {list(labels.shape)}{mode}; save the index of each "
            "pixel's class, not its colour, as a grey PNG file or one with a palette."
        )
    if labels.dtype.kind not in "biu":
        raise MapError(f"a label map must hold whole numbers, not {labels.dtype}{mode}.")
    return Image.fromarray(labels.astype(np.int32))


def _opened(content: bytes, max_pixels: int) -> Image.Image:
    """Open an image file of a format in `directories.FORMATS`, and check its size before decoding pixels."""
    try:
        file = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        begin = f"{len(content)} bytes that begin with {content[:8]!r}"
        raise ValueError(f"it is not an image file: {begin}; formats are {', '.join(sorted(FORMATS))}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"it is too large for any limit; make it smaller ({error})") from None
    width, height = file.size
    directories.check_pixels(height, width, max_pixels)
    return file


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    """`image.convert(mode)`, without Pillow's copy of an image already in this mode."""
    if image.mode != mode:
        return image.convert(mode)
    image.load()  # before its file is closed
    return image


def _eight_bits(file: Image.Image) -> Image.Image:
    """The image with 8-bit values."""
    # PNG and PGM have at most 16 bits, even if Pillow opens them as I.
    if file.mode in SIXTEEN_BIT or (file.mode == "I" and file.format in ("PNG", "PPM")):
        return Image.fromarray(_from_sixteen_bits(file))
    if file.mode in ("I", "F"):
        kind = {"I": "whole numbers", "F": "floating-point numbers"}[file.mode]
        raise ValueError(
            f"it has 32-bit {kind} (Pillow's mode {file.mode}), whose range is unknown; images have 8 or 16 bits: "
            "scale it and save it with one of these"
        )
    return file


def _from_sixteen_bits(file: Image.Image) -> np.ndarray:
    """uint8 [H, W].  Pillow also opens 12-bit TIFF files in these modes, and does not invert "white is zero"."""
    tags = getattr(file, "tag_v2", {})
    if (bits := tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))) != (16,):
        raise ValueError(
            f"it has values of {bits[0]} bits; images have 8 or 16: scale it and save it with one of these"
        )
    pixels = _scaled(np.asarray(file).astype(np.uint16))
    return 255 - pixels if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0 else pixels


def _scaled(pixels: np.ndarray) -> np.ndarray:
    """uint8 unchanged; uint16 divided by 257, so that 65535 becomes 255, and rounded."""
    if pixels.dtype != np.uint16:
        return pixels
    return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _decoded(example: dict[str, Any], channels: int, max_pixels: int, legend: Legend | None) -> dict[str, Any]:
    """The example with "image" and "map", if present, as PIL images."""
    if "image" in example:
        example = {**example, "image": decode(example["image"], channels, max_pixels)}
    if "map" not in example:
        return example
    labels = decode_map(example["map"], max_pixels)
    if "image" in example and labels.size != (size := example["image"].size):
        here, there = ("{1}x{0}".format(*each) for each in (labels.size, size))
        raise MapError(f"its label map is {here} for an image of {there}; they must have the same size.")
    return {**example, "map": labels if legend is None else Image.fromarray(legend.labels(np.asarray(labels)))}
