"""Motions of maps beside motions of pixels, and the shifts that a proof tries."""

import itertools

import numpy as np
import pytest

from equivit.guarantees import motions
from equivit.guarantees.motions import Shift, Turn
from equivit.guarantees.pictures import pixels
from equivit.models.features import Grid
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

SIZE, STRIDE = (12, 10), (4, 2)


def grid(seed, offset, width=8):
    values = np.random.default_rng(seed).normal(size=(1, 3, 5, width))
    return Grid(values, STRIDE, np.array([offset], np.int32))


@pytest.mark.parametrize("motion", [*map(Turn, OCTIC.elements), Shift((1, 0)), Shift((-3, 7)), Shift((12, 4))], ids=str)
def test_a_map_moves_as_its_pixels_do(motion):
    one = grid(0, (5, 1))
    np.testing.assert_array_equal(pixels(motion.of_grid(one, None)), motion.of_images(pixels(one)[None])[0])
    back = motion.inverse.of_grid(motion.of_grid(one, OCTIC), OCTIC)
    np.testing.assert_allclose(pixels(back), pixels(one), atol=1e-12)


def test_the_channels_of_a_field_follow_the_irreps():
    """As `fields.act` on tokens; a flip field follows the mirror alone."""
    one = grid(0, (0, 0))
    for element in OCTIC.elements:
        tokens = fields.from_dense(one.values.reshape(1, 15, 8), OCTIC)
        expected = fields.to_dense(fields.act(element, tokens, grid=(3, 5)))
        np.testing.assert_allclose(Turn(element).of_grid(one, OCTIC).values.reshape(1, 15, 8), expected, atol=1e-12)
    plain = Turn("r").of_grid(one, None).values
    np.testing.assert_array_equal(Turn("r").of_grid(one, FLIP).values, plain)
    assert np.abs(Turn("m").of_grid(one, FLIP).values - Turn("m").of_grid(one, None).values).max() > 0.1


@pytest.mark.parametrize(("ours", "theirs"), [((0, 0), (0, 0)), ((5, 1), (1, 7)), ((11, 3), (2, 3)), ((4, 1), (0, 0))])
def test_overlaps_are_all_pairs_of_tokens_that_share_pixels(ours, theirs):
    """The largest difference of two maps is the largest difference of their pixels, and weights are shares of area."""
    found, expected = grid(1, ours), grid(2, theirs)
    pairs = list(motions.overlaps(found, expected))
    gaps = [np.abs(values - expected.values).max() for values, weights in pairs if weights[0]]
    assert max(gaps) == np.abs(pixels(found) - pixels(expected)).max()
    assert sum(weights[0] for _, weights in pairs) == pytest.approx(1)
    products = sum((values * expected.values).sum() * weights[0] for values, weights in pairs)
    assert products * STRIDE[0] * STRIDE[1] == pytest.approx((pixels(found) * pixels(expected)).sum())


def test_the_shifts_of_a_proof_add_up_to_every_shift():
    for stride, period in (((4, 4), (4, 4)), ((4, 2), (12, 6))):
        offsets = [shift.offset for shift in motions.shifts(stride, period)]
        assert len(set(offsets)) == len(offsets)
        for axis in (0, 1):
            along = [offset[axis] for offset in offsets if offset[1 - axis] == 0]
            sums = {(a + b) % period[axis] for a, b in itertools.product([0, *along], repeat=2)}
            assert sums == set(range(period[axis]))
    assert [turn.element for turn in motions.turns(square=False)] == ["e", "rr", "m", "mrr"]
