"""Geometry of one image: where to crop and how to resize.

Random numbers are drawn separately from the pixels: as boxes, so that their distribution can be tested, and as whole
crop functions, so that an image and its label map are cropped alike.  Images are resized with PIL's antialiased
bicubic, as in the recipes, and maps (PIL images of mode I) by nearest neighbour; an image that already has the target
size is not resampled.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

Geometry = Callable[[Image.Image], Image.Image]  # for images and maps of the size that it was drawn for

PADDING = 4  # pixels on each side, in the simple random crop (DeiT III) and the padded crop (CIFAR)
VOID = -1  # the label of map pixels outside the image


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def is_map(image: Image.Image) -> bool:
    """Whether the pixels are labels, which cannot be interpolated."""
    return image.mode == "I"


def resize(image: Image.Image, height: int, width: int) -> Image.Image:
    """Antialiased bicubic, or nearest neighbour for a map; the image itself if it has that size."""
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.NEAREST if is_map(image) else Image.Resampling.BICUBIC)


def cut(image: Image.Image, box: Box) -> Image.Image:
    """The pixels in the box."""
    if image.size == (box.width, box.height):
        return image
    return image.crop((box.left, box.top, box.left + box.width, box.top + box.height))


def flip(image: Image.Image) -> Image.Image:
    """The image mirrored left to right."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def random_resized_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """A box with a uniform fraction of the area in `scale` and log-uniform aspect ratio (width / height) in `ratio`.

    After ten boxes that do not fit, as in torchvision, the largest centred box whose aspect ratio is in `ratio`.
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
    """A box of the given size at a uniformly random position."""
    top = int(rng.integers(height - box_height + 1))
    left = int(rng.integers(width - box_width + 1))
    return Box(top, left, box_height, box_width)


def covering(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The smallest (height, width) that covers height x width, with the aspect of `size`, PIL's (width, height)."""
    old_width, old_height = size
    if height * old_width >= width * old_height:
        return height, height * old_width // old_height
    return width * old_height // old_width, width


def cover(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resized to the smallest size that covers height x width, with the aspect ratio kept."""
    return resize(image, *covering(image.size, height, width))


def centre(image: Image.Image, height: int, width: int) -> Image.Image:
    """The central height x width pixels."""
    top, left = round((image.size[1] - height) / 2), round((image.size[0] - width) / 2)
    return cut(image, Box(top, left, height, width))


def random_resized_crop(
    rng: np.random.Generator,
    size: tuple[int, int],
    height: int,
    width: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Geometry:
    """A random part, resized to height x width (Inception crop).  `size` is PIL's, (width, height)."""
    box = random_resized_box(rng, size[1], size[0], scale, ratio)
    return lambda image: resize(cut(image, box), height, width)


def simple_random_crop(rng: np.random.Generator, size: tuple[int, int], height: int, width: int) -> Geometry:
    """DeiT III's milder crop: cover the size, reflect 4 pixels at each border, crop at a random position."""
    covered = covering(size, height, width)
    box = random_box(rng, covered[0] + 2 * PADDING, covered[1] + 2 * PADDING, height, width)

    def crop(image: Image.Image) -> Image.Image:
        pixels = np.asarray(resize(image, *covered))
        margins = ((PADDING, PADDING), (PADDING, PADDING)) + ((0, 0),) * (pixels.ndim - 2)
        return cut(Image.fromarray(np.pad(pixels, margins, mode="reflect")), box)

    return crop


def padded_crop(rng: np.random.Generator, height: int, width: int) -> Geometry:
    """The CIFAR crop: resize to the size, add 4 black (or void) pixels at each border, crop at a random position."""
    box = random_box(rng, height + 2 * PADDING, width + 2 * PADDING, height, width)
    return lambda image: cut(ImageOps.expand(resize(image, height, width), PADDING, VOID if is_map(image) else 0), box)
