"""Scores of label maps: counts worked out by hand, scikit-learn's, and what never counts."""

import jax
import numpy as np
import pytest
from sklearn import metrics

from equivit.data.crops import VOID
from equivit.evaluation import scores

TRUE = np.array([[0, 0, 1, 1], [0, 2, 1, VOID], [2, 2, VOID, VOID]])
PREDICTED = np.array([[0, 1, 1, 1], [0, 2, 2, 0], [2, 0, 3, 1]])
# By hand: class 0 is right twice, and in 4 pixels of either map; 1 twice of 4; 2 twice of 4; void hides class 3.


def segmentation(true=TRUE, predicted=PREDICTED, **options):
    return scores.segmentation(true, predicted, **dict(num_classes=4) | options)


def test_intersections_and_unions_by_hand():
    found = segmentation()
    np.testing.assert_array_equal(found["iou"], [2 / 4, 2 / 4, 2 / 4, np.nan])
    assert (found["miou"], found["miou_official"], found["accuracy"]) == (0.5, 0.5, 6 / 9)


def test_a_class_that_is_only_predicted_or_only_true_counts_as_zero():
    only_predicted = segmentation([[0, 0]], [[0, 1]])
    np.testing.assert_array_equal(only_predicted["iou"], [0.5, 0, np.nan, np.nan])
    only_true = segmentation([[0, 1]], [[0, 0]])
    np.testing.assert_array_equal(only_true["iou"], [0.5, 0, np.nan, np.nan])
    assert only_predicted["miou"] == only_true["miou"] == 0.25


def test_ignored_classes_are_left_out_and_their_pixels_never_count():
    found = segmentation(ignore=(2,))
    # Without the three pixels of class 2: class 0 is right in 2 of 3, class 1 in 2 of 4; one pixel of 1 is called 2.
    np.testing.assert_array_equal(found["iou"], [2 / 3, 2 / 4, np.nan, np.nan])
    assert found["miou"] == pytest.approx((2 / 3 + 2 / 4) / 2) and found["accuracy"] == 4 / 6
    assert found["miou_official"] == pytest.approx((2 / 3 + 2 / 4 + 0) / 3)  # CAPI: 2 is predicted, so it is a class


def test_numbers_that_are_no_class_are_one_more_class_each_for_capi():
    true, predicted = [[0, 0, 0, 255, 1, 1]], [[0, VOID, 255, 0, 1, 1]]
    found = segmentation(true, predicted, num_classes=2, ignore=(255,))
    np.testing.assert_array_equal(found["iou"], [1 / 3, 1])
    assert found["miou"] == pytest.approx(2 / 3) and found["accuracy"] == 3 / 5
    assert found["miou_official"] == pytest.approx((1 / 3 + 1 + 0 + 0) / 4)


@pytest.fixture(scope="module")
def noise():
    """Maps of 21 classes, of which 5 is in none and 7 only predicted, a third of the truth void."""
    rng = np.random.default_rng(0)
    classes = np.delete(np.arange(21), 5)
    true = rng.choice(np.setdiff1d(classes, [7]), (8, 9, 11)).astype(np.int32)
    predicted = np.where(rng.random(true.shape) < 0.6, true, rng.choice(classes, true.shape)).astype(np.int32)
    return np.where(rng.random(true.shape) < 1 / 3, VOID, true).astype(np.int32), predicted


def test_as_in_scikit_learn(noise):
    true, predicted = noise
    found, real = segmentation(*noise, num_classes=21), true != VOID
    true, predicted = true[real], predicted[real]
    counts = metrics.confusion_matrix(true, predicted, labels=range(21))
    np.testing.assert_array_equal(scores.count(*noise, np.ones(8), 21), counts)
    present = np.delete(np.arange(21), 5)
    expected = metrics.jaccard_score(true, predicted, labels=present, average=None)
    np.testing.assert_allclose(found["iou"][present], expected, rtol=1e-15)
    assert np.isnan(found["iou"][5]) and found["iou"][7] == 0
    assert found["miou"] == found["miou_official"] == pytest.approx(expected.mean())
    assert found["accuracy"] == metrics.accuracy_score(true, predicted)


def test_maps_of_different_sizes(noise):
    cut = [[labels[i, i:, : 11 - i] for i in range(8)] for labels in noise]
    flat = [np.concatenate([part.ravel() for part in labels]) for labels in cut]
    of_list, of_pixels = (segmentation(*maps, num_classes=21) for maps in (cut, flat))
    for name, value in of_list.items():
        np.testing.assert_array_equal(value, of_pixels[name])


def test_a_batch_is_counted_on_all_devices_and_padding_is_not(noise):
    weight = np.array([1, 1, 1, 0, 1, 1, 0, 0], np.float32)
    expected = scores.count(*(labels[weight > 0] for labels in noise), np.ones(5), 21)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    compiled = scores.count.lower(*jax.device_put((*noise, weight), rows), 21).compile()
    np.testing.assert_array_equal(compiled(*jax.device_put((*noise, weight), rows)), expected)
    assert "all-reduce" in compiled.as_text() and "all-gather" not in compiled.as_text()  # maps stay where they are


def test_other_numbers_than_classes_never_count_on_devices():
    counts = np.asarray(scores.count(np.array([[[0, 4, 255, VOID, 1]]]), np.array([[[0, 1, 2, 3, 3]]]), np.ones(1), 4))
    assert counts.sum() == 2 and counts[0, 0] == counts[1, 3] == 1


def test_each_map_has_a_prediction():
    with pytest.raises(ValueError, match="2 true maps and 1 predicted ones; give one for each"):
        scores.segmentation([np.zeros((2, 3), int)] * 2, [np.zeros((2, 3), int)], num_classes=4)


@pytest.mark.parametrize(
    ("maps", "options", "message"),
    [
        (([[VOID]], [[0]]), {}, r"all pixels are ignored; check that the maps hold the classes 0 to 3"),
        (([[2]], [[0]]), {"ignore": (2,)}, "all pixels are ignored"),
        (([[0, 4]], [[0, 0]]), {}, r"the label 4 is neither in 0..3 nor VOID \(-1\); name it in ignore"),
        (([[0]], [[9]]), {}, "the label 9 is neither"),
        (([[0]], [[0]]), {"ignore": 255}, r"ignore=255 must be a list of numbers, such as \(255,\)"),
        (([[0, 0]], [[0], [0]]), {}, r"a true map is \[1, 2\], the predicted one \[2, 1\]; resize the prediction"),
    ],
)
def test_what_cannot_be_is_one_line(maps, options, message):
    with pytest.raises(ValueError, match=message) as error:
        segmentation(*map(np.array, maps), **options)
    assert "\n" not in str(error.value)
