"""Colours of classes: the same in every picture, and as different as possible."""

import functools

import numpy as np

VOID = (0.5, 0.5, 0.5)  # pixels without a class
LEVELS = np.linspace(0, 1, 16)  # of red, green and blue
LIGHTNESS, CHROMA = (0.4, 0.88), (0.06, 0.19)  # OKLab ranges for classes: not black, white, grey or glaring


def of_classes(number: int) -> np.ndarray:
    """The colours of classes 0..number - 1, float64 [number, 3] of red, green and blue in 0..1.

    Each colour is perceptually farthest from all earlier colours and from grey, black and white.
    """
    colours, seen = _candidates()
    taken = _oklab(np.array([VOID, (0, 0, 0), (1, 1, 1)]))
    gap = np.linalg.norm(seen[:, None] - taken, axis=-1).min(1)
    selected = []
    for _ in range(number):
        selected.append(int(gap.argmax()) if gap.max() else len(selected) % len(gap))  # all used: repeat from the first
        gap = np.minimum(gap, np.linalg.norm(seen - seen[selected[-1]], axis=-1))
    return colours[selected]


@functools.cache
def _candidates() -> tuple[np.ndarray, np.ndarray]:
    """The candidate colours, and their coordinates in OKLab."""
    colours = np.stack(np.meshgrid(LEVELS, LEVELS, LEVELS, indexing="ij"), -1).reshape(-1, 3)
    seen = _oklab(colours)
    lightness, chroma = seen[:, 0], np.hypot(seen[:, 1], seen[:, 2])
    fits = (np.clip(lightness, *LIGHTNESS) == lightness) & (np.clip(chroma, *CHROMA) == chroma)
    return colours[fits], seen[fits]


def _oklab(colours: np.ndarray) -> np.ndarray:
    """sRGB [*, 3] to OKLab, whose distances match perception (B. Ottosson, 2020)."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    opponents = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return np.cbrt(linear @ cones.T) @ opponents.T
