"""Block-wise masks of patches as in BEiT, iBOT and DINOv2, on the host.

Source: BEiT (arXiv 2106.08254), Algorithm 1; the stratified ratios are from the public code of DINOv2 (2304.07193).
"""

import math
import random

import numpy as np

from equivit import errors

ATTEMPTS = 10  # blocks drawn before giving up on a mask


def block_mask(
    rng: random.Random,
    grid: tuple[int, int],
    target: int,
    *,
    max_patches: int,
    min_patches: int = 4,
    aspect: tuple[float, float] = (0.3, 1 / 0.3),
) -> np.ndarray:
    """Add rectangles until `target` patches are masked, or no further block fits; never more.

    Draws match the official generator in order, so that a seed gives the same mask.

    Args:
      grid: (h, w), in patches.
      max_patches: the largest area drawn.
      min_patches: the smallest area drawn.
      aspect: range of the aspect ratio, height over width; its logarithm is uniform.

    Returns:
      bool [h, w].
    """
    mask, left = np.zeros(grid, bool), target
    while left > 0:
        added = _add_block(rng, mask, min(left, max_patches), min_patches, aspect)
        if not added:
            break
        left -= added
    return mask


def _add_block(rng, mask, most, least, aspect) -> int:
    """Mask one rectangle of 1 to `most` new patches; return their number, 0 if none was found."""
    height, width = mask.shape
    for _ in range(ATTEMPTS):
        area = rng.uniform(least, most)
        ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
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
    groups: int = 1,
    max_patches: int | None = None,
) -> np.ndarray:
    """Masks of one batch.  Within each group of consecutive views, ratios are spread evenly over their range.

    Args:
      views: number of global views; [B, 2] flattened if groups are of images.
      grid: (h, w), in patches.
      share: share of a group's views that are masked, rounded down; the choice is random.
      ratio: range of the masked share of patches; it is divided into one interval per masked view.
      groups: number of groups of views.
      max_patches: the largest area of a rectangle; None: half the grid.

    Returns:
      bool [views, h w].

    Raises:
      ValueError: an invalid share, ratios out of order, or groups that do not divide the views.
    """
    edges = _edges(views, share, ratio, groups)
    draw, patches = random.Random(int(rng.integers(2**63))), math.prod(grid)
    most = patches // 2 if max_patches is None else max_patches
    masks = []
    for _ in range(groups):
        targets = [int(patches * draw.uniform(*bounds)) for bounds in zip(edges, edges[1:], strict=False)]
        group = [block_mask(draw, grid, target, max_patches=most).reshape(-1) for target in targets]
        group += [np.zeros(patches, bool)] * (views // groups - len(group))
        draw.shuffle(group)
        masks += group
    return np.stack(masks)


def capacity(
    views: int, grid: tuple[int, int], share: float = 0.5, ratio: tuple[float, float] = (0.1, 0.5), groups: int = 1
) -> int:
    """The most patches that `batch_masks` masks, in all groups together: the size of a constant buffer.

    It is the sum of the largest targets, as in the official code.  The share of each group is `capacity(views //
    groups, ...)`.
    """
    upper = _edges(views, share, ratio, groups)[1:]
    return groups * sum(int(math.prod(grid) * edge) for edge in upper)


def _edges(views, share, ratio, groups) -> list[float]:
    """Interval bounds of the ratios of a group's masked views: one more than masked views."""
    if not 0 <= share <= 1:
        raise ValueError(f"masking: {share=} of the views must lie between 0 and 1.")
    low, high = ratio
    if not 0 <= low <= high <= 1:
        raise ValueError(f"masking: {ratio=} must be two shares of the patches in order, such as (0.1, 0.5).")
    errors.divides("masking: groups", groups, views, f"the {views} views")
    return np.linspace(low, high, int(views // groups * share) + 1).tolist()
