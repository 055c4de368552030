"""Label maps from frozen patch features: CAPI's evaluation by nearest neighbours and a linear classifier.

A patch has one feature and the labels of its pixels.  Patches whose most frequent label is ignored are left out; others
keep all their labels.

- Neighbours: a pixel gets the most frequent label of the same pixel in the k nearest patches.
- Linear: a patch gets one class, by logistic regression on the most frequent labels.

Ties go to the smallest label.  The official mIoU on a held-out part selects the settings; predictions there may be
ignored labels (`scores.of_counts`).  Then the classifier is refitted on both parts.  Features are standardised by the
mean and deviation of the first part alone.

Source: CAPI (arXiv 2502.08769), Appendix on evaluation, and its public code.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.constraints import Size
from equivit.data.crops import VOID
from equivit.evaluation import logistic, scores
from equivit.evaluation.logistic import Logistic
from equivit.evaluation.neighbours import DISTANCES, QUERIES, Array, Search

KS = (1, 3, 10, 30)
CS = tuple(float(C) for C in 10 ** np.linspace(-6, 5, 8))
Maps = dict[tuple[str, int], np.ndarray]  # by distance and k


class Part(NamedTuple):
    """Features [n, h, w, D] and label maps int [n, H, W], H a multiple of h and W of w."""

    features: Array
    labels: Array


def majority(labels: Array, size: Size) -> np.ndarray:
    """The most frequent label of each patch of label maps, [n, H, W] -> [n, h, w]; the smallest on ties.

    Raises ValueError if `size`, (height, width) of a patch, does not divide the maps.
    """
    return np.stack([_most_frequent(_patches(each[None], size))[0] for each in np.asarray(labels)])


def standardise(features: Array) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [D] of features [n, h, w, D]; a constant channel has deviation 1."""
    features = np.asarray(features)
    number = features[..., 0].size
    mean = np.sum([part.sum((0, 1), dtype=np.float64) for part in features], 0) / number
    variance = np.sum([np.square(part - mean).sum((0, 1)) for part in features], 0) / number
    axes = (0, 1, 2)
    scale = np.where(features.max(axes) == features.min(axes), 1, np.sqrt(variance))
    return mean.astype(np.float32), scale.astype(np.float32)


def knn(
    features: Array,
    labels: Array,
    queries: Array,
    *,
    ks: Sequence[int] = KS,
    distances: Sequence[str] = DISTANCES,
    ignore: Iterable[int] = (),
) -> Maps:
    """Predict label maps of the queries from their nearest patches, by (distance, k).

    Args:
      features, labels: as in `Part`.
      queries: [m, h, w, D].
      ks: numbers of neighbours; one search serves all.
      distances: some of "cosine" and "L2".
      ignore: labels, besides VOID, that exclude a patch if they are its most frequent.

    Returns maps [m, H, W].  Raises ValueError for a k above the number of keys, an unknown distance, or labels that the
    grid does not divide.
    """
    found = {}
    for distance in distances:
        maps = _Neighbours(Part(features, labels), distance, ignore).maps(queries, ks)
        found |= {(distance, k): maps[k] for k in ks}
    return found


@dataclasses.dataclass(frozen=True)
class Linear(Logistic):
    """A logistic regression of patches; all pixels of a patch get its class."""

    patch: Size  # (height, width) in pixels

    def predict(self, features: Array) -> np.ndarray:
        """Label maps [m, H, W] of features [m, h, w, D]."""
        return super().predict(features).repeat(self.patch[0], axis=1).repeat(self.patch[1], axis=2)


def linear(features: Array, labels: Array, *, C: float, ignore: Iterable[int] = ()) -> Linear:
    """Fit a logistic regression of the patches' most frequent labels.

    Args:
      features, labels: as in `Part`.
      C: the inverse strength of the penalty (`logistic.py`).
      ignore: labels of excluded patches, besides VOID.

    Raises ValueError if C is not positive, no patch is left, or the grid does not divide the labels.
    """
    features, size = np.asarray(features, np.float32), patch_size(features, labels)
    rows, targets, _ = _examples(Part(features, labels), size, ignore)
    fitted = logistic.fit(rows, targets, C=C)
    return Linear(**vars(fitted), patch=size)


class Chosen(NamedTuple):
    """A classifier with the best setting on the held-out part."""

    selected: Any  # (distance, k), or C
    validation: dict[Any, float]  # the official mIoU of each setting on the held-out part
    predict: Callable[[Array], np.ndarray]  # features [m, h, w, D] to label maps [m, H, W]


def choose(
    train: Part,
    val: Part,
    *,
    method: str,
    num_classes: int,
    ignore: Iterable[int] = (),
    ks: Sequence[int] = KS,
    distances: Sequence[str] = DISTANCES,
    Cs: Sequence[float] = CS,
) -> Chosen:
    """Select the setting that is best on the held-out part, and fit it to both parts.

    Args:
      train, val: not standardised.
      method: "knn", nearest neighbours, or "linear", a linear classifier.
      num_classes: labels are 0..num_classes - 1, `ignore` and VOID.
      ignore: ignored labels.
      ks, distances: the settings of neighbours; ties go to the smaller k, then to the first distance.
      Cs: the settings of the linear classifier.

    Raises ValueError as `knn`, `linear` and `scores.segmentation`, or for an unknown method.
    """
    errors.one_of("patch segmentation: method", method, (knn.__name__, linear.__name__))
    ignore, (mean, scale) = tuple(ignore), standardise(train.features)

    def ready(features):
        return (np.asarray(features, np.float32) - mean) / scale

    train, val = (Part(ready(features), np.asarray(labels)) for features, labels in (train, val))
    maps: dict[Any, np.ndarray]
    if method == "linear":
        maps = {C: linear(*train, C=C, ignore=ignore).predict(val.features) for C in Cs}
    else:
        found = knn(*train, val.features, ks=ks, distances=distances, ignore=ignore)
        maps = {(distance, k): found[distance, k] for k in ks for distance in distances}
    counted: dict[str, Any] = dict(num_classes=num_classes, ignore=ignore)
    scored = {setting: scores.segmentation(val.labels, labels, **counted) for setting, labels in maps.items()}
    validation = {setting: found["miou_official"] for setting, found in scored.items()}
    selected = max(validation, key=validation.__getitem__)  # the first on ties
    both = Part(*(np.concatenate(part) for part in zip(train, val, strict=True)))
    if method == "linear":
        fitted = linear(*both, C=selected, ignore=ignore)
        return Chosen(selected, validation, lambda features: fitted.predict(ready(features)))
    distance, k = selected
    search = _Neighbours(both, distance, ignore)
    return Chosen(selected, validation, lambda features: search.maps(ready(features), (k,))[k])


class _Neighbours:
    """Patches on the devices, for many queries."""

    def __init__(self, part: Part, distance: str, ignore: Iterable[int]):
        self.size = patch_size(*part)
        keys, _, self.labels = _examples(part, self.size, ignore)
        self.search = Search(keys, distance)

    def maps(self, queries: Array, ks: Sequence[int]) -> dict[int, np.ndarray]:
        """Label maps [m, H, W] of queries [m, h, w, D], by k."""
        queries = np.asarray(queries, np.float32)
        rows, found = queries.reshape(-1, queries.shape[-1]), []
        for start in range(0, len(rows), QUERIES):
            near = self.search(rows[start : start + QUERIES], max(ks)).rows
            found.append(jax.device_get(_of_neighbours(tuple(ks), self.labels[near])))
        whole = (np.concatenate(part).reshape(*queries.shape[:3], -1) for part in zip(*found, strict=True))
        return {k: _joined(part, self.size) for k, part in zip(ks, whole, strict=True)}


@functools.partial(jax.jit, static_argnums=0)
def _of_neighbours(ks: tuple[int, ...], near: jax.Array) -> list[jax.Array]:
    """For each k, the most frequent label of the first k neighbours [Q, K, P] at each pixel, [Q, P]."""
    found = []
    for k in ks:
        part = near[:, :k]
        times = (part[:, :, None] == part[:, None]).sum(2)
        found.append(part.min(1, where=times == times.max(1, keepdims=True), initial=jnp.iinfo(part.dtype).max))
    return found


def _examples(part: Part, size: Size, ignore: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [N, D], most frequent labels [N] and all labels [N, P] of the patches that are not ignored."""
    labels, features = _patches(part.labels, size), np.asarray(part.features, np.float32)
    main = majority(part.labels, size).ravel()
    labelled = ~np.isin(main, [VOID, *ignore])
    if not labelled.any():
        raise ValueError("patch segmentation: all patches are ignored; check the maps and the ignored labels.")
    return features.reshape(-1, features.shape[-1])[labelled], main[labelled], labels.reshape(len(main), -1)[labelled]


def patch_size(features: Array, labels: Array) -> Size:
    """(height, width) of a patch in pixels; ValueError unless the grid of the features divides the maps."""
    (number, *grid), (maps, *pixels) = features.shape[:-1], labels.shape
    if number != maps or len(grid) != 2 or pixels[0] % grid[0] or pixels[1] % grid[1]:
        raise ValueError(
            f"patch segmentation: features {list(features.shape)} and labels {list(labels.shape)} must have the same "
            "number of images, and a grid that divides the maps; resize the maps to the size of the images."
        )
    return pixels[0] // grid[0], pixels[1] // grid[1]


def _patches(labels: Array, size: Size) -> np.ndarray:
    """Maps [n, H, W] as [n, h, w, height * width]."""
    labels = np.asarray(labels)
    number, height, width = labels.shape
    if height % size[0] or width % size[1]:
        raise ValueError(f"patch segmentation: patches of {size[0]}x{size[1]} do not divide maps of {height}x{width}.")
    cut = labels.reshape(number, height // size[0], size[0], width // size[1], size[1]).swapaxes(2, 3)
    return cut.reshape(*cut.shape[:3], -1)


def _joined(patches: np.ndarray, size: Size) -> np.ndarray:
    """The inverse of `_patches`."""
    number, h, w, _ = patches.shape
    cut = patches.reshape(number, h, w, *size).swapaxes(2, 3)
    return cut.reshape(number, h * size[0], w * size[1])


def _most_frequent(labels: np.ndarray) -> np.ndarray:
    """The most frequent label along the last axis; the smallest on ties."""
    labels = np.sort(labels, axis=-1)
    place = np.broadcast_to(np.arange(labels.shape[-1]), labels.shape)
    begins = np.concatenate([np.ones_like(labels[..., :1], bool), labels[..., 1:] != labels[..., :-1]], axis=-1)
    length = place - np.maximum.accumulate(np.where(begins, place, 0), axis=-1)  # of the run of equal labels so far
    return np.take_along_axis(labels, length.argmax(-1)[..., None], axis=-1)[..., 0]
