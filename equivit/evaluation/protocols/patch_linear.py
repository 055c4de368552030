"""Mean IoU of label maps from a linear classifier of frozen patch features, as in CAPI."""

import dataclasses
from typing import Any

from equivit.evaluation.protocol import Line, Run
from equivit.evaluation.protocols import patch_knn


def run(run: Run) -> dict[str, Any]:
    """`patch_knn.measure` with logistic regression."""
    return patch_knn.measure(run, "linear")


def lines(result: dict[str, Any]) -> list[Line]:
    """Both means, and the orientations."""
    return patch_knn.lines(result, by="linear classes")


PROTOCOL = dataclasses.replace(patch_knn.PROTOCOL, run=run, lines=lines)
