"""Confusion of classes: counts and scores of known predictions, the worst mistakes, and the pictures."""

import csv

import numpy as np
import pytest

from equivit.evaluation import confusion, runner
from equivit.evaluation.protocols import confusion as protocol
from equivit.training.config import get_base
from tests.evaluation.figures_test import is_a_picture
from tests.evaluation.predictors import random_model

LABELS, PREDICTED = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 0])


def test_scores_of_known_predictions():
    found = confusion.scores(LABELS, PREDICTED, ["a", "b", "c", "d"])
    assert found["accuracy"] == 0.5
    assert found["counts"] == {"a": {"a": 2, "b": 1}, "b": {"a": 1, "b": 1}, "c": {"a": 1}, "d": {}}
    assert found["classes"]["a"] == dict(
        examples=3, accuracy=pytest.approx(2 / 3), precision=0.5, f1=pytest.approx(4 / 7)
    )
    assert found["classes"]["c"]["f1"] == 0 and found["classes"]["c"]["precision"] is None  # never predicted
    assert found["classes"]["d"] == dict(examples=0, accuracy=None, precision=None, f1=None)
    assert found["f1"] == pytest.approx((4 / 7 + 1 / 2 + 0) / 3)  # of the classes that occur


def test_the_most_confident_mistakes_come_first():
    probability = np.array([0.9, 0.9, 0.3, 0.9, 0.8, 0.5])
    assert confusion.mistakes(LABELS, PREDICTED, probability).tolist() == [4, 5, 2]


def test_the_table_is_the_matrix(tmp_path):
    counts = confusion.scores(LABELS, PREDICTED, ["a", "b", "c"])["counts"]
    confusion.write(counts, tmp_path / "c.csv")
    heading, *rows = csv.reader((tmp_path / "c.csv").read_text().splitlines())
    assert heading[1:] == ["a", "b", "c"] and rows == [["a", "2", "1", "0"], ["b", "1", "1", "0"], ["c", "1", "0", "0"]]


def test_the_protocol_and_its_pictures(tmp_path):
    config = get_base()
    config.update(batch_size=16)
    config.data.update(source="digits", image_size=(16, 16), mean=(0.5,), std=(0.5,), eval_examples=20)
    model = random_model("plain")
    (run,) = runner.prepare(model, config, "confusion").values()
    found = protocol.run(run)
    assert found["accuracy"] == runner.evaluate(model, config, "accuracy")["accuracy"]["top1"]
    assert sum(number for row in found["counts"].values() for number in row.values()) == 20
    shares = [mistake["probability"] for mistake in found["mistakes"]]
    assert shares == sorted(shares, reverse=True) and found["mistakes"][0]["image"].startswith("digits test[")
    protocol.figure(run, found, tmp_path / "confusion.png")
    assert is_a_picture(tmp_path / "confusion.png") and is_a_picture(tmp_path / "confusion_mistakes.png")
    assert (tmp_path / "confusion.csv").is_file()
    assert all(line for _, line in protocol.lines(found))
