"""Accuracy of the nearest training images by frozen features (--config.evaluation.knn.ks=(20,10))."""

from typing import Any

import numpy as np

from equivit.evaluation import frozen, knn
from equivit.evaluation.neighbours import check_ks
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.symmetry.groups import OCTIC


def opens(run: Run) -> None:
    """As `frozen.opens`; also ValueError for more neighbours than training images."""
    check_ks(run.config.evaluation.knn.ks, frozen.opens(run).examples)


def run(run: Run) -> dict[str, Any]:
    """Classify test images in all eight orientations by votes of the training images (`evaluation/knn.py`).

    The feature is the class token after the final norm, or the mean patch token.

    Returns "k", the first of `config.evaluation.knn.ks`; for this k, "top1" and "top5" of the upright images and
    `frozen.accuracies`; "each": the upright top-1 by k; "keys" and "examples", the numbers of images.
    """
    ks = tuple(run.config.evaluation.knn.ks)
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    classes = 1 + int(max(train.labels.max(), test["e"].labels.max()))
    neighbours = knn.Neighbours(train.tokens[:, -1], train.labels, num_classes=classes, ks=ks)
    labels, best = test["e"].labels, {}
    for g, found in test.items():
        parts = (_best(votes) for votes in neighbours.votes(found.tokens[:, -1]))
        best[g] = np.concatenate(list(parts), axis=1)
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


def _best(votes: np.ndarray) -> np.ndarray:
    """The five classes with most votes [ks, Q, 5], the first on ties."""
    return np.argsort(-votes, axis=-1, kind="stable")[..., :5]


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


PROTOCOL = Protocol(
    needs=frozenset({"features"}),
    run=run,
    lines=lines,
    check=frozen.check,
    opens=opens,
    inputs=frozen.inputs,
    curve="top1",
)
