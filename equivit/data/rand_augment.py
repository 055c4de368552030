"""RandAugment as in timm, with operations that strengthen with the magnitude ("inc1").

Each of n operations is drawn uniformly, with replacement, and applied with probability 1/2 at a magnitude drawn from a
normal distribution around m and clipped to 0..10.  Rotations and shears are bicubic.  (Cubuk et al. 2020; the
probability, the noise and the ranges are timm's.)
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

MOST = 100  # operations per image
Fill = tuple[int, ...] | int  # the colour of pixels outside the image


def _enhance(enhancer: type) -> Callable:
    def apply(image: Image.Image, level: float, sign: int, fill: Fill) -> Image.Image:
        return enhancer(image).enhance(max(0.1, 1 + sign * 0.9 * level))

    return apply


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=fill)


def _rotate(image: Image.Image, level: float, sign: int, fill: Fill) -> Image.Image:
    return image.rotate(sign * 30 * level, Image.Resampling.BICUBIC, fillcolor=fill)


def _posterize(image: Image.Image, level: float, sign: int, fill: Fill) -> Image.Image:
    mask = 256 - 2 ** (4 + int(4 * level))  # keeps 4 bits, down to 0 at full level, which PIL's posterize rejects
    return image.point([value & mask for value in range(256)] * len(image.getbands()))


def _solarize_add(image: Image.Image, level: float, sign: int, fill: Fill) -> Image.Image:
    table = [min(255, value + int(110 * level)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


# Each takes (image, level in 0..1, sign -1 or 1, fill).
OPERATIONS: dict[str, Callable[[Image.Image, float, int, Fill], Image.Image]] = {
    "auto_contrast": lambda image, level, sign, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign, fill: ImageOps.equalize(image),
    "invert": lambda image, level, sign, fill: ImageOps.invert(image),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": lambda image, level, sign, fill: ImageOps.solarize(image, 256 - int(256 * level)),
    "solarize_add": _solarize_add,
    "colour": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, level, sign, fill: _affine(image, (1, sign * 0.3 * level, 0, 0, 1, 0), fill),
    "shear_y": lambda image, level, sign, fill: _affine(image, (1, 0, 0, sign * 0.3 * level, 1, 0), fill),
    "translate_x": lambda image, level, sign, fill: _affine(
        image, (1, 0, sign * 0.45 * level * image.size[0], 0, 1, 0), fill
    ),
    "translate_y": lambda image, level, sign, fill: _affine(
        image, (1, 0, 0, 0, 1, sign * 0.45 * level * image.size[1]), fill
    ),
}


@dataclasses.dataclass(frozen=True)
class RandAugment:
    """A RandAugment policy.

    Args:
      magnitude: mean magnitude, 0..10.
      std: standard deviation of the magnitude.
      count: operations drawn per image.
      fill: colour of pixels outside the image, one value 0..255 per channel.
    """

    magnitude: float
    std: float
    count: int
    fill: tuple[int, ...]

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float, int]]:
        """Draw (name, level in 0..1, sign) of the operations to apply, in order; on average half of `count`."""
        drawn = []
        for name in rng.choice(list(OPERATIONS), self.count):
            applied, level = rng.random() < 0.5, rng.normal(self.magnitude, self.std) / 10
            sign = 1 if rng.random() < 0.5 else -1
            if applied:
                drawn.append((str(name), min(max(level, 0.0), 1.0), sign))
        return drawn

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """Apply a random draw of operations."""
        fill = self.fill[0] if len(self.fill) == 1 else self.fill
        for name, level, sign in self.draw(rng):
            image = OPERATIONS[name](image, level, sign, fill)
        return image


def parse(spec: str, fill: tuple[int, ...]) -> RandAugment:
    """The policy of a spec such as "rand-m9-mstd0.5-inc1"; n defaults to 2, m to 10, mstd to 0.

    Raises:
      ValueError: if the spec has another form, a magnitude outside 0..10, or lacks inc1.
    """
    form = "config.data.augment.rand_augment={!r} must be like 'rand-m9-mstd0.5-inc1': {}."
    head, *sections = spec.split("-")
    values = {"n": 2.0, "m": 10.0, "mstd": 0.0, "inc": 0.0}
    if head != "rand":
        raise ValueError(form.format(spec, f"it begins with {head!r}, not 'rand'"))
    for section in sections:
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", section)
        if match is None or match[1] not in values:
            raise ValueError(form.format(spec, f"{section!r} is not n, m, mstd or inc with a number"))
        values[match[1]] = float(match[2])
    if values["inc"] != 1:
        raise ValueError(form.format(spec, "only operations that grow with the magnitude are implemented: add '-inc1'"))
    if values["m"] > 10 or values["mstd"] > 10 or not values["n"].is_integer() or not 1 <= values["n"] <= MOST:
        raise ValueError(form.format(spec, f"m and mstd must be in 0..10, and n a whole number in 1..{MOST}"))
    return RandAugment(values["m"], values["mstd"], int(values["n"]), fill)
