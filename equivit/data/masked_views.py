"""Crops of an image, with masks for the patches of the global ones: the batches of DINOv2."""

from typing import Any

import ml_collections
import numpy as np

from equivit.data import masking
from equivit.data.batches import Batch, Row, Share
from equivit.data.views import Views


class MaskedViews:
    """`Views`, and in each batch "masks", bool [B, 2, N], True where a patch is masked.

    The masks of a group are drawn for all of its crops together, with ratios spread evenly over those that get one
    (`masking.batch_masks`).  With several micro-batches, each of which takes every so-many-th image, that holds within
    each of them, so that all have as many masked patches at most.

    Args:
      config: the `data` section.
      channels: of the images.
      grid: (h, w), the patches of a global crop; N = h w.
      share: share of the crops that are masked.
      ratio: smallest and largest share of the patches of such a crop.
      groups: runs of consecutive images.
      micro_batches: `optimizer.accumulation`.
      largest: most patches of one rectangle; None: half of the grid.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        channels: int,
        *,
        grid: tuple[int, int],
        share: float,
        ratio: tuple[float, float],
        groups: int,
        micro_batches: int = 1,
        largest: int | None = None,
    ):
        self.views, self.grid, self.groups, self.micro_batches = Views(config, channels), grid, groups, micro_batches
        self.options: dict[str, Any] = dict(share=share, ratio=ratio, max_patches=largest)

    def __call__(self, example: Row, rng: np.random.Generator) -> Row:
        """The crops of one image."""
        return self.views(example, rng)

    def finish(self, batch: Batch, rng: np.random.Generator, share: Share) -> Batch:
        """The batch with its masks."""
        size, parts = share.batch_size // self.groups, self.micro_batches
        rngs = rng.spawn(self.groups)
        whole = range(share.rows.start // size, -(-share.rows.stop // size))  # the groups of this process's images
        masks = np.concatenate([self._masks(rngs[group], size // parts) for group in whole])
        start = share.rows.start - whole.start * size
        return {**batch, "masks": masks[start : start + share.size]}

    def _masks(self, rng, images):
        """The masks of a group, bool [images * micro-batches, 2, N]."""
        parts = [
            masking.batch_masks(one, 2 * images, self.grid, **self.options) for one in rng.spawn(self.micro_batches)
        ]
        return np.stack([part.reshape(images, 2, -1) for part in parts], axis=1).reshape(-1, 2, parts[0].shape[-1])
