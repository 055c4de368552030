"""Larger maps and pyramid pooling, beside direct definitions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.layers.resizing import bilinear, nearest, unpooled
from equivit.models.segmenter import pyramid_pooling


@pytest.mark.parametrize("size", [(10, 6), (5, 3), (7, 11), (3, 2)])
def test_bilinear_is_that_of_the_originals(size):
    """JAX's without antialiasing has the same centres and ends; a size that shrinks too."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    expected = jax.image.resize(x, (2, *size, 4), "bilinear", antialias=False)
    np.testing.assert_allclose(bilinear(x, size), expected, atol=1e-6)


def test_nearest_is_the_entry_in_which_the_new_centre_lies():
    """Beside fractions; and a map that is filled up comes out as its own part alone."""
    maps = np.random.default_rng(0).integers(0, 99, (2, 7, 9))
    for size in ((4, 5), (14, 3), (7, 9), (1, 1)):
        rows, columns = (
            [int(Fraction(2 * i + 1, 2) * old / new) for i in range(new)] for old, new in zip((7, 9), size, strict=True)
        )
        np.testing.assert_array_equal(nearest(maps, size), maps[:, rows][:, :, columns])
    valid = np.array([[7, 9], [3, 8]])
    own = [np.asarray(nearest(maps[k : k + 1, :h, :w], (4, 5)))[0] for k, (h, w) in enumerate(valid)]
    np.testing.assert_array_equal(nearest(maps, (4, 5), valid), np.stack(own))


def test_circular_interpolation_follows_the_map():
    """Inside it is the ordinary one; a map rolled by one is rolled by a factor afterwards."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    y = np.asarray(bilinear(x, (20, 6), circular=True))
    np.testing.assert_allclose(y[:, 2:18, 1:5], bilinear(x, (20, 6))[:, 2:18, 1:5], atol=1e-6)
    np.testing.assert_allclose(bilinear(np.roll(x, (1, 2), (1, 2)), (20, 6), circular=True), np.roll(y, (4, 4), (1, 2)))
    first = 0.375 * x[:, -1, 1] + 0.625 * x[:, 0, 1]  # the centre of the first row is 3/8 of a row before the old one's
    np.testing.assert_allclose(bilinear(x, (20, 3), circular=True)[:, 0, 1], first, atol=1e-6)


def test_unpooled():
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 2, 3, 1)
    y = np.asarray(unpooled(x, (2, 3)))
    np.testing.assert_array_equal(y[:, ::2, ::3], x)
    assert y.shape == (1, 4, 9, 1) and y.sum() == x.sum()


@pytest.mark.parametrize("length", [1, 2, 5, 7, 12])
@pytest.mark.parametrize("scale", pyramid_pooling.SCALES)
def test_means(length, scale):
    parts = pyramid_pooling.means_of_parts(length, scale)
    x = np.random.default_rng(0).normal(size=length)
    expected = [x[k * length // scale : -(-(k + 1) * length // scale)].mean() for k in range(scale)]
    np.testing.assert_allclose(parts @ x, expected)
    around = pyramid_pooling.means_around(length, scale)
    np.testing.assert_allclose(around.sum(1), 1)
    np.testing.assert_allclose(around @ np.roll(x, 1), np.roll(around @ x, 1))
    assert (around > 0).sum(1).tolist() == [max(1, round(length / scale))] * length


def test_maps_of_integers_are_interpolated_to_floats():
    x = np.arange(4).reshape(1, 2, 2, 1)
    np.testing.assert_array_equal(bilinear(jnp.asarray(x), (3, 3)), bilinear(jnp.asarray(x, float), (3, 3)))
