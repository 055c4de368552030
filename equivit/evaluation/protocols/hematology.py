"""Scores of cell classes: neighbours and a linear classifier on frozen features (DinoBloom)."""

import functools
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from equivit.evaluation import frozen, hematology
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.symmetry.groups import OCTIC

WORDS = {"knn1": "nearest neighbour", "knn20": "20 nearest neighbours", "linear": "linear classifier"}
SCORES = {
    "weighted_f1": "weighted F1",
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "balanced_accuracy_common": "balanced, without rare classes",
}


def data(config: ConfigDict) -> ConfigDict:
    """The `data` section with images squashed to `data.image_size`, bilinearly."""
    return frozen.squashed(config, "bilinear")


def run(run: Run) -> dict[str, Any]:
    """The results of `hematology.scored` by classifier, each with its `frozen.accuracies` as "turned".

    Also "accuracy" and "balanced_accuracy" of the linear one, "keys" and "examples".
    """
    run = run.on(data(run.config), "squashed")
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    classifiers, labels = hematology.Classifiers(train.tokens[:, -1], train.labels), test["e"].labels
    predicted = {g: classifiers.predict(found.tokens[:, -1]) for g, found in test.items()}
    found = {}
    for name in WORDS:
        turned: dict[str, np.ndarray] = {g: each[name] for g, each in predicted.items()}
        balanced = [hematology.scores.classification(labels, each)["balanced_accuracy"] for each in turned.values()]
        means = {"balanced_accuracy_mean": float(np.mean(balanced))}
        found[name] = hematology.scored(labels, turned["e"]) | {"turned": frozen.accuracies(turned, labels) | means}
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


PROTOCOL = Protocol(
    needs=frozenset({"features"}),
    run=run,
    lines=lines,
    check=frozen.check,
    data=data,
    opens=functools.partial(frozen.opens, least=max(hematology.NEIGHBOURS.values())),
    inputs=frozen.inputs,
    curve="balanced_accuracy",
)
