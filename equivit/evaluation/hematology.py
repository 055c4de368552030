"""Classify cells by frozen features: nearest neighbours and a linear classifier, with confidence intervals.

The 1 or 20 nearest neighbours by Euclidean distance have one vote each; ties go to the smallest class.  The linear
classifier is a multinomial logistic regression with C = M K / 100, for M features and K classes.  Features are not
scaled.

Rare classes dominate the balanced accuracy: for a class with one test image, one prediction changes it by 1 / classes.
So scores have intervals, and a second balanced accuracy excludes classes with few test images.

Sources: DinoBloom (arXiv 2404.05022); octic ViTs (arXiv 2505.15441), Table 7.
"""

from typing import Any

import numpy as np

from equivit.evaluation import logistic, scores
from equivit.evaluation.neighbours import Array, Search, check_ks

NEIGHBOURS = {"knn1": 1, "knn20": 20}
FEW = 10  # test images
RESAMPLES, COVERED = 1000, 0.95


class Classifiers:
    """Classifiers of features [N, M] with labels int [N]; ValueError for fewer than 20 or non-finite features."""

    def __init__(self, features: Array, labels: Array):
        features, labels = np.asarray(features, np.float32), np.asarray(labels)
        check_ks(NEIGHBOURS.values(), len(features))
        self.classes, self.targets = np.unique(labels, return_inverse=True)
        C = features.shape[1] * len(self.classes) / 100
        self.linear = logistic.fit(features, labels, C=C)
        self.search = Search(features, "L2")

    def predict(self, features: Array) -> dict[str, np.ndarray]:
        """The classes of features [Q, M] by each classifier, [Q]."""
        rows = self.search(features, max(NEIGHBOURS.values())).rows
        found = {name: self._voted(rows[:, :k]) for name, k in NEIGHBOURS.items()}
        return found | {"linear": self.linear.predict(features)}

    def _voted(self, rows: np.ndarray) -> np.ndarray:
        votes = np.zeros((len(rows), len(self.classes)), int)
        np.add.at(votes, (np.arange(len(rows))[:, None], self.targets[rows]), 1)
        return self.classes[votes.argmax(1)]


def evaluate(features: Array, labels: Array, test_features: Array, test_labels: Array) -> dict[str, dict[str, Any]]:
    """Score each classifier on test images.

    Args:
      features, test_features: [N, M] and [Q, M].
      labels, test_labels: int [N] and [Q].

    Returns:
      By "knn1", "knn20" and "linear": the results of `scored`, and "predictions", int [Q].

    Raises:
      ValueError: fewer than 20 features, or one is not finite.
    """
    found = Classifiers(features, labels).predict(test_features)
    return {name: scored(test_labels, each) | {"predictions": each} for name, each in found.items()}


def scored(true: Array, predicted: Array) -> dict[str, Any]:
    """Compute scores with bootstrap intervals.

    Returns:
      As `scores.classification`; "balanced_accuracy_common": without classes of fewer than 10 images, None if no class
      is left; "intervals": [low, high] by name, the middle 95 % of 1000 resamplings of the images.  Classes missing
      from a resampling are left out of it.
    """
    classes, places = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    cells = places[: len(true)] * len(classes) + places[len(true) :]
    common = np.bincount(places[: len(true)], minlength=len(classes)) >= FEW
    found, rng = _scores(cells, common), np.random.default_rng(0)
    draws = [_scores(cells[rng.integers(len(cells), size=len(cells))], common) for _ in range(RESAMPLES)]
    edges = 50 * (1 - COVERED), 50 * (1 + COVERED)
    intervals = {
        name: np.nanpercentile(np.array([draw[name] for draw in draws], float), edges).tolist()
        for name, value in found.items()
        if value is not None
    }
    return found | {"intervals": intervals}


def _scores(cells: np.ndarray, common: np.ndarray) -> dict[str, float | None]:
    """Scores of images, from true class * classes + predicted class of each, and whether a class is common."""
    counts = np.bincount(cells, minlength=len(common) ** 2).reshape(len(common), -1)
    common_counts = np.where(common[:, None], counts, 0)
    balanced = scores.of_answers(common_counts)["balanced_accuracy"] if common_counts.any() else None
    return scores.of_answers(counts) | {"balanced_accuracy_common": balanced}
