"""Block masks of a group of views: ratios, shares, the buffer they fit in.  Single masks: tests/parity."""

import random

import numpy as np
import pytest

from equivit.data.masking import batch_masks, block_mask, capacity

GRID = (12, 17)


def masks(seed=0, views=24, **options):
    return batch_masks(np.random.default_rng(seed), views, GRID, **options)


@pytest.mark.parametrize(("share", "views", "masked"), [(0.5, 24, 12), (0.5, 6, 3), (0.6, 12, 7), (0.0, 24, 0)])
def test_ratios_are_spread(share, views, masked):
    group = masks(views=views, share=share, ratio=(0.2, 0.4))
    assert group.shape == (views, 204) and group.dtype == bool
    covered = np.sort(group.sum(-1))[::-1][:masked]
    assert (group.any(-1).sum() == masked) and not group.sum(-1)[np.argsort(-group.sum(-1))[masked:]].any()
    upper = 0.2 + 0.2 * np.arange(masked, 0, -1) / max(masked, 1)
    assert (covered <= 204 * upper + 1e-9).all()
    assert (covered >= 204 * (upper - 0.2 / max(masked, 1)) - 6).all()  # a mask may end a few patches short
    assert group.sum() <= capacity(views, GRID, share, (0.2, 0.4))


def test_which_views_are_masked_is_random():
    often = np.mean([masks(seed, 8).any(-1) for seed in range(200)], axis=0)
    np.testing.assert_allclose(often, 0.5, atol=0.18)  # five deviations


def test_the_seed_decides():
    np.testing.assert_array_equal(masks(3), masks(3))
    assert (masks(3) != masks(4)).any()


def test_masks_are_blocks():
    """A masked patch has a masked neighbour on each side three times in four; scattered ones rarely do."""
    drawn = masks(ratio=(0.3, 0.3), share=1.0).reshape(-1, *GRID)
    assert (drawn[:, :, 1:] & drawn[:, :, :-1]).sum() > 0.75 * drawn.sum()
    scattered = np.random.default_rng(0).permuted(drawn.reshape(24, -1), axis=-1).reshape(drawn.shape)
    assert (scattered[:, :, 1:] & scattered[:, :, :-1]).sum() < 0.4 * drawn.sum()


def test_largest_rectangle():
    sizes = [block_mask(random.Random(i), GRID, 60, max_patches=9).sum() for i in range(20)]
    assert max(sizes) <= 60 and min(sizes) > 50  # many small rectangles still reach the target
    assert not block_mask(random.Random(0), GRID, 0, max_patches=9).any()
    assert not block_mask(random.Random(0), (1, 9), 5, max_patches=9).any()  # a rectangle is smaller than the grid


@pytest.mark.parametrize(("views", "rows"), [(128, 3771), (64, 1906)])
def test_capacity_is_the_official_one(views, rows):
    assert capacity(views, (14, 14), 0.5, (0.1, 0.5)) == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ratio=(0.5, 0.1)), r"ratio=\(0.5, 0.1\) must be two shares of the patches in order"),
        (dict(share=1.5), "share=1.5 of the views must lie between 0 and 1"),
    ],
)
def test_impossible_masks_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        masks(**options)
