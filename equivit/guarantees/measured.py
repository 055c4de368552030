"""How often the predictions of a model change when images turn, are mirrored, shift, or turn by any angle.

The prediction of a classifier is its best class.  For a model without classes it is the nearest of all images by its
pooled features: for a symmetric model, the image itself.  The cosine is between the logits, or the pooled features, of
an image before and after.
"""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from equivit import precision
from equivit.data.pixels import normalize
from equivit.evaluation.protocol import offers
from equivit.guarantees.motions import Motion, Shift, turns
from equivit.guarantees.proof import output
from equivit.models.model import ModelModule

BATCH = 32
SHIFTS = 8  # random circular shifts
STEP = 15  # degrees
FINE = 2  # images are enlarged by this factor while they turn
Vectors = Callable[[np.ndarray], np.ndarray]


class Change(NamedTuple):
    """The effect of a motion.

    Attributes:
      changed: the share of images whose prediction changes.
      cosine: the mean cosine between the outputs before and after.
    """

    changed: float
    cosine: float


class Stability(NamedTuple):
    """The changes on some images.

    Attributes:
      by_class: whether a prediction is a class; otherwise it is the nearest image.
      images: number of images.
      motions: by the name of the motion.
      groups: the mean over "turns", "mirrors" and "shifts".
      angles: by the angle in degrees, from 0 to 360, of images inside a disc.
    """

    by_class: bool
    images: int
    motions: dict[str, Change]
    groups: dict[str, Change]
    angles: dict[int, Change]


def check(model: ModelModule) -> None:
    """Raise ValueError for a segmenter."""
    if "maps" in offers(model):
        raise ValueError(
            "--images is for classifiers and features; for label maps use python -m equivit.evaluate "
            "--suite=segmentation_orientation,segmentation_shift."
        )


def measure(
    model: ModelModule,
    images: np.ndarray,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    *,
    at: str = "float32",
    square: bool = True,
) -> Stability:
    """Compare the predictions for images uint8 [N, H, W, C] with the predictions for moved ones.

    Args:
      mean, std: per channel (or one for all), of pixel values in 0..1.
      at: the precision of the model.
      square: whether the model takes images with swapped sides.

    Raises ValueError for a segmenter, or if outputs are not finite.
    """
    check(model)
    vectors = functools.partial(_vectors, functools.partial(_run, tuple(mean), tuple(std), precision.cast(model, at)))
    by_class = "logits" in offers(model)
    upright, groups = vectors(images), {}
    compare = functools.partial(_change, by_class)
    for name, motions in _motions(images.shape[1:3], square).items():
        groups[name] = {motion.name: compare(vectors(motion.of_images(images)), upright) for motion in motions}
    fill = tuple(round(255 * value) for value in mean)
    upright, angles = None, {}
    for angle in range(0, 360, STEP):
        found = vectors(turned(images, angle, fill))
        upright = found if upright is None else upright
        angles[angle] = compare(found, upright)
    angles[360] = angles[0]
    means = {name: Change(*np.mean(list(group.values()), 0).tolist()) for name, group in groups.items()}
    each = {motion: change for group in groups.values() for motion, change in group.items()}
    return Stability(by_class, len(images), each, means, angles)


def turned(images: np.ndarray, angle: int, fill: tuple[int, ...]) -> np.ndarray:
    """Turn the inscribed disc of images uint8 [N, H, W, C] anti-clockwise, antialiased, over a plain colour.

    Quarter turns move pixels without interpolation, so they commute with all other angles.
    """
    height, width, channels = images.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    centre = images[:, top : top + side, left : left + side]
    with ThreadPoolExecutor() as pool:
        fine = np.stack(list(pool.map(functools.partial(_interpolated, angle=angle % 90), centre)))
    share = _disc(side)[..., None]
    colour = np.broadcast_to(np.array(fill, float), channels)
    disc = np.rot90(share * fine.reshape(len(images), side, side, channels) + (1 - share) * colour, angle // 90, (1, 2))
    canvas = np.tile(colour, (*images.shape[:3], 1))
    canvas[:, top : top + side, left : left + side] = disc
    return np.round(canvas).astype(np.uint8)


def _interpolated(pixels: np.ndarray, angle: int) -> np.ndarray:
    """Turn one square image by less than a quarter, at a higher resolution against aliasing."""
    side = len(pixels)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    large = image.resize((FINE * side, FINE * side), Image.Resampling.BICUBIC)
    return np.asarray(large.rotate(angle, Image.Resampling.BICUBIC).resize((side, side), Image.Resampling.BOX))


def _disc(side: int) -> np.ndarray:
    """The share of each pixel inside the disc, [side, side]."""
    at = np.arange(side) - (side - 1) / 2
    return np.clip(side / 2 - 0.5 - np.hypot(at[:, None], at), 0, 1)


def _motions(size: tuple[int, int], square: bool) -> dict[str, list[Motion]]:
    """Turns, mirrors and random shifts, without the identity."""
    elements = [turn for turn in turns(square) if turn.element != "e"]
    offsets = np.random.default_rng(0).integers(1, size, (SHIFTS, 2)).tolist()
    return {
        "turns": [turn for turn in elements if "m" not in turn.element],
        "mirrors": [turn for turn in elements if "m" in turn.element],
        "shifts": [Shift((down, right)) for down, right in offsets],
    }


def _vectors(run: Callable[[np.ndarray], jax.Array], images: np.ndarray) -> np.ndarray:
    """The outputs [N, features] for images, in batches of one size."""
    rows = np.concatenate([np.asarray(run(batch))[:count] for batch, count in _batches(images)])
    if not np.isfinite(rows).all():
        raise ValueError("symmetry: the model's outputs are NaN or infinite; check its parameters and data.std.")
    return rows


def _batches(images: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield batches, the last one padded, with their number of images."""
    size = min(BATCH, len(images))
    for first in range(0, len(images), size):
        batch = images[first : first + size]
        yield np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), 0)]), len(batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(mean, std, model, images):
    return output(model, normalize(images, mean, std)).astype(jnp.float32)


def _change(by_class: bool, found: np.ndarray, upright: np.ndarray) -> Change:
    ours, theirs = (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30) for rows in (found, upright))
    if by_class:
        same = found.argmax(-1) == upright.argmax(-1)
    else:
        near = ours @ theirs.T
        same = near.max(-1) - near.diagonal() < 1e-6  # equal images are equally near
    return Change(float(1 - same.mean()), float((ours * theirs).sum(-1).mean()))
