"""Mean IoU in all eight orientations, and the fraction of pixels with the same class in all of them.

Images are turned and predictions are turned back, so all eight predictions are comparable with each other and with one
label, of any shape.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from equivit.constraints import Size
from equivit.evaluation import label_maps, scores
from equivit.evaluation.label_maps import Views
from equivit.evaluation.predictions import measured, turned
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.evaluation.protocols import segmentation
from equivit.evaluation.protocols.orientation import TURNS
from equivit.symmetry.groups import OCTIC


def inputs(config: ConfigDict, size: Size) -> dict[str, Size]:
    """The sizes of the model's input images, upright and turned."""
    upright = segmentation.inputs(config, size)
    return upright | {f"{name}, turned by a quarter": (width, height) for name, (height, width) in upright.items()}


def run(run: Run) -> dict[str, Any]:
    """Score the predicted maps in each orientation.

    Returns "miou" by element of the group; "upright", the mIoU of the original images; "miou_mean" over the eight;
    "same", the fraction of pixels, unlabelled ones included, with the same class in all eight; "changed", the number of
    images with at least one changing pixel; "examples".

    Raises ValueError if no pixel has a label, or logits are not finite.
    """
    pipeline, views = run.open(), label_maps.settings(run.config)

    def measure(batch):
        batch = label_maps.comparable(run.model, run.predict, batch)
        size, valid = batch["map"].shape[1:], batch.get("map_size")
        seen = (label_maps.classes(_turned_back(run, batch["image"], views, g), size, valid) for g in OCTIC.elements)
        labels, finite = (jnp.stack(part) for part in zip(*seen, strict=True))
        counts = [scores.count(batch["map"], part, batch["weight"], pipeline.num_classes) for part in labels]
        return _same(labels, valid) | {"counts": jnp.stack(counts), "finite": finite}

    parts = list(measured(measure, run.batches(pipeline)))
    counts = np.array([part["counts"] for part in parts], np.int64).sum(0)
    miou = {g: scores.of_counts(table)["miou"] for g, table in zip(OCTIC.elements, counts, strict=True)}
    same, pixels = (np.concatenate([part[name][part["weight"] > 0] for part in parts]) for name in ("same", "pixels"))
    return {
        "miou": miou,
        "upright": miou["e"],
        "miou_mean": float(np.mean(list(miou.values()))),
        "same": float(same.sum() / pixels.sum()),
        "changed": int((same < pixels).sum()),
        "examples": len(same),
    }


def lines(result: dict[str, Any]) -> list[Line]:
    """Means, then the consistency of the classes."""
    each, turns = result["miou"], ("", *TURNS[1:])
    changed = f"{result['changed']} of {result['examples']} images change"
    return [
        ("mean IoU, rotated by 0, 90, 180, 270 degrees", "  ".join(percent(each[turn or "e"]) for turn in turns)),
        ("and mirrored", "  ".join(percent(each["m" + turn]) for turn in turns)),
        ("mean of the eight orientations", percent(result["miou_mean"])),
        ("pixels of the same class in all eight", f"{100 * result['same']:.2f} % ({changed})"),
    ]


def _turned_back(run: Run, images: label_maps.Array, views: Views, g: str) -> Iterator[jax.Array]:
    """Predict the logits of images turned by g, and turn them back."""
    logits = label_maps.logits(run.predict, turned(g, images), views.turned if g.count("r") % 2 else views)
    return (turned(OCTIC.inverse(g), view) for view in logits)


@jax.jit
def _same(labels, valid):
    """For each image, the number of pixels with one class in all orientations [8, B, H, W], and of all pixels."""
    same, seen = (labels == labels[0]).all(0), jnp.ones(labels.shape[1:], bool)
    if valid is not None:
        rows, columns = (jnp.arange(size) < valid[:, k, None] for k, size in enumerate(labels.shape[2:]))
        seen = rows[:, :, None] & columns[:, None]
    return {"same": (same & seen).sum((1, 2)), "pixels": seen.sum((1, 2))}


PROTOCOL = Protocol(
    needs=frozenset({"maps"}),
    run=run,
    lines=lines,
    check=label_maps.settings,
    inputs=inputs,
    curve="miou_mean",
)
