"""Accuracy of the nearest training images by frozen features (--config.evaluation.knn.ks=(20,10)).

    v_c(q) = sum over the k nearest i with y_i = c of w_i,    w = softmax(cos(q, x_i) / T) over the K nearest

K is the largest requested k, so the votes for a smaller k do not sum to 1; this does not change the winning class.

Sources: Wu et al. (arXiv 1805.01978), Section 3.4; DINOv2 (arXiv 2304.07193), with k = 10, 20, 100, 200 and T = 0.07.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from equivit.evaluation import frozen
from equivit.evaluation.neighbours import Array, Search, check_ks, check_labels
from equivit.evaluation.protocol import Line, Run, percent
from equivit.symmetry.groups import OCTIC

TEMPERATURE = 0.07
CHUNK = 4096  # queries per chunk of votes


class Neighbours:
    """Images with known classes on the devices of the current mesh.

    Args:
      features: [N, D]; not normalised.
      labels: int [N], in 0..num_classes - 1.
      ks: numbers of neighbours.
      temperature: divides the cosines.

    Raises ValueError for a k above the number of features, or a label beyond the classes.
    """

    def __init__(
        self, features: Array, labels: Array, *, num_classes: int, ks: Sequence[int], temperature: float = TEMPERATURE
    ):
        self.labels, self.ks, self.num_classes, self.temperature = np.asarray(labels), ks, num_classes, temperature
        check_labels(self.labels, num_classes, len(features))
        check_ks(ks, len(features))
        self.search = Search(features)

    def votes(self, queries: Array) -> Iterator[np.ndarray]:
        """Yield the votes for each class, float32 [ks, chunk, num_classes], in chunks of queries [Q, D].

        Raises ValueError for no queries, or queries of another width.
        """
        for start in range(0, max(len(queries), 1), CHUNK):  # without queries, the search raises
            scores, rows = self.search(queries[start : start + CHUNK], max(self.ks))
            weights = np.exp((scores - scores[:, :1]) / self.temperature)  # the first is the largest
            weights /= weights.sum(1, keepdims=True)
            yield np.stack([self._summed(weights[:, :k], rows[:, :k]) for k in self.ks])

    def best(self, queries: Array) -> np.ndarray:
        """The five classes with most votes, the first on ties, int [ks, Q, 5]."""
        parts = [np.argsort(-votes, axis=-1, kind="stable")[..., :5] for votes in self.votes(queries)]
        return np.concatenate(parts, axis=1)

    def _summed(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        total = np.zeros((len(rows), self.num_classes), np.float32)
        np.add.at(total, (np.arange(len(rows))[:, None], self.labels[rows]), weights)
        return total


def opens(run: Run) -> None:
    """As `frozen.opens`; also ValueError for more neighbours than training images."""
    check_ks(run.config.evaluation.knn.ks, frozen.opens(run).examples)


def run(run: Run) -> dict[str, Any]:
    """Classify test images in all eight orientations by votes of the training images.

    The feature is the class token after the final norm, or the mean patch token.

    Returns "k", the first of `config.evaluation.knn.ks`; for this k, "top1" and "top5" of the upright images and
    `frozen.accuracies`; "each": the upright top-1 by k; "keys" and "examples", the numbers of images.
    """
    ks = tuple(run.config.evaluation.knn.ks)
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    labels = test["e"].labels
    classes = 1 + int(max(train.labels.max(), labels.max()))
    neighbours = Neighbours(train.tokens[:, -1], train.labels, num_classes=classes, ks=ks)
    best = {g: neighbours.best(found.tokens[:, -1]) for g, found in test.items()}
    right = best["e"] == labels[:, None]
    return {
        "k": ks[0],
        "top1": float(right[0, :, 0].mean()),
        "top5": float(right[0].any(-1).mean()),
        "each": {str(k): float(each[:, 0].mean()) for k, each in zip(ks, right, strict=True)},
        "keys": len(train.labels),
        "examples": len(labels),
        **frozen.accuracies({g: found[0, :, 0] for g, found in best.items()}, labels),
    }


def lines(result: dict[str, Any]) -> list[Line]:
    """The headline, the other k, and the orientations."""
    top1, top5 = percent(result["top1"]), percent(result["top5"])
    counts = f"{result['examples']} images, {result['keys']} keys"
    others = "  ".join(f"k={k} {percent(top1)}" for k, top1 in result["each"].items())
    return [
        (f"{result['k']} nearest neighbours", f"{top1}, top-5 {top5} ({counts})"),
        ("... for each k", others),
        *frozen.lines(result),
    ]


PROTOCOL = frozen.protocol(run=run, lines=lines, opens=opens, curve="top1")
