"""Scores of label maps (intersection over union, accuracy) and of image classes, from confusion matrices.

All pixels of a data set are counted in one matrix n [true class, predicted class].  For class k

    IoU_k = n_kk / (sum_j n_kj + sum_j n_jk - n_kk)

which is NaN for a class in no map.  Pixels without a label (VOID) never count.  For image classes,
n_kk / sum_j n_kj is the recall and 2 n_kk / (sum_j n_kj + sum_j n_jk) the F1 of class k.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.data.crops import VOID

Maps = np.ndarray | jax.Array | Sequence[np.ndarray | jax.Array]


def segmentation(true: Maps, predicted: Maps, *, num_classes: int, ignore: Iterable[int] = ()) -> dict[str, Any]:
    """Score label maps.

    Args:
      true, predicted: integers of equal shapes, or lists of maps of different sizes.
      num_classes: labels are 0..num_classes - 1, `ignore` and VOID.
      ignore: classes to leave out, or other labels of pixels without a class; such pixels never count.

    Returns the scores as `of_counts`.  Raises ValueError if maps differ in number or shape, a label is invalid,
    `ignore` is not a list, or all pixels are ignored.
    """
    if not isinstance(ignore, Iterable):
        raise ValueError(f"segmentation: {ignore=} must be a list of numbers, such as ({ignore},).")
    ignore, true, predicted = tuple(ignore), _listed(true), _listed(predicted)
    if len(true) != len(predicted):
        raise ValueError(f"segmentation: {len(true)} true maps and {len(predicted)} predicted ones; give one for each.")
    numbers = np.array(sorted({VOID, *ignore, *range(num_classes)}))
    counts = np.zeros((len(numbers), len(numbers)), np.int64)
    for pair in zip(true, predicted, strict=True):
        if pair[0].shape != pair[1].shape:
            raise ValueError(
                f"segmentation: a true map is {list(pair[0].shape)}, the predicted one {list(pair[1].shape)}; resize "
                "the prediction to the size of the label."
            )
        rows, columns = (_places(labels, numbers, num_classes).ravel() for labels in pair)
        counts += np.bincount(rows * len(numbers) + columns, minlength=counts.size).reshape(counts.shape)
    is_class = (numbers >= 0) & (numbers < num_classes)
    return of_counts(counts[is_class][:, np.argsort(~is_class, kind="stable")], ignore=ignore)


def of_counts(counts: np.ndarray, *, ignore: Iterable[int] = ()) -> dict[str, Any]:
    """Compute scores from counts of pixels.

    Args:
      counts: int [K, K], rows by true class, columns by predicted class; further columns are labels without a class.
      ignore: classes to leave out.

    Returns:
      "miou": the mean IoU of the classes in some map, without `ignore`.
      "miou_official": mIoU as in CAPI's code: each class of `ignore`, or label without a class, that is predicted where
        another class is true adds a class with IoU 0.
      "accuracy": the fraction of pixels with the right class.
      "iou": float64 [K], NaN for a class in no map or in `ignore`.

    Raises ValueError if all pixels are ignored.
    """
    classes = len(counts)
    left_out = np.isin(np.arange(classes), np.array([*ignore], int))
    counts = np.where(left_out[:, None], 0, np.asarray(counts, np.int64))
    if not (total := counts.sum()):
        raise ValueError(
            "segmentation: all pixels are ignored; check that the maps hold the classes 0 to "
            f"{classes - 1}, and config.data.void, the labels without a class."
        )
    right, predicted = counts.diagonal(), counts.sum(0)
    union = counts.sum(1) + predicted[:classes] - right
    iou = np.where(union > 0, right / np.maximum(union, 1), np.nan)
    seen = np.count_nonzero(union) + np.count_nonzero(predicted[classes:])
    return {
        "miou": float(np.nanmean(iou[~left_out])),
        "miou_official": float(np.nansum(iou) / seen),
        "accuracy": float(right.sum() / total),
        "iou": np.where(left_out, np.nan, iou),
    }


def classification(true: np.ndarray | jax.Array, predicted: np.ndarray | jax.Array) -> dict[str, float]:
    """Score the classes of images.

    Args:
      true, predicted: integers [N].

    Returns "accuracy"; "weighted_f1": the mean F1 of the true classes, weighted by their images; "balanced_accuracy":
    their mean recall.  The last two leave out classes that are never true.  Raises ValueError as `entries`.
    """
    return of_answers(answers(*entries(true, predicted)))


def entries(true: np.ndarray | jax.Array, predicted: np.ndarray | jax.Array) -> tuple[np.ndarray, int]:
    """The entry of each image in the flat matrix of counts, int [N], and its number of classes: those that occur.

    Raises ValueError if there are no images, or `true` and `predicted` differ in shape.
    """
    true, predicted = np.asarray(true), np.asarray(predicted)
    if true.shape != predicted.shape or not true.size:
        raise ValueError(
            f"classification: {list(true.shape)} true classes and {list(predicted.shape)} predicted ones; give one of "
            "each for at least one image."
        )
    numbers, places = np.unique(np.concatenate([true.ravel(), predicted.ravel()]), return_inverse=True)
    return places[: true.size] * len(numbers) + places[true.size :], len(numbers)


def answers(entries: np.ndarray, classes: int) -> np.ndarray:
    """Count images by true and by predicted class, int [K, K], from the `entries` of some."""
    return np.bincount(entries, minlength=classes**2).reshape(classes, classes)


def of_answers(counts: np.ndarray) -> dict[str, float]:
    """The scores of `classification` from counts of images, int [K, K], rows by true class."""
    right, images = counts.diagonal(), counts.sum(1)
    there = images > 0
    f1 = 2 * right[there] / (images + counts.sum(0))[there]
    return {
        "accuracy": float(right.sum() / images.sum()),
        "weighted_f1": float((f1 * images[there]).sum() / images.sum()),
        "balanced_accuracy": float((right[there] / images[there]).mean()),
    }


@functools.partial(jax.jit, static_argnums=3)
def count(true: jax.Array, predicted: jax.Array, weight: jax.Array, num_classes: int) -> jax.Array:
    """Count the pixels of a batch, int32 [K, K], on its devices; exact up to 2^31 pixels.

    Each image has a histogram, and devices add them up.  A product of one-hot maps would need num_classes^2
    multiply-adds per pixel, which is much slower on a CPU.

    Args:
      true, predicted: int [B, H, W]; pixels whose true label is not in 0..K - 1 never count.
      weight: [B]; images of weight 0 (padding) do not count.
    """
    real = (true >= 0) & (true < num_classes) & (weight > 0)[:, None, None]
    cell = jnp.where(real, true * num_classes + predicted, num_classes**2).reshape(len(true), -1)
    empty = jnp.zeros(num_classes**2, jnp.int32)
    counts = jax.vmap(lambda cells: empty.at[cells].add(1, mode="drop"))(cell)
    return counts.sum(0).reshape(num_classes, num_classes)


def _listed(maps: Maps) -> list[np.ndarray]:
    return [np.asarray(part) for part in maps] if isinstance(maps, list | tuple) else [np.asarray(maps)]


def _places(labels: np.ndarray, numbers: np.ndarray, num_classes: int) -> np.ndarray:
    """The index of each label among the sorted numbers; ValueError if it is none of them."""
    places = np.minimum(np.searchsorted(numbers, labels), len(numbers) - 1)
    if (wrong := numbers[places] != labels).any():
        raise ValueError(
            f"segmentation: the label {labels[wrong][0]} is neither in 0..{num_classes - 1} nor VOID ({VOID}); name it "
            "in ignore, or correct num_classes."
        )
    return places
