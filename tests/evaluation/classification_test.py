"""Accuracy of predictors whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.evaluation.classification import accuracy
from tests.evaluation.predictors import batches


def ranked(classes):
    """A predictor that ranks the classes k, k + 1, ..., modulo `classes`, where k is the first pixel."""

    def predict(images):
        first = images[:, 0, 0, 0].astype(jnp.int32)
        return -((jnp.arange(classes) - first[:, None]) % classes).astype(jnp.float32)

    return predict


def images(first):
    return np.array(first, np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 2, 3, 1), np.uint8)


def test_top1_and_top5_count_ranks_and_leave_out_padding():
    ranks = np.array([0, 0, 1, 4, 5, 9, 4])  # of the label; 7 examples in batches of 3: two rows of padding
    firsts = np.arange(7)
    result = accuracy(ranked(10), batches(images(firsts), (firsts + ranks) % 10))
    loss = np.log(np.exp(-np.arange(10)).sum()) + ranks.mean()  # logits are minus the ranks
    expected = {"top1": 2 / 7, "top5": 5 / 7, "examples": 7, "loss": loss}
    assert result == {name: pytest.approx(value) for name, value in expected.items()}


def test_fewer_than_five_classes():
    result = accuracy(ranked(3), batches(images([0, 1, 2, 0]), np.array([0, 1, 0, 2])))
    loss = np.log(np.exp(-np.arange(3)).sum()) + 3 / 4  # ranks 0, 0, 1 and 2
    assert result == {"top1": 0.5, "top5": 1.0, "examples": 4, "loss": pytest.approx(loss)}


def test_sharded_over_a_mesh_equals_one_device():
    labels = np.arange(21) % 7
    data = batches(images(np.arange(21) % 10), labels, size=16)
    alone = accuracy(ranked(10), data)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        seen = []

        def predict(images):
            seen.append(len(images.sharding.device_set))
            return ranked(10)(images)

        assert accuracy(predict, data) == alone
        assert seen == [8, 8]


def test_not_finite_logits_are_refused_but_padding_may_be():
    def predict(images):
        return jnp.where(images[:, 0, 0, :1] == 0, jnp.nan, 1.0) * jnp.ones(4)

    assert accuracy(predict, batches(images([1, 2]), np.zeros(2)))["examples"] == 2
    with pytest.raises(ValueError, match="NaN or infinite"):
        accuracy(predict, batches(images([1, 0]), np.zeros(2)))


def test_no_example_is_refused():
    data = batches(images([1, 2, 3]), np.zeros(3))
    data[0]["weight"][:] = 0
    with pytest.raises(ValueError, match="no readable examples"):
        accuracy(ranked(4), data)
