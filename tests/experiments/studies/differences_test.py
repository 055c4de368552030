"""Differences between rows against SciPy's t tests, and what is said of them."""

import numpy as np
import pytest
from scipy import stats

from experiments.studies import differences

A, B = [0.52, 0.55, 0.61, 0.5], [0.47, 0.52, 0.49]


def test_welch_and_paired_tests_are_scipys():
    found = differences.difference(A, B)
    assert found["gap"] == pytest.approx(np.mean(A) - np.mean(B))
    assert found["standard_error"] == pytest.approx(np.hypot(np.std(A, ddof=1) / 2, np.std(B, ddof=1) / 3**0.5))
    assert found["p"] == pytest.approx(stats.ttest_ind(A, B, equal_var=False).pvalue)
    paired = differences.paired_difference(A[:3], B)
    assert paired["gap"] == pytest.approx(np.mean(A[:3]) - np.mean(B))
    assert paired["p"] == pytest.approx(stats.ttest_rel(A[:3], B).pvalue)
    # The second of three seeds is as far ahead as the others, though all three differ from each other.
    assert differences.paired_difference([0.5, 0.625, 0.75], [0.25, 0.375, 0.5])["p"] == 0
    assert differences.difference([0.5, 0.625, 0.75], [0.25, 0.375, 0.5])["p"] > 0.05


@pytest.mark.parametrize("compare", [differences.difference, differences.paired_difference])
def test_few_and_equal_values(compare):
    assert compare([0.5], [0.4]) == dict(gap=pytest.approx(0.1), standard_error=None, p=None)
    assert compare([0.5, 0.5], [0.5, 0.5]) == dict(gap=0, standard_error=0, p=1)
    assert compare([0.5, 0.5], [0.25, 0.25]) == dict(gap=0.25, standard_error=0, p=0)


def test_seeds_that_do_not_match_are_no_pairs():
    with pytest.raises(ValueError, match="shorter|longer"):
        differences.paired_difference(A, B)


def test_what_is_said():
    def verdict(a, b):
        return differences.verdict(differences.difference(a, b))

    assert verdict([0.5, 0.51], [0.4, 0.41]) == "+10.00 points, standard error 0.71, p = 0.005: resolved"
    assert verdict([0.5, 0.7], [0.4, 0.6]).endswith("p = 0.55: not resolved")
    assert verdict([0.5], [0.4, 0.6]) == "+0.00 points; one seed resolves nothing"
    # Twice the standard error is not enough with three seeds.
    found = differences.difference([0.5, 0.52, 0.54], [0.46, 0.48, 0.5])
    assert found["gap"] > 2 * found["standard_error"] and not differences.resolved(found)


def test_gains_are_of_figures_that_both_have():
    rows = {"a": dict(top1=[0.5, 0.6], loss=[]), "b": dict(top1=[0.4, 0.5], loss=[1.0, 2.0])}
    pairs = [("a", "b"), ("a", "absent"), ("b", None)]
    assert list(differences.gains(rows, pairs, ["top1", "loss"])) == ["a - b, top1"]
