"""Accuracy among the classes that have examples in the split, such as ImageNet-R's 200 of 1000."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from equivit.data import sources
from equivit.evaluation import classification
from equivit.evaluation.protocol import Line, Protocol, Run, percent


def run(run: Run) -> dict[str, Any]:
    """The results of `classification.accuracy`, and "classes", the number of classes in the split."""
    pipeline = run.open()
    classes = sources.present(pipeline.source)
    allowed = np.isin(np.arange(pipeline.num_classes), classes)

    def predict(images):
        logits = run.predict(images)
        return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)

    return classification.accuracy(predict, run.batches(pipeline)) | {"classes": len(classes)}


def lines(result: dict[str, Any]) -> list[Line]:
    """One line."""
    name = f"among the {result['classes']} classes present"
    return [(name, f"{percent(result['top1'])}, top-5 {percent(result['top5'])}")]


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, curve="top1")
