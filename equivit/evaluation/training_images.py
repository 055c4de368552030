"""Images of the training split as models take them, for what is measured on them: Sigma, and fits of taps."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from equivit.data import loader
from equivit.data.pixels import normalize


class TrainingImages:
    """Batches [B, H, W, C] of normalised images in random order, cut as for evaluation; they can be gone through again.

    Under a mesh of several processes, each gets its rows.

    Args:
      data: the `data` section of a run.
      number: how many images, at most those of the split.
      batch_size: of all processes.
      seed: of the order.
    """

    def __init__(self, data: ConfigDict, number: int, *, batch_size: int, seed: int = 0):
        self.data, self.number, self.batch_size, self.seed = data, number, batch_size, seed

    def __iter__(self) -> Iterator[np.ndarray]:
        shares, data = jax.process_count(), self.data
        options = dict(process_index=jax.process_index(), process_count=shares, seed=self.seed)
        pipeline = loader.evaluate(data, batch_size=self.batch_size, split=data.split, shuffle=True, **options)
        left = -(-self.number // shares)
        for batch in pipeline.batches():
            images: Any = batch["image"][batch["weight"] > 0][:left]
            left -= len(images)
            if len(images):
                yield np.asarray(normalize(images, tuple(data.mean), tuple(data.std)))
            if left <= 0:
                return
