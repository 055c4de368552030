"""Changes of predictors with known answers, and turns by any angle."""

import numpy as np
import pytest
from flax import nnx

from equivit.guarantees import measured
from tests.evaluation.predictors import brightness, corner, marked


class Given(nnx.Module):
    """A classifier by a function of pixels."""

    def __init__(self, function, scale):
        self.function, self.scale = function, scale

    def __call__(self, images):
        return self.function(np.round(255 * self.scale) * images)  # as `measure` normalises by it


def test_changes_of_predictors_with_known_answers():
    """One marked corner leaves its place in all turns, and in six of seven mirrors and turns; a count never changes."""
    images = np.repeat(marked(["upper left"]), 3, 0) * 255
    found = measured.measure(Given(lambda x: corner(x * 1.0), 1.0), images, (0.0,), (1.0,))
    assert found.by_class and found.images == 3
    kept = {name for name, change in found.motions.items() if not change.changed and "element" in name}
    assert kept == {"element 'mrrr'"} and found.groups["turns"].changed == 1 and found.groups["mirrors"].changed == 0.75
    images = np.random.default_rng(0).integers(0, 3, (2, 4, 4, 1)).astype(np.uint8)
    found = measured.measure(Given(brightness, 1.0), images, (0.0,), (1.0,))
    assert all(change.changed == 0 for change in found.groups.values())
    assert all(change.cosine == pytest.approx(1) for change in found.motions.values())


def test_any_angle_turns_the_disc():
    """Quarter turns are exact; a disc of rings does not change; a point moves anti-clockwise."""
    images = np.random.default_rng(0).integers(0, 256, (2, 12, 16, 3)).astype(np.uint8)
    for angle in (0, 30, 45):
        upright, quarter = (measured.turned(images, a, (9, 9, 9)) for a in (angle, angle + 90))
        np.testing.assert_array_equal(np.rot90(upright[:, :, 2:14], 1, (1, 2)), quarter[:, :, 2:14])
    assert (upright[:, :, :2] == 9).all() and (upright[:, 0, 2] == 9).all() and upright.dtype == np.uint8
    at = np.arange(33) - 16.0
    rings = (127 + 100 * np.cos(np.hypot(at[:, None], at) / 2)).astype(np.uint8)[None, ..., None]
    still = [measured.turned(rings, angle, (0,)).astype(int) for angle in (0, 15, 40)]
    assert max(np.abs(one - still[0]).max() for one in still) <= 4  # interpolation
    point = np.zeros((1, 33, 33, 1), np.uint8)
    point[0, 14:19, 24:29] = 255  # right of the centre
    rows, columns = np.nonzero(measured.turned(point, 45, (0,))[0, ..., 0] > 128)
    assert abs(rows.mean() - (16 - 10 / 2**0.5)) < 0.5 and abs(columns.mean() - (16 + 10 / 2**0.5)) < 0.5
