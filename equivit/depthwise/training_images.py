"""Normalised images of the training split or another, for measuring Sigma, fitting taps and comparing models."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from equivit.data import loader
from equivit.data.pixels import normalize


class TrainingImages:
    """Iterable over batches [B, H, W, C] of normalised images in random order, cropped as for evaluation.

    It can be iterated repeatedly.

    Args:
      data: the `data` section of a run.
      number: number of images; a smaller split yields all of its images.
      split: None: `data.split`.
      seed: seed of the order.
      workers: number of reader processes; 0: threads (`loader.train`).
    """

    def __init__(
        self,
        data: ConfigDict,
        number: int,
        *,
        batch_size: int,
        split: str | None = None,
        seed: int = 0,
        workers: int = 0,
    ):
        self.data, self.number, self.batch_size, self.seed, self.workers = data, number, batch_size, seed, workers
        self.split = split

    @property
    def found(self) -> int:
        """The number of images: `number`, or all of a smaller split."""
        return min(self.number, self._pipeline().num_examples)

    def _pipeline(self) -> loader.EvaluationPipeline:
        options: dict[str, Any] = dict(shuffle=True, seed=self.seed, workers=self.workers)
        return loader.evaluate(self.data, batch_size=self.batch_size, split=self.split or self.data.split, **options)

    def __iter__(self) -> Iterator[np.ndarray]:
        data = self.data
        left = self.number
        for batch in self._pipeline().batches():
            images: Any = batch["image"][batch["weight"] > 0][:left]
            left -= len(images)
            if len(images):
                yield np.asarray(normalize(images, tuple(data.mean), tuple(data.std)))
            if left <= 0:
                return
