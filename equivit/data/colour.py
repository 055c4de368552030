"""Colour changes for the views of DINOv2: jitter with hue, grey, blur, solarise, as in torchvision for PIL images.

Drawing is separate from the pixels: `draw` draws the changes of one crop, `changed` applies them, and `packed` encodes
them as numbers for the accelerator (`device_colour.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance

from equivit.data import crops

REACH = 4  # pixels that the blur reads on each side: nine taps
SIGMAS = (0.1, 2.0)  # of the blur, in pixels
STEPS = 4096  # factors are multiples of 1/4096, for which float32 is exact on 8 bits, on host and device


class Rates(NamedTuple):
    """Strengths and probabilities of the changes of a crop.

    Attributes:
      jitter: strengths of brightness, contrast and saturation (factors are uniform in 1 -+ strength) and of hue (its
        shift is uniform in -+ strength, as a share of the circle); 0 means no change.
      jitter_rate, grey, blur, solarise: probabilities of each change.
    """

    jitter: tuple[float, float, float, float]
    jitter_rate: float
    grey: float
    blur: float
    solarise: float


class Changes(NamedTuple):
    """The changes of one crop, in this order.

    Attributes:
      jitter: (name in JITTERS, value) in the order to apply; empty for none.
      grey: whether to convert to grey (ITU-R 601).
      sigma: standard deviation of the Gaussian blur, in pixels; 0 for none.
      solarise: whether to invert values of 128 and above.
    """

    jitter: tuple[tuple[str, float], ...] = ()
    grey: bool = False
    sigma: float = 0.0
    solarise: bool = False


def draw(rng: np.random.Generator, rates: Rates) -> Changes:
    """Draw the changes of one crop; jitter steps come in random order."""
    jittered, grey, blurs, width, solarises, *rest = rng.random(5 + 2 * MOST).tolist()  # one call is much faster
    jitter = ()
    if jittered < rates.jitter_rate:
        values, ranks = rest[:MOST], dict(zip(JITTERS, rest[MOST:], strict=True))
        jitter = tuple(sorted(_jitter(values, rates.jitter), key=lambda step: ranks[step[0]]))
    sigma = SIGMAS[0] + (SIGMAS[1] - SIGMAS[0]) * width if blurs < rates.blur else 0.0
    return Changes(jitter, grey < rates.grey, sigma, solarises < rates.solarise)


def _jitter(uniform: list[float], strengths: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    """The jitter steps in their usual order, from numbers in 0..1."""
    for name, share, strength in zip(JITTERS, uniform, strengths, strict=True):
        low, high = (-strength, strength) if name == "hue" else (max(0.0, 1 - strength), 1 + strength)
        if strength:
            yield name, round((low + (high - low) * share) * STEPS) / STEPS


def packed(drawn: Sequence[Changes]) -> np.ndarray:
    """Encode the changes of V crops as numbers, float32 [V, 11].

    Four indices into JITTERS in the order to apply, -1 for none, and four values; then grey (0 or 1), sigma, solarise.
    """
    rows = []
    for changes in drawn:
        none = [-1.0] * (MOST - len(changes.jitter))
        indices = [PLACES[name] for name, _ in changes.jitter]
        values = [value for _, value in changes.jitter]
        rows.append([*indices, *none, *values, *none, changes.grey, changes.sigma, changes.solarise])
    return np.array(rows, np.float32)


def changed(image: Image.Image, changes: Changes) -> np.ndarray:
    """Apply changes to an image of mode L or RGB -> uint8 [H, W, C]."""
    for name, value in changes.jitter:
        image = JITTERS[name](image, value)
    if changes.grey:
        image = image.convert("L").convert(image.mode)
    pixels = crops.pixels(image)
    if changes.sigma:
        pixels = blurred(pixels, changes.sigma)
    return np.minimum(pixels, 255 - pixels) if changes.solarise else pixels


def blurred(pixels: np.ndarray, sigma: float) -> np.ndarray:
    """A Gaussian blur of nine taps along each axis, with reflected borders, rounded once at the end.

    Pillow's blur approximates with boxes and differs by several grey levels.

    Shapes: uint8 [H, W, C] -> the same.
    """
    weights = np.exp(-0.5 * (np.arange(REACH + 1) / sigma) ** 2)  # of pixels at distances 0, ..., 4
    weights = (weights / (2 * weights.sum() - 1)).astype(np.float32)  # all nine taps sum to 1
    weights = weights[weights > np.finfo(np.float32).epsneg / 2]  # smaller weights change no sum
    reach, (height, width, channels) = len(weights) - 1, pixels.shape
    padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), mode="reflect").astype(np.float32)
    rows = _weighted(padded.reshape(len(padded), -1), weights, 1, height)
    columns = _weighted(rows.T, weights, channels, width * channels).T
    return np.rint(columns).astype(np.uint8).reshape(pixels.shape)


def _weighted(values: np.ndarray, weights: np.ndarray, stride: int, length: int) -> np.ndarray:
    """`length` symmetric weighted sums along the first axis, over neighbours `stride` apart."""
    reach = len(weights) - 1
    shifted = [values[k * stride : k * stride + length] for k in range(2 * reach + 1)]
    total = weights[0] * shifted[reach]
    pair = np.empty_like(total)
    for k in range(1, reach + 1):
        np.add(shifted[reach - k], shifted[reach + k], out=pair)
        pair *= weights[k]
        total += pair
    return total


def _turned(image: Image.Image, share: float) -> Image.Image:
    """Rotate the hue of an image, in 8 bits with wrap-around."""
    if image.mode == "L":
        return image
    shift = int(share * 255)  # in Pillow's units of a 256th of the circle
    hues = [(hue + shift) % 256 for hue in range(256)]
    return image.convert("HSV").point([*hues, *range(256), *range(256)]).convert("RGB")


def _enhancing(enhancer: type) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: enhancer(image).enhance(factor)


JITTERS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": _enhancing(ImageEnhance.Brightness),
    "contrast": _enhancing(ImageEnhance.Contrast),
    "saturation": _enhancing(ImageEnhance.Color),
    "hue": _turned,
}
PLACES = {name: place for place, name in enumerate(JITTERS)}
MOST = len(JITTERS)  # steps of a jitter
