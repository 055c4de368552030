"""Mean intersection over union of label maps (--config.evaluation.segmentation.KEY=VALUE)."""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit.constraints import Size
from equivit.evaluation import confusion, label_maps, scores
from equivit.evaluation.predictions import measured
from equivit.evaluation.protocol import Line, Protocol, Run, percent

SHOWN = 4  # examples in the figure


def inputs(config: ConfigDict, size: Size) -> dict[str, Size]:
    """The sizes of the model's input images (`label_maps.sizes`)."""
    return label_maps.sizes(label_maps.settings(config), size)


def run(run: Run) -> dict[str, Any]:
    """Score the predicted maps, each at the size of its label or of the logits (`label_maps.comparable`).

    Returns "miou", "miou_official" and "accuracy" as `scores.of_counts`; "iou" by class name, None for a class in no
    map; "examples".

    Raises ValueError if no pixel has a label, or logits are not finite.
    """
    pipeline, views = run.open(), label_maps.settings(run.config)

    def measure(batch):
        batch = label_maps.comparable(run.model, run.predict, batch)
        labels, finite = label_maps.predicted(run.predict, batch, views)
        counts = scores.count(batch["map"], labels, batch["weight"], pipeline.num_classes)
        return {"counts": counts, "finite": finite}

    counts, examples = np.zeros((pipeline.num_classes,) * 2, np.int64), 0
    for part in measured(measure, run.batches(pipeline)):
        counts += part["counts"]
        examples += int((part["weight"] > 0).sum())
    return by_name(scores.of_counts(counts), pipeline.classes) | {"examples": examples}


def by_name(found: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """Key "iou" of the scores by class name (`confusion.distinct`)."""
    values = [None if np.isnan(iou) else float(iou) for iou in found["iou"]]
    return found | {"iou": dict(zip(confusion.distinct(classes), values, strict=True))}


def lines(result: dict[str, Any]) -> list[Line]:
    """The means, then each class."""
    seen = [iou for iou in result["iou"].values() if iou is not None]
    accuracy = f"{percent(result['accuracy'])} of the pixels ({result['examples']} images)"
    found = [("mean IoU", f"{percent(result['miou'])} of {len(seen)} classes"), ("right class", accuracy)]
    for name, iou in result["iou"].items():
        found.append((f"IoU of {name}", "in no map" if iou is None else percent(iou)))
    return found


def figure(run: Run, result: dict[str, Any], path: pathlib.Path) -> None:
    """Draw some images of the split, chosen by the run's seed, with their true and predicted maps."""
    from equivit.evaluation import figures  # local import: matplotlib is slow

    # The same batch shape as in `run` reuses its compiled program.
    pipeline, views = run.open(shuffle=True), label_maps.settings(run.config)
    untracked = dataclasses.replace(run, track=None)

    def predict(batch):
        labels, finite = label_maps.predicted(run.predict, batch, views)
        shown = {name: batch[name] for name in ("image", "map", "map_size") if name in batch}
        return shown | {"predicted": labels, "finite": finite}

    examples, number = [], -(-SHOWN // pipeline.share.batch_size)
    for found in measured(predict, itertools.islice(untracked.batches(pipeline), number)):
        examples += [_example(found, row) for row in np.flatnonzero(found["weight"] > 0)]
    if jax.process_index() == 0:
        figures.label_maps(examples[:SHOWN], pipeline.classes, path)


def _example(batch, row):
    """The image [H, W, C], the true and the predicted map, without padding."""
    height, width = batch["map_size"][row] if "map_size" in batch else batch["map"].shape[1:]
    return batch["image"][row], *(batch[name][row, :height, :width] for name in ("map", "predicted"))


PROTOCOL = Protocol(
    needs=frozenset({"maps"}),
    run=run,
    lines=lines,
    check=label_maps.settings,
    inputs=inputs,
    curve="miou",
    default=True,
    figure=figure,
)
