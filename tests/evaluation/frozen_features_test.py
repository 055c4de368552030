"""Functions of frozen features: exact whatever the chunks and the devices, ties, and probes that go on."""

import dataclasses

import jax
import numpy as np
import pytest
from sklearn import metrics

from equivit.evaluation import linear_probe, logistic, neighbours, scores
from equivit.evaluation import patch_segmentation as patches
from equivit.evaluation.linear_probe import Heads
from equivit.evaluation.neighbours import Search
from equivit.evaluation.protocols import hematology
from equivit.evaluation.protocols.knn import Neighbours

RNG = np.random.default_rng(0)
KEYS, QUERIES = RNG.normal(size=(45, 6)).astype(np.float32) + 1, RNG.normal(size=(11, 6)).astype(np.float32) + 1
KEYS[30:33] = KEYS[3]  # equal keys
LABELS = RNG.integers(0, 4, 45)
AUTO = jax.sharding.AxisType.Auto


def by_hand(distance, k):
    if distance == "L2":
        score = -np.linalg.norm(QUERIES[:, None] - KEYS, axis=-1)
    else:
        score = QUERIES @ KEYS.T / np.linalg.norm(KEYS, axis=-1)
    return np.argsort(-score, axis=1, kind="stable")[:, :k]  # of equal ones the first


@pytest.mark.parametrize("distance", ["cosine", "L2"])
def test_the_search_is_exact_in_chunks_and_on_a_mesh(distance, monkeypatch):
    monkeypatch.setattr(neighbours, "KEYS", 4)  # fewer than k, and 45 is no multiple
    monkeypatch.setattr(neighbours, "QUERIES", 8)
    wanted = by_hand(distance, 7)
    np.testing.assert_array_equal(Search(KEYS, distance)(QUERIES, 7).rows, wanted)
    for sizes in ({"data": 4, "fsdp": 2}, {"data": 8}):
        with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AUTO,) * len(sizes))):
            np.testing.assert_array_equal(Search(KEYS, distance)(QUERIES, 7).rows, wanted)
    other = {"cosine": "L2", "L2": "cosine"}[distance]
    assert (by_hand(other, 7) != wanted).any()


def test_features_that_hardly_differ_are_told_apart():
    """By 1e-5 of their length: cosines differ by 1e-10, less than float32 resolves."""
    keys, queries = 1 + 1e-5 * RNG.normal(size=(40, 8)), 1 + 1e-5 * RNG.normal(size=(9, 8))
    cosines = queries @ keys.T / np.linalg.norm(keys, axis=1)
    np.testing.assert_array_equal(Search(keys)(queries, 3).rows, np.argsort(-cosines, axis=1)[:, :3])


def test_what_a_search_refuses():
    with pytest.raises(ValueError, match=r"k=46 must be in 1\.\.45, the number of keys; the nearest is 45"):
        Search(KEYS)(QUERIES, 46)
    with pytest.raises(ValueError, match="distance='l2' is not one of cosine, L2; the nearest is 'L2'"):
        Search(KEYS, "l2")
    with pytest.raises(ValueError, match=r"the label 3 is not in 0\.\.2"):
        votes(ks=(1,), num_classes=3)
    with pytest.raises(ValueError, match=r"k=100 must be in 1\.\.45"):
        votes(ks=(10, 100))
    for queries in (QUERIES[:, :-1], QUERIES[:0]):
        with pytest.raises(ValueError, match=r"queries of shape .* must be \[Q, \d+\] as the keys"):
            votes(queries=queries, ks=(1,))


def votes(keys=KEYS, queries=QUERIES, *, ks, num_classes=4):
    (found,) = Neighbours(keys, LABELS, ks=ks, num_classes=num_classes).votes(queries)
    return found


def test_votes_do_not_depend_on_the_length_of_features():
    found = votes(ks=(1, 7))
    np.testing.assert_allclose(found, votes(3 * KEYS, QUERIES / 2, ks=(1, 7)), atol=1e-6)
    np.testing.assert_allclose(found[1].sum(-1), 1, atol=1e-6)  # of all neighbours that the softmax is over
    assert (found[0] > 0).sum() == len(QUERIES) and (found[0].sum(-1) < 1).all()


def tokens(steps=6):
    """Class tokens of four blocks, patch tokens and labels."""
    classes, means = RNG.normal(size=(steps, 4, 8, 5)), RNG.normal(size=(steps, 8, 3, 5))
    return list(zip(classes.astype(np.float32), means.astype(np.float32), RNG.integers(0, 3, (steps, 8)), strict=True))


HEADS = Heads(num_classes=3, base_rates=(0.1, 1.0), batch_size=256, steps=6)


def test_a_probe_that_is_cut_off_goes_on_to_the_same_numbers(tmp_path):
    batches = tokens()
    whole = linear_probe.fit(batches, HEADS)

    def save(step, state):
        if step == 3:
            np.savez(tmp_path / "state.npz", **state)

    with pytest.raises(ValueError, match="there are 4 batches, and steps=6"):
        linear_probe.fit(batches[:4], HEADS, watch=save)
    with np.load(tmp_path / "state.npz") as state:
        rest = linear_probe.fit(batches[3:], HEADS, state=state)
    np.testing.assert_array_equal(rest.losses, whole.losses)
    for number in range(len(HEADS.names)):
        np.testing.assert_array_equal(rest.head(number)[0], whole.head(number)[0])
    assert (linear_probe.fit(batches, HEADS, key=jax.random.key(1)).losses != whole.losses).all()


def test_a_probe_on_a_mesh_equals_one_device():
    batches = tokens()
    alone = linear_probe.fit(batches, HEADS).losses
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AUTO, AUTO))
    rows = jax.sharding.PartitionSpec(("data", "fsdp"))
    specs = jax.sharding.PartitionSpec(None, *rows), rows, rows
    placed = [
        tuple(jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(batch, specs, strict=True))
        for batch in batches
    ]
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(linear_probe.fit(placed, HEADS).losses, alone, rtol=1e-5)


def test_what_a_probe_refuses():
    batches = tokens()
    with pytest.raises(ValueError, match=r"the label 2 is not in 0\.\.1"):
        linear_probe.fit(batches, dataclasses.replace(HEADS, num_classes=2))
    with pytest.raises(ValueError, match=r"blocks=5 must be in 1\.\.4"):
        linear_probe.fit(batches, dataclasses.replace(HEADS, blocks=(1, 5)))
    with pytest.raises(ValueError, match=r"n1_avg0_lr0.1, n1_avg0_lr0.1, .* must differ"):
        dataclasses.replace(HEADS, base_rates=(0.1, 0.1000000001))
    with pytest.raises(ValueError, match=r"base_rates=\(\), blocks=\(1, 4\) and .* make no head"):
        dataclasses.replace(HEADS, base_rates=())
    with pytest.raises(ValueError, match=r"initial\['n1_avg0_lr.*'\] is missing and must be \[\d+, \d+\]"):
        linear_probe.fit(batches, HEADS, initial={})


def test_the_regression_is_where_the_gradient_vanishes():
    """Also on a mesh, whose devices the number of rows does not divide."""
    alone = logistic.fit(KEYS, LABELS, C=2.0)
    shares, truth = alone.probabilities(KEYS), LABELS[:, None] == alone.classes
    # A loss in float32 has eps 1.2e-7, so it stops changing where the gradient is about the root of that.
    left = 2 * len(KEYS) * alone.gradient  # that of the sum over examples, twice for rounding
    np.testing.assert_allclose((shares - truth).T @ KEYS, -alone.coef / 2.0, atol=left)
    np.testing.assert_allclose((shares - truth).sum(0), 0, atol=left)
    assert alone.gradient < 3.5e-4 and 5 < alone.iterations < logistic.ITERATIONS
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AUTO,))):
        np.testing.assert_allclose(logistic.fit(KEYS, LABELS, C=2.0).coef, alone.coef, atol=1e-4)


def test_the_most_frequent_label_is_the_smallest_of_several():
    labels = np.array([[3, 3, 9, 1], [1, 1, 9, 1], [0, 7, 7, 7]])[None]
    np.testing.assert_array_equal(patches.majority(labels, (1, 4)), [[[3], [1], [7]]])
    np.testing.assert_array_equal(patches.majority(labels[:, :2], (2, 2)), [[[1, 1]]])
    with pytest.raises(ValueError, match="patches of 2x4 do not divide maps of 3x4"):
        patches.majority(labels, (2, 4))


def test_a_pixel_gets_the_label_of_the_same_pixel_of_its_neighbours():
    features = np.array([0.0, 0.1, 0.2, 5.0]).reshape(1, 2, 2, 1) + [[[[1.0, 0]]]] * np.ones((1, 2, 2, 2))
    labels = np.arange(4 * 6).reshape(1, 4, 6) // 2  # patches of 2x3 pixels
    found = patches.knn(features, labels, features[:, :1], ks=(1, 3), distances=("L2",), ignore=())
    np.testing.assert_array_equal(found["L2", 1], labels[:, :2])
    near = labels.reshape(2, 2, 2, 3).swapaxes(1, 2).reshape(4, 2, 3)[:3]  # the three of both queries
    assert (found["L2", 3].reshape(2, 2, 3)[:, 0] == near.min(0)).all()  # all differ, so the smallest


def test_constant_channels_are_not_scaled():
    features = RNG.normal(size=(3, 2, 5, 4)).astype(np.float32)
    features[..., 2] = 0.1
    mean, scale = patches.standardise(features)
    assert scale[2] == 1 and mean[2] == np.float32(0.1)
    np.testing.assert_allclose(scale[:2], features.std((0, 1, 2))[:2], rtol=1e-5)


def test_classification_scores_are_those_of_scikit_learn():
    true, predicted = RNG.integers(0, 5, 60), RNG.integers(0, 7, 60)  # two are never true
    found = scores.classification(true, predicted)
    wanted = {
        "accuracy": metrics.accuracy_score(true, predicted),
        "weighted_f1": metrics.f1_score(true, predicted, average="weighted", zero_division=0),
        "balanced_accuracy": np.mean([(predicted[true == k] == k).mean() for k in range(5)]),
    }
    assert found == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"classification: \[60\] true classes and \[59\] predicted"):
        scores.classification(true, predicted[1:])


def test_rare_classes_and_intervals():
    true = np.repeat([0, 1, 5], [40, 30, 2])
    predicted = true.copy()
    predicted[[0, 1, 2, 3, 70]] = 1
    found = hematology.scored(true, predicted)
    assert found["balanced_accuracy"] == pytest.approx((0.9 + 1 + 0.5) / 3)
    assert found["balanced_accuracy_common"] == pytest.approx((0.9 + 1) / 2)
    low, high = found["intervals"]["balanced_accuracy"]
    few, many = found["intervals"]["balanced_accuracy_common"]
    assert low < found["balanced_accuracy"] < high and high - low > 3 * (many - few)  # two images decide
    assert hematology.scored(true[-2:], predicted[-2:])["balanced_accuracy_common"] is None


def test_neighbours_of_cells_vote_alike_and_the_smallest_class_wins():
    features = np.repeat(np.arange(4.0), 10)[:, None]  # the 20 nearest of 0.4 are at 0 and 1: a tie
    found = hematology.Classifiers(features, np.repeat([8, 2, 5, 7], 10)).predict(np.array([[0.4], [2.6]]))
    assert found["knn1"].tolist() == [8, 7] and found["knn20"].tolist() == [2, 5]
    with pytest.raises(ValueError, match=r"k=20 must be in 1\.\.19"):
        hematology.Classifiers(features[:19], np.arange(19))
