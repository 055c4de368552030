"""Top-1 and top-5 accuracy."""

from typing import Any

from equivit.evaluation import classification
from equivit.evaluation.protocol import Line, Protocol, Run, percent


def run(run: Run) -> dict[str, Any]:
    """The results of `classification.accuracy`."""
    return classification.accuracy(run.predict, run.batches())


def lines(result: dict[str, Any]) -> list[Line]:
    """One line."""
    top1, top5 = percent(result["top1"]), percent(result["top5"])
    return [("accuracy", f"{top1} upright, top-5 {top5} ({result['examples']} images)")]


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, curve="top1", loss="loss", default=True)
