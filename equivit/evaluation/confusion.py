"""Which classes a classifier confuses: counts by true and predicted class, scores of each class, worst mistakes."""

import csv
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from equivit import files

WORST = 25  # mistakes to show


def distinct(classes: tuple[str, ...]) -> list[str]:
    """The names of the classes; a name that occurs twice gets its number."""
    return [f"{name} ({k})" if classes.count(name) > 1 else name for k, name in enumerate(classes)]


def scores(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Score the predicted classes, by scikit-learn.

    Args:
      labels, predicted: int [N].
      names: distinct names of the classes (`distinct`).

    Returns:
      "accuracy": share of the examples; "f1": mean over the classes that occur.
      "classes": "examples", "accuracy" (the recall), "precision" and "f1" by name; None where a class has no example.
      "counts": number of examples by true and by predicted class, without zeros.
    """
    from sklearn import metrics  # slow to import

    numbers = range(len(names))
    zero: Any = 0  # scikit-learn's annotation has only words
    found: Any = metrics.precision_recall_fscore_support(labels, predicted, labels=numbers, zero_division=zero)
    precision, recall, f1, support = found
    matrix = metrics.confusion_matrix(labels, predicted, labels=numbers)
    return {
        "accuracy": float(np.mean(labels == predicted)),
        "f1": float(np.mean(f1[support > 0])),
        "classes": {
            name: {
                "examples": int(support[k]),
                "accuracy": float(recall[k]) if support[k] else None,
                "precision": float(precision[k]) if matrix[:, k].any() else None,
                "f1": float(f1[k]) if support[k] else None,
            }
            for k, name in enumerate(names)
        },
        "counts": {
            name: {names[j]: int(matrix[k, j]) for j in np.flatnonzero(matrix[k]).tolist()}
            for k, name in enumerate(names)
        },
    }


def mistakes(labels: np.ndarray, predicted: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """The positions of the most confident wrong predictions, the worst first, int [at most WORST]."""
    wrong = np.flatnonzero(labels != predicted)
    return wrong[np.argsort(-probability[wrong], kind="stable")][:WORST]


def matrix(counts: dict[str, dict[str, int]]) -> np.ndarray:
    """The counts as an array, int [true class, predicted class]."""
    place = {name: k for k, name in enumerate(counts)}
    found = np.zeros((len(place), len(place)), int)
    for name, row in counts.items():
        for other, number in row.items():
            found[place[name], place[other]] = number
    return found


def write(counts: dict[str, dict[str, int]], path: pathlib.Path) -> None:
    """Write the counts as a CSV table: a row for each true class, a column for each predicted class."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["true \\ predicted", *counts])
    table.writerows([name, *row] for name, row in zip(counts, matrix(counts).tolist(), strict=True))
    files.write_text(path, text.getvalue())
