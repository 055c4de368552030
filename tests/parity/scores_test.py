"""Scores of label maps against CAPI's and scikit-learn's, in the stored cases."""

import numpy as np
import pytest

from equivit.evaluation import scores
from tests.parity.arrays import files, load

CASES = ("plain", "missing_in_both", "predicted_only", "never_predicted", "ignore255", "ignore255_predicted",
         "ignore0_255")  # fmt: skip
FILES = {path.stem: path for path in files("evaluation", "*.npz")}
ROUNDING = 1e-6  # the stored numbers are float32


def compare(found, data, classes, names):
    for name, key in names.items():
        np.testing.assert_allclose(found[name], data[f"output/{key}"], rtol=ROUNDING)
    np.testing.assert_allclose(found["iou"], classes, rtol=ROUNDING)


@pytest.mark.skipif("metrics" not in FILES, reason="EQUIVIT_PARITY has no evaluation/metrics.npz")
@pytest.mark.parametrize("case", CASES)
def test_scores(case):
    data = load(FILES["metrics"])
    true, predicted, ignore, classes = (
        data[f"input/{case}_{name}"].astype(int) for name in ("true", "pred", "ignore", "num_classes")
    )
    found = scores.segmentation(true, predicted, num_classes=int(classes), ignore=ignore)
    found["iou"] = found["iou"][~np.isin(np.arange(classes), ignore)]  # the file leaves ignored classes out
    names = {"miou": "miou_real_classes", "miou_official": "miou_present", "accuracy": "accuracy"}
    compare(found, data, data[f"output/{case}_iou_per_class"], {k: f"{case}_{v}" for k, v in names.items()})
    counted = ~np.isin(true, ignore)
    found = scores.classification(true[counted], predicted[counted])
    for name in ("accuracy", "weighted_f1", "balanced_accuracy"):
        np.testing.assert_allclose(found[name], data[f"output/{case}_{name}"], rtol=ROUNDING)


@pytest.mark.skipif("seg_knn" not in FILES, reason="EQUIVIT_PARITY has no evaluation/seg_knn.npz")
@pytest.mark.parametrize("setting", ["a_cosine_k1", "a_L2_k10", "b_cosine_k1", "b_cosine_k10", "b_L2_k3"])
def test_maps_of_nearest_neighbours(setting):
    """They also predict ignored labels."""
    data = load(FILES["seg_knn"])
    labels, ignore = data["input/labels_test"].astype(int), data[f"input/ignore_{setting[0]}"].astype(int)
    predicted, classes = (
        data[f"output/test_prediction_{setting}"].astype(int),
        data[f"output/test_iou_per_class_{setting}"],
    )
    found = scores.segmentation(labels, predicted, num_classes=len(classes), ignore=ignore)
    names = {"miou": "miou_real_classes", "miou_official": "miou", "accuracy": "acc"}
    compare(found, data, classes, {k: f"test_{v}_{setting}" for k, v in names.items()})
