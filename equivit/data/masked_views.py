"""Crops of an image, with patch masks for the global crops: the batches of DINOv2."""

from typing import Any

import ml_collections
import numpy as np

from equivit.data import masking
from equivit.data.batches import Batch, Share
from equivit.data.views import Views


class MaskedViews(Views):
    """`Views` with "masks" in each batch, bool [B, 2, N], True where a patch is masked.

    The masks of a group are drawn together, with ratios spread evenly over its masked crops (`masking.batch_masks`).
    With n micro-batches, each of which takes every n-th image, this holds within each micro-batch, so that all have the
    same largest number of masked patches.

    Args:
      config: the `data` section.
      channels: channels of the images.
      grid: (h, w), the patches of a global crop; N = h w.
      share: share of the crops that are masked.
      ratio: smallest and largest masked share of such a crop's patches.
      groups: number of groups of consecutive images.
      micro_batches: `optimizer.accumulation`.
      largest: most patches in one rectangle; None: half of the grid.
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
        super().__init__(config, channels)
        self.grid, self.groups, self.micro_batches = grid, groups, micro_batches
        self.options: dict[str, Any] = dict(share=share, ratio=ratio, max_patches=largest)

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
