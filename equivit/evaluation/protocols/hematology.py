"""Scores of cell classes: neighbours and a linear classifier on frozen features (DinoBloom).

The 1 or 20 nearest neighbours by Euclidean distance have one vote each; ties go to the smallest class.  The linear
classifier is a multinomial logistic regression with C = M K / 100, for M features and K classes.  Features are not
scaled.

Rare classes dominate the balanced accuracy: for a class with one test image, one prediction changes it by 1 / classes.
So scores have intervals, and a second balanced accuracy excludes classes with few test images.

Sources: DinoBloom (arXiv 2404.05022); octic ViTs (arXiv 2505.15441), Table 7.
"""

import functools
from typing import Any

import numpy as np

from equivit.evaluation import frozen, logistic, scores
from equivit.evaluation.neighbours import Array, Search, check_ks
from equivit.evaluation.protocol import Line, Run, percent
from equivit.symmetry.groups import OCTIC

NEIGHBOURS = {"knn1": 1, "knn20": 20}
FEW = 10  # test images
RESAMPLES, COVERED = 1000, 0.95
WORDS = {"knn1": "nearest neighbour", "knn20": "20 nearest neighbours", "linear": "linear classifier"}
SCORES = {
    "weighted_f1": "weighted F1",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "balanced_accuracy_common": "balanced, without rare classes",
}


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


def scored(true: Array, predicted: Array) -> dict[str, Any]:
    """Compute scores with bootstrap intervals.

    Returns the scores of `scores.classification`; "balanced_accuracy_common": without classes of fewer than 10 images,
    None if no class is left; "intervals": [low, high] by name, the middle 95 % of 1000 resamplings of the images.
    Classes missing from a resampling are left out of it.
    """
    entries, classes = scores.entries(true, predicted)
    common = scores.answers(entries, classes).sum(1) >= FEW
    found, rng = _scores(entries, common), np.random.default_rng(0)
    draws = [_scores(entries[rng.integers(len(entries), size=len(entries))], common) for _ in range(RESAMPLES)]
    edges = 50 * (1 - COVERED), 50 * (1 + COVERED)
    intervals = {
        name: np.nanpercentile(np.array([draw[name] for draw in draws], float), edges).tolist()
        for name, value in found.items()
        if value is not None
    }
    return found | {"intervals": intervals}


def _scores(entries: np.ndarray, common: np.ndarray) -> dict[str, float | None]:
    """Scores of images, from the entry of each (`scores.entries`), and whether a class is common."""
    counts = scores.answers(entries, len(common))
    common_counts = np.where(common[:, None], counts, 0)
    balanced = scores.of_answers(common_counts)["balanced_accuracy"] if common_counts.any() else None
    return scores.of_answers(counts) | {"balanced_accuracy_common": balanced}


# The `data` section with images squashed to `data.image_size`.
data = functools.partial(frozen.squashed, interpolation="bilinear")


def run(run: Run) -> dict[str, Any]:
    """The results of `scored` by classifier, each with its `frozen.accuracies` as "turned".

    Also "accuracy" and "balanced_accuracy" of the linear one, "keys" and "examples".
    """
    run = run.on(data(run.config), "squashed")
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    classifiers, labels = Classifiers(train.tokens[:, -1], train.labels), test["e"].labels
    predicted = {g: classifiers.predict(found.tokens[:, -1]) for g, found in test.items()}
    found = {}
    for name in WORDS:
        turned: dict[str, np.ndarray] = {g: each[name] for g, each in predicted.items()}
        balanced = [scores.classification(labels, each)["balanced_accuracy"] for each in turned.values()]
        means = {"balanced_accuracy_mean": float(np.mean(balanced))}
        found[name] = scored(labels, turned["e"]) | {"turned": frozen.accuracies(turned, labels) | means}
    headline = {name: found["linear"][name] for name in ("accuracy", "balanced_accuracy")}
    return found | headline | {"keys": len(train.labels), "examples": len(labels)}


def lines(result: dict[str, Any]) -> list[Line]:
    """Scores with intervals of each classifier, and its orientations."""
    found = [("cells", f"{result['examples']} images, {result['keys']} to learn from; intervals of 95 %")]
    for name, words in WORDS.items():
        each = (_with_interval(result[name], score, title) for score, title in SCORES.items())
        found += [(words, ", ".join(filter(None, each))), *frozen.lines(result[name]["turned"])]
    return found


def _with_interval(result: dict[str, Any], score: str, title: str) -> str:
    if result[score] is None:
        return ""
    low, high = result["intervals"][score]
    return f"{title} {percent(result[score])} ({100 * low:.1f} to {100 * high:.1f})"


opens = functools.partial(frozen.opens, least=max(NEIGHBOURS.values()))
PROTOCOL = frozen.squashing(run=run, lines=lines, data=data, opens=opens, curve="balanced_accuracy")
