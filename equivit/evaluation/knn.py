"""Classify images by the nearest neighbours of their features, with weighted votes.

    v_c(q) = sum over the k nearest i with y_i = c of w_i,    w = softmax(cos(q, x_i) / T) over the K nearest

K is the largest requested k, so the votes for a smaller k do not sum to 1; this does not change the winning class.

Sources: Wu et al. (arXiv 1805.01978), Section 3.4; DINOv2 (arXiv 2304.07193), with k = 10, 20, 100, 200 and T = 0.07.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from equivit.evaluation.neighbours import Array, Search, check_ks

TEMPERATURE = 0.07
CHUNK = 4096  # queries per chunk of votes


def votes(
    features: Array,
    labels: Array,
    queries: Array,
    *,
    ks: Sequence[int],
    num_classes: int,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Compute the votes for each class, float32 [len(ks), Q, num_classes].

    Args:
      features: [N, D], of images with known classes; not normalised.
      labels: int [N].
      queries: [Q, D].
      ks: numbers of neighbours.
      num_classes: labels are 0..num_classes - 1.
      temperature: divides the cosines.

    Raises:
      ValueError: a k above the number of features, a label beyond the classes, no queries, or queries of another width.
    """
    neighbours = Neighbours(features, labels, num_classes=num_classes, ks=ks, temperature=temperature)
    return np.concatenate(list(neighbours.votes(queries)), axis=1)


class Neighbours:
    """Labelled features on the devices of the current mesh, for many queries.  Arguments as in `votes`."""

    def __init__(
        self,
        features: Array,
        labels: Array,
        *,
        num_classes: int,
        ks: Sequence[int],
        temperature: float = TEMPERATURE,
    ):
        self.labels, self.ks, self.num_classes, self.temperature = np.asarray(labels), ks, num_classes, temperature
        check_labels(self.labels, num_classes, len(features))
        check_ks(ks, len(features))
        self.search = Search(features)

    def votes(self, queries: Array) -> Iterator[np.ndarray]:
        """Yield `votes` in chunks of queries."""
        for start in range(0, max(len(queries), 1), CHUNK):  # without queries, the search raises
            scores, rows = self.search(queries[start : start + CHUNK], max(self.ks))
            weights = np.exp((scores - scores[:, :1]) / self.temperature)  # the first is the largest
            weights /= weights.sum(1, keepdims=True)
            yield np.stack([self._summed(weights[:, :k], rows[:, :k]) for k in self.ks])

    def _summed(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        total = np.zeros((len(rows), self.num_classes), np.float32)
        np.add.at(total, (np.arange(len(rows))[:, None], self.labels[rows]), weights)
        return total


def check_labels(labels: np.ndarray, num_classes: int, number: int) -> None:
    """ValueError unless there are `number` labels, in 0..num_classes - 1."""
    if labels.shape != (number,):
        raise ValueError(f"labels of shape {list(labels.shape)} must be one for each of the {number} features.")
    if (wrong := (labels < 0) | (labels >= num_classes)).any():
        raise ValueError(
            f"the label {labels[wrong][0]} is not in 0..{num_classes - 1}; correct the labels or the number of classes."
        )
