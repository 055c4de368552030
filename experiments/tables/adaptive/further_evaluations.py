"""Tables A9 to A12 of shift-equivariant ViTs: further evaluations of trained runs.

Conditions: "ranges", circular shifts in the four ranges of Table A11; "erased 28", 42, 56 and 70, a square of each
image is erased, its side uniform from 0 to that many pixels; "flipped", images are upside down; "adapted", the model is
made adaptive as it is (`models.adapt`).

The paper gives neither place nor content of the squares: here they lie anywhere inside the image and hold the mean
colour.  They depend only on the image's position in the split, so that all models see the same images.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from equivit import models
from equivit.data import loader
from equivit.evaluation import consistency, predictions
from equivit.evaluation.consistency import FRACTIONS, Shifts
from experiments.tables import finished_runs

FILE = "adaptive_conditions.json"  # in the directory of a run
Batch = Mapping[str, np.ndarray]


def erased(most: int, batch: Batch, fill: np.ndarray) -> Batch:
    """Images uint8 [B, H, W, C] with a square of up to `most` pixels a side filled by a colour [C].

    Raises ValueError where it may not fit.
    """
    images = np.array(batch["image"])
    if most > min(images.shape[1:3]):
        raise ValueError(f"erased {most}: the squares do not fit in images of {images.shape[1]}x{images.shape[2]}.")
    for image, index in zip(images, batch["index"], strict=True):
        rng = np.random.default_rng([most, index + 1])  # padding is at -1
        side = rng.integers(0, most, endpoint=True)
        top, left = (rng.integers(0, size - side, endpoint=True) for size in image.shape[:2])
        image[top : top + side, left : left + side] = fill
    return {**batch, "image": images}


def flipped(batch: Batch, fill: np.ndarray) -> Batch:
    return {**batch, "image": np.array(batch["image"])[:, ::-1]}


CONDITIONS = {"ranges": None, "flipped": flipped, "adapted": None}  # changes of the images
CONDITIONS |= {f"erased {most}": functools.partial(erased, most) for most in (28, 42, 56, 70)}


def read(run: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The earlier results of `consistency.consistency` for a run, by condition."""
    return finished_runs.evaluations(run / FILE, "conditions")


def evaluate(run: pathlib.Path, conditions: list[str]) -> None:
    """Evaluate a finished run in the missing conditions; each result is written at once."""

    def measure(condition, config, model):
        print(f"{run}: {condition}", flush=True)
        kept = models.adapt(model) if condition == "adapted" else model
        predict = predictions.predictor(kept, config.data.mean, config.data.std, config.precision)
        stream = loader.evaluate(config.data, batch_size=config.batch_size, seed=config.seed).batches()
        fill = np.round(255 * np.array(config.data.mean)).astype(np.uint8)
        if (change := CONDITIONS[condition]) is not None:
            stream = (change(batch, fill) for batch in stream)
        ranges, shift = tuple(FRACTIONS) if condition == "ranges" else ("full",), config.evaluation.shift
        settings = Shifts(ranges=ranges, pairs=shift.pairs, seed=shift.seed)
        return consistency.consistency(predict, stream, settings, size=tuple(config.data.image_size))

    finished_runs.evaluate(run / FILE, "conditions", conditions, measure)
