"""Larger maps and pyramid pooling, beside direct definitions."""

import jax
import numpy as np
import pytest

from equivit.layers import pyramid_pooling
from equivit.layers.resizing import bilinear, unpooled


@pytest.mark.parametrize("size", [(10, 6), (5, 3), (7, 11), (3, 2)])
def test_bilinear_is_that_of_the_originals(size):
    """JAX's without antialiasing has the same centres and ends; a size that shrinks too."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
    expected = jax.image.resize(x, (2, *size, 4), "bilinear", antialias=False)
    np.testing.assert_allclose(bilinear(x, size), expected, atol=1e-6)


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
