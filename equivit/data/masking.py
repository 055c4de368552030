"""Block-wise masks of patches as in BEiT, iBOT and DINOv2, on the host.

Source: BEiT (arXiv 2106.08254), Algorithm 1; the stratified ratios are from the public code of DINOv2 (2304.07193).
"""

import itertools
import math
import random

import numpy as np

ATTEMPTS = 10  # blocks drawn before giving up on a mask
MIN_PATCHES = 4  # of a block
ASPECT = (0.3, 1 / 0.3)  # of a block, height over width; its logarithm is uniform


def block_mask(rng: random.Random, grid: tuple[int, int], target: int, *, max_patches: int) -> np.ndarray:
    """Add rectangles until `target` patches are masked, or no further block fits; never more.

    Draws match the official generator in order, so that a seed gives the same mask.

    Args:
      grid: (h, w), in patches.
      max_patches: the largest area drawn; the smallest is MIN_PATCHES, and ASPECT bounds the ratio of height to width.

    Returns:
      bool [h, w].
    """
    mask, left = np.zeros(grid, bool), target
    while left > 0:
        added = _add_block(rng, mask, min(left, max_patches))
        if not added:
            break
        left -= added
    return mask


def _add_block(rng, mask, most) -> int:
    """Mask one rectangle of 1 to `most` new patches; return their number, 0 if none was found."""
    height, width = mask.shape
    for _ in range(ATTEMPTS):
        area = rng.uniform(MIN_PATCHES, most)
        ratio = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h >= height or w >= width:
            continue
        top, left = rng.randint(0, height - h), rng.randint(0, width - w)
        block = mask[top : top + h, left : left + w]
        added = h * w - int(block.sum())
        if 0 < added <= most:
            block[:] = True
            return added
    return 0


def batch_masks(
    rng: np.random.Generator,
    views: int,
    grid: tuple[int, int],
    *,
    share: float = 0.5,
    ratio: tuple[float, float] = (0.1, 0.5),
    max_patches: int | None = None,
) -> np.ndarray:
    """Masks of one group of views, whose ratios are spread evenly over their range.

    Args:
      views: number of global views.
      grid: (h, w), in patches.
      share: share of the views that are masked, rounded down; the choice is random.
      ratio: range of the masked share of patches; it is divided into one interval per masked view.
      max_patches: the largest area of a rectangle; None: half the grid.

    Returns:
      bool [views, h w].

    Raises:
      ValueError: an invalid share, or ratios out of order.
    """
    edges = _edges(views, share, ratio)
    draw, patches = random.Random(int(rng.integers(2**63))), math.prod(grid)
    most = patches // 2 if max_patches is None else max_patches
    targets = [int(patches * draw.uniform(*bounds)) for bounds in itertools.pairwise(edges)]
    masks = [block_mask(draw, grid, target, max_patches=most).reshape(-1) for target in targets]
    masks += [np.zeros(patches, bool)] * (views - len(masks))
    draw.shuffle(masks)
    return np.stack(masks)


def capacity(views: int, grid: tuple[int, int], share: float = 0.5, ratio: tuple[float, float] = (0.1, 0.5)) -> int:
    """The most patches that `batch_masks` masks: the size of a constant buffer.

    It is the sum of the largest targets, as in the official code.
    """
    return sum(int(math.prod(grid) * edge) for edge in _edges(views, share, ratio)[1:])


def _edges(views, share, ratio) -> list[float]:
    """Interval bounds of the ratios of masked views: one more than masked views."""
    if not 0 <= share <= 1:
        raise ValueError(f"masking: {share=} of the views must lie between 0 and 1.")
    low, high = ratio
    if not 0 <= low <= high <= 1:
        raise ValueError(f"masking: {ratio=} must be two shares of the patches in order, such as (0.1, 0.5).")
    return np.linspace(low, high, int(views * share) + 1).tolist()
