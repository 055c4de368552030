"""The contents of the tests' sources, and what comes out of them."""

import io

import numpy as np
from PIL import Image

from equivit.data import reading


def jpeg(value, size=(9, 7)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


def png(pixels, palette=False):
    """The bytes of a PNG file; with a palette whose colours have nothing to do with the indices."""
    image, buffer = Image.fromarray(np.asarray(pixels, np.uint8)), io.BytesIO()
    if palette:
        image = image.convert("P")
        image.putpalette(np.random.default_rng(0).bytes(768))
    image.save(buffer, "PNG")
    return buffer.getvalue()


def labels_of(source):
    return [source[i]["label"] for i in range(len(source))]


def values_of(source):
    """The grey level of the first pixel of each image, as read."""
    return [reading.read(source, i, 1).example["image"].getpixel((0, 0)) for i in range(len(source))]
