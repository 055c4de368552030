"""Norms of patch tokens: of each block, and on the image that they belong to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import testing
from equivit.evaluation.patch_norms import outlier_share, patch_norms
from tests.evaluation.predictors import random_model


def test_norms_are_those_of_the_tokens_of_a_block():
    m, x = random_model("plain", in_channels=3), jax.random.normal(jax.random.key(0), (2, 12, 20, 3))
    features = jax.jit(lambda m, x: m.features(x, blocks=(0, 1), norm=False))(m, x)
    for block in (0, 1, -1, -2):
        expected = np.linalg.norm(features.blocks[block % 2].patches.values, axis=-1)
        found = patch_norms(m, x, block)
        np.testing.assert_allclose(found.values[..., 0], expected, rtol=1e-5)
        assert found.stride == (4, 4) and not found.offset.any()
    with pytest.raises(IndexError, match="there is no block 2"):
        patch_norms(m, x, 2)


def test_norms_of_an_adaptive_model_move_with_the_image():
    m = random_model("plain", in_channels=3, image_size=(12, 20), adaptive=True)
    pixels = jax.jit(lambda x: patch_norms(m, x).pixels())
    x = jax.random.normal(jax.random.key(0), (2, 12, 20, 3))
    testing.assert_shift_equivariant(pixels, x, output="image", tol=0)


def test_outliers_are_what_stands_out():
    norms = jnp.array([1.0, 1.0, 1.1, 0.9, 2.9, 3.2])  # median 1.05
    assert float(outlier_share(norms)) == pytest.approx(1 / 6)
