"""Block-wise masks of patches, as BEiT, iBOT and DINOv2 draw them, on the host.

Source: BEiT (arXiv 2106.08254), Algorithm 1; the stratified ratios are DINOv2's (2304.07193), in its public code.
"""

import math
import random

import numpy as np

from equivit import errors

ATTEMPTS = 10  # blocks drawn before a mask is left as it is


def block_mask(
    rng: random.Random,
    grid: tuple[int, int],
    target: int,
    *,
    max_patches: int,
    min_patches: int = 4,
    aspect: tuple[float, float] = (0.3, 1 / 0.3),
) -> np.ndarray:
    """Rectangles until `target` patches are masked, or no further block fits; never more.

    The same draws as the official generator in the same order, so that a seed gives the same mask.

    Args:
      grid: (h, w), in patches.
      max_patches: the largest area that is drawn.
      min_patches: the smallest.
      aspect: range of height over width; their logarithm is uniform.

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
    """Mask one rectangle that covers 1 to `most` new patches; returns how many, 0 if none was found."""
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
    """Masks of one batch.  Within each group of consecutive views the ratios are spread evenly over their range.

    Args:
      views: number of global views; [B, 2] in a row, if groups are of images.
      grid: (h, w), in patches.
      share: of the views of a group that are masked, rounded down; which, is random.
      ratio: range of the share of patches that a mask covers; it is cut into as many parts as views are masked.
      groups: number of groups of views.
      max_patches: the largest area of one rectangle; None: half the grid.

    Returns:
      bool [views, h w].

    Raises:
      ValueError: a share that is none, ratios out of order, or groups that do not divide the views.
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
    views: int,
    grid: tuple[int, int],
    share: float = 0.5,
    ratio: tuple[float, float] = (0.1, 0.5),
    groups: int = 1,
) -> int:
    """The number of patches that `batch_masks` masks at most, in all groups together: the size of a constant buffer.

    The sum of the largest targets, as in the official code.  Each group has the same share of it, which is
    `capacity(views // groups, ...)`.
    """
    upper = _edges(views, share, ratio, groups)[1:]
    return groups * sum(int(math.prod(grid) * edge) for edge in upper)


def _edges(views, share, ratio, groups) -> list[float]:
    """The bounds of the ratios of the masked views of a group, one more than there are masked views."""
    if not 0 <= share <= 1:
        raise ValueError(f"masking: {share=} of the views must lie between 0 and 1.")
    low, high = ratio
    if not 0 <= low <= high <= 1:
        raise ValueError(f"masking: {ratio=} must be two shares of the patches in order, such as (0.1, 0.5).")
    errors.divides("masking: groups", groups, views, f"the {views} views")
    return np.linspace(low, high, int(views // groups * share) + 1).tolist()
