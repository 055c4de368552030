"""Augmentations of one image that keep its geometry, random erasing, and circular shifts."""

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from equivit.data.crops import Box, draw_sides, random_box

ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)  # Color is saturation


def three_augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """3-Augment (DeiT III, section 3): always one of greyscale, solarise and blur, with equal probability.

    Solarise inverts values of 128 and above; the radius of the Gaussian blur is uniform in (0.1, 2).
    """
    choice = rng.integers(3)
    if choice == 0:
        return image.convert("L").convert(image.mode)
    if choice == 1:
        return ImageOps.solarize(image, 128)
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))


def draw_jitter(rng: np.random.Generator, strength: float) -> list[tuple[int, float]]:
    """(index into ENHANCERS, factor) in the order to apply: a random order, factors uniform in 1 -+ strength."""
    low, high = max(0.0, 1 - strength), 1 + strength
    return [(int(index), rng.uniform(low, high)) for index in rng.permutation(len(ENHANCERS))]


def colour_jitter(image: Image.Image, rng: np.random.Generator, strength: float) -> Image.Image:
    """Change brightness, contrast and saturation in random order, as torchvision does."""
    for index, factor in draw_jitter(rng, strength):
        image = ENHANCERS[index](image).enhance(factor)
    return image


def draw_distortion(rng: np.random.Generator) -> list[tuple[str, float]]:
    """(name in DISTORTIONS, value) in the order to apply; each is left out with probability 1/2.

    Brightness, saturation and hue, with contrast either before or after the last two, as in MMSegmentation.
    """
    colour = [("saturation", rng.uniform(0.5, 1.5)), ("hue", rng.uniform(-36.0, 36.0))]
    contrast = [("contrast", rng.uniform(0.5, 1.5))]
    order = contrast + colour if rng.random() < 0.5 else colour + contrast
    steps = [("brightness", rng.uniform(-32.0, 32.0)), *order]
    return [step for step in steps if rng.random() < 0.5]


def photometric_distortion(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Change brightness, contrast, saturation and hue, as in MMSegmentation's training on ADE20K.

    MMSegmentation moves the hue by up to 18 of OpenCV's two-degree units and truncates to 8 bits after each step; this
    code clips after each step and rounds once.
    """
    pixels = np.asarray(image).astype(np.float32)
    planes = pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    for name, value in draw_distortion(rng):
        planes = np.clip(DISTORTIONS[name](planes, value), 0, 255)
    planes = np.round(planes).astype(np.uint8)
    return Image.fromarray(planes[0] if pixels.ndim == 2 else np.ascontiguousarray(planes.transpose(1, 2, 0)))


def _saturated(planes: np.ndarray, factor: float) -> np.ndarray:
    """Multiply the HSV saturation, (max - min) / max, by a factor, up to 1; keep max and hue."""
    value = planes.max(0)
    most = value / np.maximum(value - planes.min(0), 1e-6)  # 1 / saturation
    return value - np.minimum(factor, most) * (value - planes)


def _turned(planes: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate the HSV hue.  Each channel is high for 120 degrees, falls over 60, is low for 120, rises over 60."""
    if len(planes) == 1:
        return planes
    red, green, blue = planes
    value, least = planes.max(0), planes.min(0)
    chroma = value - least
    sixths = np.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    sixths = np.where(value == red, green - blue, sixths) / np.maximum(chroma, 1e-6)
    hue = (sixths + degrees / 60) % 6
    highs = (np.abs(hue - 3) - 1, 2 - np.abs(hue - 2), 2 - np.abs(hue - 4))
    return np.stack([least + chroma * np.clip(high, 0, 1) for high in highs])


# Functions of float32 [C, H, W], C = 1 or 3.
DISTORTIONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "brightness": lambda planes, delta: planes + delta,
    "contrast": lambda planes, factor: planes * factor,
    "saturation": _saturated,
    "hue": _turned,
}


def erasing_box(rng: np.random.Generator, height: int, width: int) -> Box | None:
    """A box of 1/50 to 1/3 of the area and log-uniform aspect ratio in (0.3, 1/0.3); None if ten boxes do not fit."""
    for _ in range(10):
        box_width, box_height = draw_sides(rng, height, width, (0.02, 1 / 3), (0.3, 1 / 0.3))
        if box_height < height and box_width < width:
            return random_box(rng, height, width, box_height, box_width)
    return None


def random_erasing(
    pixels: np.ndarray, rng: np.random.Generator, probability: float, mean: np.ndarray, std: np.ndarray
) -> np.ndarray:
    """With the given probability, fill a random box with noise (timm's "pixel" mode).

    The noise is standard normal after normalisation by mean and std (of pixel values in 0..1).  Values outside 0..255
    are clipped, since images stay uint8.

    Shapes: pixels uint8 [H, W, C], mean and std [C] -> uint8 [H, W, C].
    """
    if rng.random() >= probability:
        return pixels
    box = erasing_box(rng, *pixels.shape[:2])
    if box is None:
        return pixels
    noise = mean + std * rng.standard_normal((box.height, box.width, pixels.shape[-1]))
    pixels = pixels.copy()
    pixels[box.top : box.top + box.height, box.left : box.left + box.width] = np.clip(np.round(255 * noise), 0, 255)
    return pixels


def circular_shift(row: dict[str, Any], rng: np.random.Generator, largest: float) -> dict[str, Any]:
    """Roll the row's "image" [H, W, C], and its "map" [H, W] if present, by the same offset.

    The offset is uniform between -m and m along each axis, where m is the fraction `largest` of the side.
    """
    offset = [int(rng.integers(-most, most + 1)) for most in (round(largest * n) for n in row["image"].shape[:2])]
    rolled = {name: np.roll(row[name], offset, axis=(0, 1)) for name in ("image", "map") if name in row}
    return row | rolled
