"""Confusion matrix (PNG, CSV), accuracy and F1 of each class, worst mistakes as a contact sheet."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from equivit.evaluation import confusion
from equivit.evaluation.predictions import by_example
from equivit.evaluation.protocol import Line, Protocol, Run, percent

SHOWN = 10  # classes, and pairs of classes, in the printed lines
SIDE = 192  # pixels of an image in the contact sheet


def run(run: Run) -> dict[str, Any]:
    """The results of `confusion.scores`, and the worst "mistakes": image, true and predicted class, probability."""
    pipeline = run.open()

    def measure(batch):
        logits = run.predict(batch["image"])
        shares = jax.nn.softmax(logits)
        finite, best = jnp.isfinite(logits).all(-1), logits.argmax(-1)
        return dict(label=batch["label"], index=batch["index"], predicted=best, share=shares.max(-1), finite=finite)

    found = by_example(measure, run.batches(pipeline))
    labels, predicted, names = found["label"], found["predicted"], confusion.distinct(pipeline.classes)
    worst = [
        {
            "image": pipeline.source.where(index := int(found["index"][k])),
            "index": index,
            "true": names[labels[k]],
            "predicted": names[predicted[k]],
            "probability": float(found["share"][k]),
        }
        for k in confusion.mistakes(labels, predicted, found["share"]).tolist()
    ]
    return confusion.scores(labels, predicted, names) | {"mistakes": worst}


def opens(run: Run) -> None:
    """ValueError for data whose examples have several labels."""
    if run.open().shapes()["label"].ndim > 1:
        raise ValueError(
            f"evaluation.suite: 'confusion' needs one label for each image, and {run.data.source} has images with "
            "several; leave it out."
        )


def lines(result: dict[str, Any]) -> list[Line]:
    """The means, the classes of lowest accuracy, and the pairs that are confused most often."""
    known = {name: row["accuracy"] for name, row in result["classes"].items() if row["accuracy"] is not None}
    lowest = sorted(known, key=lambda name: known[name])[:SHOWN]
    pairs = [
        (number, name, other)
        for name, row in result["counts"].items()
        for other, number in row.items()
        if other != name
    ]
    often = sorted(pairs, key=lambda pair: -pair[0])[:SHOWN]
    found = [("accuracy, and mean F1", f"{percent(result['accuracy'])}, {percent(result['f1'])}")]
    found.append(("lowest accuracy of a class", ", ".join(f"{name} {percent(known[name])}" for name in lowest)))
    if often:
        found.append(("confused most", ", ".join(f"{name} as {other} {number}" for number, name, other in often)))
    return found


def figure(run: Run, result: dict[str, Any], path: pathlib.Path) -> None:
    """Draw the confusion matrix; beside it write its table and draw the worst mistakes."""
    from equivit.evaluation import figures  # local import: matplotlib is slow

    if jax.process_index() != 0:
        return
    figures.confusion(confusion.matrix(result["counts"]), list(result["counts"]), path)
    confusion.write(result["counts"], path.with_suffix(".csv"))
    if result["mistakes"]:
        pipeline = run.open()
        tiles = [_tile(pipeline.read(mistake["index"]).example["image"]) for mistake in result["mistakes"]]
        titles = [
            f"{mistake['true']}\n{mistake['predicted']} {mistake['probability']:.0%}\n{_name(mistake['image'])}"
            for mistake in result["mistakes"]
        ]
        figures.contact_sheet(
            tiles, titles, "True class, predicted class, image", path.with_name(f"{path.stem}_mistakes.png")
        )


def _tile(image: Image.Image) -> np.ndarray:
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)


def _name(place: str) -> str:
    return pathlib.PurePath(place).name


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, opens=opens, figure=figure)
