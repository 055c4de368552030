"""Batch norm, written out."""

import jax
import numpy as np
import pytest

from equivit import logical
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording


@pytest.fixture
def layer():
    layer = BatchNorm(3)
    layer.scale[...], layer.bias[...] = np.array([1.0, 2.0, 0.5]), np.array([0.1, 0.2, 0.3])
    return layer


X = 2 + 3 * np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)


def test_training_uses_and_records_the_statistics_of_the_batch(layer):
    rows = X.reshape(-1, 3).astype(np.float64)
    expected = (X - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5) * layer.scale[...] + layer.bias[...]
    np.testing.assert_allclose(layer(X, train=True), expected, atol=1e-5)  # float32 sums of 20 entries near 10
    np.testing.assert_allclose(layer.mean[...], 0.1 * rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.variance[...], 0.9 + 0.1 * rows.var(0, ddof=1), rtol=1e-5)


def test_evaluation_uses_the_running_statistics_and_changes_nothing(layer):
    layer.mean[...], layer.variance[...] = np.array([1.0, 2.0, 3.0]), np.array([4.0, 9.0, 1.0])
    expected = (X - [1, 2, 3]) / np.sqrt(np.array([4, 9, 1]) + 1e-5) * layer.scale[...] + layer.bias[...]
    np.testing.assert_allclose(layer(X), expected, atol=1e-5)
    np.testing.assert_array_equal(layer.mean[...], [1, 2, 3])


def test_no_variable_has_a_weak_type():
    """As a constant has, until something is added to it: then a training step would be compiled again."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: BatchNorm(3)))
    assert len(leaves) == 4 and not any(leaf.weak_type for leaf in leaves)


def test_the_gradient_goes_through_the_statistics_of_the_batch(layer):
    """A constant added to the batch changes nothing, so the gradient's sum over a channel is zero."""
    weights = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
    gradient = jax.grad(recording()(lambda x: (logical.put(layer, {})(x, train=True) * weights).sum()))(X)
    assert abs(gradient).max() > 0.1
    np.testing.assert_allclose(gradient.sum((0, 1)), 0, atol=1e-5)


def test_groups_are_batches_of_their_own(layer):
    """Each half of the batch as a layer by itself has it; running statistics move to the mean of both."""
    halves = [logical.put(layer, {}) for _ in range(2)]
    apart = [half(x, train=True) for half, x in zip(halves, np.split(X, 2), strict=True)]
    layer.groups = 2
    np.testing.assert_allclose(layer(X, train=True), np.concatenate(apart), atol=1e-6)
    for name in ("mean", "variance"):
        np.testing.assert_allclose(
            getattr(layer, name)[...], np.mean([getattr(half, name)[...] for half in halves], axis=0), rtol=1e-6
        )
    layer.groups = 3
    with pytest.raises(ValueError, match="3 groups do not divide a batch of 4; take a multiple"):
        layer(X, train=True)


def test_a_group_of_one_entry_is_refused(layer):
    """It would be normalised to zeros, whatever it is, and take the running variance to 0; a row of two is not."""
    layer.groups = 2
    with pytest.raises(ValueError, match="1 entry in a group .groups=2., which has no variance to train with; take"):
        layer(X[:2, 0], train=True)
    assert np.all(layer.variance[...] == 1)
    assert np.abs(layer(X[:2, :2], train=True) - layer.bias[...]).max() > 0.1


def test_an_empty_batch_is_refused_and_changes_nothing(layer):
    with pytest.raises(ValueError, match="no entries in a group"):
        layer(X[:0], train=True)
    assert not layer.mean[...].any()


def test_integers_are_normalised_to_floats(layer):
    np.testing.assert_array_equal(layer(X.astype(int)), layer(X.astype(int).astype(np.float32)))
