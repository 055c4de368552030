"""Geometry of one image: where to crop and how to resize.

Boxes are drawn apart from the images they cut, so that their distribution can be tested alone.  Resizing is PIL's
bicubic with antialiasing, as in the recipes; an image that already has the size asked for is not resampled.
"""

import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

PADDING = 4  # pixels on each side, in the simple random crop (DeiT III) and the padded crop (CIFAR)


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def resize(image: Image.Image, height: int, width: int) -> Image.Image:
    """Bicubic, antialiased; the image itself if it has that size."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def cut(image: Image.Image, box: Box) -> Image.Image:
    """The pixels in the box."""
    if image.size == (box.width, box.height):
        return image
    return image.crop((box.left, box.top, box.left + box.width, box.top + box.height))


def random_resized_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """A box of a uniform share of the area in `scale` and log-uniform aspect (width / height) in `ratio`.

    Ten tries to find one that fits, as torchvision does; then the largest centred box whose aspect is in `ratio`.
    """
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_height, box_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < box_height <= height and 0 < box_width <= width:
            return random_box(rng, height, width, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_height, box_width = min(height, round(width / aspect)), min(width, round(height * aspect))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def random_box(rng: np.random.Generator, height: int, width: int, box_height: int, box_width: int) -> Box:
    """A box of the given size at a uniform place."""
    top = int(rng.integers(height - box_height + 1))
    left = int(rng.integers(width - box_width + 1))
    return Box(top, left, box_height, box_width)


def cover(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resized with its aspect kept, as small as possible such that height x width fits in it."""
    old_width, old_height = image.size
    if height * old_width >= width * old_height:
        return resize(image, height, height * old_width // old_height)
    return resize(image, width * old_height // old_width, width)


def centre(image: Image.Image, height: int, width: int) -> Image.Image:
    """The central height x width pixels."""
    top, left = round((image.size[1] - height) / 2), round((image.size[0] - width) / 2)
    return cut(image, Box(top, left, height, width))


def random_resized_crop(
    image: Image.Image,
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Image.Image:
    """A random part of the image, resized to height x width (Inception crop)."""
    box = random_resized_box(rng, image.size[1], image.size[0], scale, ratio)
    return resize(cut(image, box), height, width)


def simple_random_crop(image: Image.Image, rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """DeiT III's milder crop: cover the size, reflect 4 pixels at each border, cut at a random place."""
    pixels = np.asarray(cover(image, height, width))
    margins = ((PADDING, PADDING), (PADDING, PADDING)) + ((0, 0),) * (pixels.ndim - 2)
    padded = Image.fromarray(np.pad(pixels, margins, mode="reflect"))
    return cut(padded, random_box(rng, padded.size[1], padded.size[0], height, width))


def padded_crop(image: Image.Image, rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """The CIFAR crop: resize to the size, add 4 black pixels at each border, cut at a random place."""
    padded = ImageOps.expand(resize(image, height, width), PADDING)
    return cut(padded, random_box(rng, padded.size[1], padded.size[0], height, width))
