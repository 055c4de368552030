"""Crops and resizing of one image.

Random numbers are drawn separately from the pixels: as boxes, so that tests can check their distribution, and as whole
crop functions, so that an image and its label map are cropped alike.  PIL resizes images with antialiasing, in random
crops bicubic as in the recipes, and maps (PIL images of mode I) by nearest neighbour.  An image of the target size is
returned as is.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from equivit import errors

Geometry = Callable[[Image.Image], Image.Image]  # for images and maps of the size it was drawn for
Range = tuple[float, float]

PADDING = 4  # pixels on each side, in the simple random crop (DeiT III) and the padded crop (CIFAR)
TRIES = 10  # attempts at a crop without a dominant class
ORIENTATIONS = (None, *Image.Transpose)  # all eight of a square
VOID = -1  # the label of map pixels without a class or outside the image
INTERPOLATIONS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
FILTERS = {**INTERPOLATIONS, "lanczos": Image.Resampling.LANCZOS, "nearest": Image.Resampling.NEAREST}  # last: aliased


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int


def is_map(image: Image.Image) -> bool:
    """Whether the pixels are labels, which cannot be interpolated."""
    return image.mode == "I"


def pixels(image: Image.Image) -> np.ndarray:
    """The pixels of an image, [H, W, C]."""
    values = np.asarray(image)
    return values if values.ndim == 3 else values[..., None]


def resize(image: Image.Image, height: int, width: int, filter: str = "bicubic") -> Image.Image:
    """Resize to exactly this size by one of FILTERS, else ValueError; maps (`is_map`) always by nearest neighbour."""
    errors.one_of("resize: filter", filter, FILTERS)
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.NEAREST if is_map(image) else FILTERS[filter])


def cut(image: Image.Image, box: Box) -> Image.Image:
    """The pixels in the box."""
    if image.size == (box.width, box.height):
        return image
    return image.crop((box.left, box.top, box.left + box.width, box.top + box.height))


def draw_orientation(rng: np.random.Generator, flip: float, octic: bool) -> Image.Transpose | None:
    """Draw a left-right flip with probability `flip`, or if `octic` one of ORIENTATIONS; None for no change."""
    if octic:
        return ORIENTATIONS[rng.integers(len(ORIENTATIONS))]
    return Image.Transpose.FLIP_LEFT_RIGHT if rng.random() < flip else None


def oriented(image: Image.Image, orientation: Image.Transpose | None) -> Image.Image:
    """The image in the given orientation."""
    return image if orientation is None else image.transpose(orientation)


def random_resized_box(rng: np.random.Generator, height: int, width: int, scale: Range, ratio: Range) -> Box:
    """A box with a uniform fraction of the area in `scale` and log-uniform aspect ratio (width / height) in `ratio`.

    After ten boxes that do not fit, it is the largest centred box with an aspect ratio in `ratio`, as in torchvision.
    """
    for _ in range(10):
        box_height, box_width = draw_sides(rng, height, width, scale, ratio)
        if 0 < box_height <= height and 0 < box_width <= width:
            return random_box(rng, height, width, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_height, box_width = min(height, round(width / aspect)), min(width, round(height * aspect))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def clipped_random_box(rng: np.random.Generator, height: int, width: int, scale: Range, ratio: Range) -> Box:
    """As `random_resized_box`, but drawn once and clipped to the image (MAE's linear probe)."""
    box_height, box_width = draw_sides(rng, height, width, scale, ratio)
    return random_box(rng, height, width, min(max(box_height, 1), height), min(max(box_width, 1), width))


def draw_sides(rng: np.random.Generator, height: int, width: int, scale: Range, ratio: Range) -> tuple[int, int]:
    """Height and width of a box of uniform area and log-uniform aspect ratio; it may be larger than the image."""
    area = height * width * rng.uniform(*scale)
    aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))


def random_box(rng: np.random.Generator, height: int, width: int, box_height: int, box_width: int) -> Box:
    """A box of the given size at a uniformly random position."""
    top = int(rng.integers(height - box_height + 1))
    left = int(rng.integers(width - box_width + 1))
    return Box(top, left, box_height, box_width)


def covering(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    """The smallest (height, width) that covers height x width with the aspect of `size`, PIL's (width, height)."""
    old_width, old_height = size
    if height * old_width >= width * old_height:
        return height, height * old_width // old_height
    return width * old_height // old_width, width


def enlarged(height: int, width: int, ratio: float) -> tuple[int, int]:
    """(height, width) divided by `ratio`."""
    return int(height / ratio), int(width / ratio)


def fitted(size: tuple[int, int], fit: tuple[int, int] | None, ratio: float = 1.0) -> tuple[int, int]:
    """The largest (height, width) within `ratio` times `fit`, with the aspect ratio of `size`, PIL's (width, height).

    `fit` bounds the longer and the shorter side (MMSegmentation's scale); None: the image's sides.
    """
    sides = sorted(size, reverse=True)
    factor = min(int(most * ratio) / side for most, side in zip(fit or sides, sides, strict=True))
    width, height = (max(1, int(side * factor + 0.5)) for side in size)
    return height, width


def rounded_up(height: int, width: int, multiple: int) -> tuple[int, int]:
    """(height, width) with each side rounded up to the next multiple."""
    return -(-height // multiple) * multiple, -(-width // multiple) * multiple


def central(image: Image.Image, height: int, width: int, ratio: float, interpolation: str = "bicubic") -> Image.Image:
    """Resize to cover the enlarged size, keeping the aspect ratio, and crop height x width from the centre."""
    image = resize(image, *covering(image.size, *enlarged(height, width, ratio)), interpolation)
    return cut(image, Box(round((image.height - height) / 2), round((image.width - width) / 2), height, width))


def random_resized_crop(
    rng: np.random.Generator,
    size: tuple[int, int],
    height: int,
    width: int,
    *,
    scale: Range,
    ratio: Range,
    clipped: bool = False,
) -> Geometry:
    """Crop a random part and resize it to height x width (Inception crop).

    Args:
      size: of the image, PIL's (width, height).
      scale, ratio: area and aspect ratio of the part (`random_resized_box`).
      clipped: whether to draw the part once and clip it (`clipped_random_box`).
    """
    draw = clipped_random_box if clipped else random_resized_box
    box = draw(rng, size[1], size[0], scale, ratio)
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
    """The CIFAR crop: resize, add 4 black (or void) pixels at each border, crop at a random position."""
    box = random_box(rng, height + 2 * PADDING, width + 2 * PADDING, height, width)
    return lambda image: cut(ImageOps.expand(resize(image, height, width), PADDING, VOID if is_map(image) else 0), box)


def scaled_crop(
    rng: np.random.Generator,
    image: Image.Image,
    height: int,
    width: int,
    *,
    fit: tuple[int, int] | None,
    ratio: tuple[float, float],
    interpolation: str,
    labels: Image.Image | None = None,
    max_share: float = 1.0,
) -> Geometry:
    """MMSegmentation's crop: resize by a random factor, then crop at most height x width at a random position.

    Smaller images stay smaller (`padded`).  Unlike MMSegmentation, which resizes with OpenCV, this antialiases images.

    Args:
      fit, ratio: the image is resized to `fitted(size, fit, r)`, with r uniform in `ratio`.
      labels: the image's label map.
      max_share: the largest share of one class among the labelled pixels of a crop; after ten crops above it, the
        eleventh is taken.
    """
    resized = fitted(image.size, fit, rng.uniform(*ratio))
    box = random_box(rng, *resized, min(height, resized[0]), min(width, resized[1]))
    if labels is not None and max_share < 1:
        scaled = resize(labels, *resized)
        for _ in range(TRIES):
            if largest_share(np.asarray(cut(scaled, box))) <= max_share:
                break
            box = random_box(rng, *resized, box.height, box.width)
    return lambda image: cut(resize(image, *resized, interpolation), box)


def largest_share(labels: np.ndarray) -> float:
    """The share of the most frequent class among the labelled pixels; 1 if there is none."""
    counts = np.bincount(labels[labels != VOID])
    return float(counts.max() / counts.sum()) if counts.size else 1.0


def padded(image: Image.Image, height: int, width: int, fill: tuple[int, ...]) -> Image.Image:
    """Pad to height x width at the bottom and right: an image with a colour, a map with VOID."""
    below, right = max(0, height - image.size[1]), max(0, width - image.size[0])
    if not below and not right:
        return image
    return ImageOps.expand(image, (0, 0, right, below), VOID if is_map(image) else fill)
