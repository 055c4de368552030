"""Shift consistency: how often a classifier predicts the same class for two shifted copies of an image.

    consistency = mean_i c_i,    c_i = the share of pairs (D1, D2) with argmax f(S^D1 x_i) = argmax f(S^D2 x_i)
    standard error = sqrt(mean_i (c_i - consistency)^2 / N), of N images

With one pair c_i is 0 or 1, and the standard error is binomial, sqrt(c (1 - c) / N).

| kind       | S^D x                                              | offsets in a range of M | in the paper     |
|------------|----------------------------------------------------|-------------------------|------------------|
| "circular" | pixels that leave on one side enter on the other   | 0 to M pixels           | C-Cons           |
| "zeros"    | pixels that enter have the mean colour             | -M/2 to M/2             | S-Cons, CIFAR    |
| "crop"     | another crop of a larger image                     | -M/2 to M/2             | S-Cons, ImageNet |

M is the largest distance between two copies along each axis.  Offsets are uniform and independent.

Sources: "Making Vision Transformers Truly Shift-Equivariant" (arXiv 2305.16316), Eq. 25, Section 5 and Table A11; for
crops, Zhang (arXiv 1904.11486).
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import constraints, errors
from equivit.constraints import NonNegativeInt, OneOf, PositiveInt, Seed
from equivit.data.order import SHIFTS
from equivit.evaluation.classification import hits
from equivit.evaluation.predictions import Batch, Predict, by_example
from equivit.symmetry import shifts

Size = tuple[int, int]  # (height, width)
KINDS = ("circular", "zeros", "crop")
FRACTIONS = {"quarter": 1 / 4, "half": 1 / 2, "three_quarters": 3 / 4, "full": 1.0}
EARLIER = {"lps_imagenet": 32, "lps_cifar": 3}  # pixels
EARLIER_SEED = 7
Range = Annotated[str, OneOf((*FRACTIONS, *EARLIER))] | PositiveInt | tuple[NonNegativeInt, NonNegativeInt]


@dataclasses.dataclass(frozen=True)
class Shifts:
    """The shifts to compare.

    FRACTIONS are the ranges of Table A11, the only ones in the paper.  EARLIER is the protocol of the authors' earlier
    code (learnable polyphase sampling, arXiv 2210.08001).  Its offsets run from -m to m - 1, for crops from 0 to m - 1
    from the upper left corner; zeros enter after normalisation.  It shifts all images of a batch alike, so the result
    depends on the batch size, and the standard error, which assumes independent images, is too small.  The seed is 7;
    the original has none on CIFAR.  On ImageNet its circular shifts use all 256 x 256 pixels
    (data.image_size=(256,256), data.crop_ratio=1.0).

    Raises ValueError for an invalid value.
    """

    kinds: tuple[Annotated[str, OneOf(KINDS)], ...] = ("circular",)  # each is measured in each range
    # Values of M: a name of FRACTIONS (of the image; for crops, of the margin around it), a number of pixels, a pair
    # (down, right), or a name of EARLIER.  (8, 12) are two ranges, ((8, 12),) is one pair.
    ranges: tuple[Range, ...] = ("full",)
    pairs: PositiveInt = 1  # pairs of shifts for each image
    seed: Seed = 0  # the offsets depend only on this seed and on the image's position in the split

    def __post_init__(self):
        constraints.check_fields(self, "shifts")
        plain = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in self.ranges)  # lists have no hash
        object.__setattr__(self, "ranges", plain)

    @property
    def measures(self) -> list[tuple[str, Range]]:
        """Every kind in every range."""
        return [(kind, range_) for kind in self.kinds for range_ in self.ranges]

    @property
    def names(self) -> list[str]:
        """The names of `measures`, such as "circular_full" or "zeros_8x12"."""
        return [f"{kind}_{'x'.join(map(str, r)) if isinstance(r, tuple) else r}" for kind, r in self.measures]


class Pair(NamedTuple):
    """Two shifted copies of each image of a batch."""

    kind: str  # one of KINDS
    first: jax.Array  # uint8 [B, H, W, C]
    second: jax.Array  # of the same shape
    offsets: np.ndarray | jax.Array  # int32 [B, 2, 2], (down, right) of the first and the second copy


def consistency(
    predict: Predict,
    batches: Iterable[Batch],
    settings: Shifts,
    *,
    size: Size | None,
    source: Size | None = None,
    mean: tuple[float, ...] = (0.0,),
) -> dict[str, float]:
    """Measure the consistency of predictions under shifts, and the accuracy with and without shifts.

    Args:
      predict: uint8 images [B, H, W, C] to logits [B, classes].
      batches: with "image", "label" (as in `classification.accuracy`), "weight" [B] (0 for padding) and "index" [B],
        the position in the split.
      size: the size of images for `predict`, the centre of the images in `batches`; None: the size of the images in
        each batch, without crops.
      source: the size of the images in `batches`; None: `size`.
      mean: per channel (or one for all), of pixel values in 0..1; rounded, it fills the border with "zeros".

    Returns:
      "top1" without shifts; "examples".
      For each kind and range, by a name such as "circular_full" or "zeros_8x12": the consistency.  The suffix
        "_standard_error" adds its standard error, "_changed" the number of images whose prediction differs in some
        pair, "_top1" the accuracy of the shifted copies.

    Raises ValueError as `check`, or if there are no examples or logits are not finite.
    """
    if size is not None:
        check(settings, size, source)

    def compare(batch):
        of = size or batch["image"].shape[1:3]
        logits = [predict(centre(of, batch["image"]))]
        for pair in copies(batch, settings, size=of, mean=mean):
            logits += [predict(pair.first), predict(pair.second)]
        return _compare(jnp.stack(logits), batch["label"])

    found = by_example(compare, with_offsets(batches, settings, size, source))
    right, moved = found["right"][0], np.split(found["right"][1:], len(settings.measures))
    shifted = {f"{name}_top1": float(of.mean()) for name, of in zip(settings.names, moved, strict=True)}
    return {"top1": float(right.mean()), "examples": right.size} | statistics(settings, found["same"]) | shifted


def check(settings: Shifts, size: Size, source: Size | None = None) -> None:
    """ValueError for offsets that do not fit in images of this size, or in the margin of crops."""
    for kind, range_ in settings.measures:
        room = _room(kind, size, source)
        if kind == "crop" and min(room) < 1:
            raise ValueError(
                f"config.evaluation.shift.kinds: 'crop' cuts {_shown(size)} pixels out of larger images, which have "
                f"{_shown(source or size)} here; set config.data.crop_ratio below 1, such as 0.875, or use 'zeros'."
            )
        largest = _largest(kind, range_, room)
        if not any(largest):
            raise ValueError(
                f"config.evaluation.shift.ranges={errors.shown(range_)}: offsets of 0 move nothing, and so change no "
                "prediction; the smallest range is 1, or (1, 0) along one axis."
            )
        if any(offset > most for offset, most in zip(largest, room, strict=True)):
            where = f"the margin of {_shown(room)} around a crop" if kind == "crop" else f"images of {_shown(room)}"
            raise ValueError(
                f"config.evaluation.shift.ranges={errors.shown(range_)}: offsets of up to {max(largest)} pixels do not "
                f"fit in {where}; the largest range is 'full'."
            )


def _shown(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _room(kind: str, size: Size, source: Size | None) -> Size:
    """The largest range of a kind."""
    if kind != "crop":
        return size
    source = source or size
    return source[0] - size[0], source[1] - size[1]


def _largest(kind: str, range_: Range, room: Size) -> Size:
    """The largest offset along each axis: M, except for EARLIER."""
    if isinstance(range_, tuple):
        return range_
    if isinstance(range_, int):
        return range_, range_
    if range_ in EARLIER:
        largest = EARLIER[range_] - (kind == "crop")
        return largest, largest
    return round(FRACTIONS[range_] * room[0]), round(FRACTIONS[range_] * room[1])


def with_offsets(
    batches: Iterable[Batch], settings: Shifts, size: Size | None, source: Size | None = None
) -> Iterator[Batch]:
    """Add "offsets" int32 [B, measures pairs, 2, 2] to batches: (down, right) of the first and the second copy.

    The offsets of a crop are the position of its upper left corner.  `size` is as in `consistency`; None: the size of
    the images in each batch, without crops.
    """
    streams = {
        (kind, range_): _earlier(kind, EARLIER[range_], settings.pairs)
        for kind, range_ in settings.measures
        if range_ in EARLIER
    }

    def draw(kind, range_, shares, size):
        if stream := streams.get((kind, range_)):
            return np.broadcast_to(next(stream), shares.shape)
        room = _room(kind, size, source)
        largest = np.array(_largest(kind, range_, room))
        first = {"circular": 0, "zeros": -(largest // 2), "crop": (np.array(room) - largest) // 2}[kind]
        return first + np.floor(shares * (largest + 1)).astype(int)

    for batch in batches:
        shares = _uniform(settings, batch["index"])
        of = size or (batch["image"].shape[1], batch["image"].shape[2])
        if size is None:
            check(settings, of)
        offsets = np.concatenate([draw(kind, range_, shares, of) for kind, range_ in settings.measures], axis=1)
        yield {**batch, "offsets": offsets.astype(np.int32)}


def _uniform(settings: Shifts, index: np.ndarray | jax.Array) -> np.ndarray:
    """Uniform numbers [B, pairs, 2, 2], independent for each image, shared by all kinds and ranges."""
    shape = (settings.pairs, 2, 2)
    seeds = ([SHIFTS, settings.seed, max(position, 0)] for position in index.tolist())  # padding is at -1
    return np.stack([np.random.default_rng(seed).random(shape) for seed in seeds])


def _earlier(kind: str, size: int, pairs: int) -> Iterator[np.ndarray]:
    """Yield offsets [pairs, 2, 2] batch by batch; standard shifts are drawn first, then circular ones."""
    random, shape = np.random.RandomState(EARLIER_SEED), (pairs, 2, 2)
    while True:
        standard = random.randint(-size if kind == "zeros" else 0, size, shape)
        circular = random.randint(-size, size, shape)
        yield circular if kind == "circular" else standard


def copies(batch: Batch, settings: Shifts, *, size: Size, mean: tuple[float, ...] = (0.0,)) -> Iterator[Pair]:
    """Yield every pair of shifted copies of a batch of `with_offsets`, in the order of `settings.measures`.

    The batch has "image" uint8 [B, H, W, C] and "offsets"; `size` and `mean` are as in `consistency`.
    """
    fill = tuple(round(255 * value) for value in mean)
    kinds = [kind for kind, _ in settings.measures for _ in range(settings.pairs)]
    images, offsets = batch["image"], batch["offsets"]
    for number, kind in enumerate(kinds):
        first, second = (_shifted(kind, size, fill, images, offsets, number, side) for side in (0, 1))
        yield Pair(kind, first, second, offsets[:, number])


@functools.partial(jax.jit, static_argnums=0)
def centre(size: Size, images: jax.Array) -> jax.Array:
    """Crop the centre of images [B, H, W, C]; ValueError if `size` exceeds theirs."""
    height, width = images.shape[1:3]
    if size[0] > height or size[1] > width:
        raise ValueError(
            f"shift: the centre of {_shown(size)} pixels must fit in the images, of {_shown((height, width))}; give a "
            "smaller size, or larger images."
        )
    top, left = (round((whole - part) / 2) for whole, part in zip(images.shape[1:3], size, strict=True))
    return images[:, top : top + size[0], left : left + size[1]]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # one program for each kind, for any offsets
def _shifted(kind, size, fill, images, offsets, number, side):
    offset = offsets[:, number, side]
    if kind == "crop":
        return shifts.roll(images, -offset)[:, : size[0], : size[1]]
    shifted = shifts.roll(centre(size, images), offset)
    if kind == "circular":
        return shifted
    row, column = (jnp.arange(n) - offset[:, k, None] for k, n in enumerate(size))  # the source of each pixel
    inside = ((row >= 0) & (row < size[0]))[:, :, None] & ((column >= 0) & (column < size[1]))[:, None]
    return jnp.where(inside[..., None], shifted, jnp.array(fill, images.dtype))


@jax.jit
def _compare(logits, label):
    """The results for each image, from logits [1 + 2 n, B, classes] of the unshifted image and all copies."""
    prediction = logits.argmax(-1)
    return {
        "right": hits(prediction[..., None], label)[..., 0],
        "same": prediction[1::2] == prediction[2::2],
        "finite": jnp.isfinite(logits).all(-1),
    }


def statistics(settings: Shifts, shares: np.ndarray) -> dict[str, float]:
    """The mean over images, its standard error, and the number of changing images, for each kind and range.

    `shares` [measures pairs, N] is the agreement of each pair, from 0 to 1; NaN for a pair without information.  Images
    without any information are left out.  Raises ValueError if no pair of a kind and range has any information.
    """
    found, shares = {}, np.asarray(shares, float)
    parts = np.split(shares, len(settings.measures))
    for name, (kind, range_), pairs in zip(settings.names, settings.measures, parts, strict=True):
        known = np.isfinite(pairs)
        known, pairs = known[:, known.any(0)], pairs[:, known.any(0)]
        if not pairs.size:
            raise ValueError(
                f"config.evaluation.shift.ranges={errors.shown(range_)}: no two copies of kind {kind!r} have a pixel "
                "in common; use a smaller range, or more pairs."
            )
        share = np.where(known, pairs, 0).sum(0) / known.sum(0)
        found[name] = float(share.mean())
        found[f"{name}_standard_error"] = float(share.std() / np.sqrt(share.size))
        found[f"{name}_changed"] = int((share < 1).sum())
    return found
