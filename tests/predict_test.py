"""`python -m equivit.predict`: which images it takes, and its tables."""

import csv
import io
import json

import numpy as np
import pytest
from PIL import Image

from equivit import predict
from equivit.models import saved
from equivit.trained_on import TrainedOn
from tests.evaluation.predictors import random_model

NAMES = tuple(f"class {k}" for k in range(10))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A saved model, and images beside it."""
    monkeypatch.chdir(tmp_path)
    images = {"image_size": (16, 16), "mean": (0.5,), "std": (0.5,)}
    saved.save(tmp_path / "model", random_model("plain"), TrainedOn(NAMES, 5, images))
    random = np.random.default_rng(0)
    for name in ("photos/a.png", "photos/below/b.jpg", "photos/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "list.txt").write_text("photos/c.png\n\nphotos/nowhere.png\n")
    return tmp_path


def test_files_folders_lists_and_the_standard_input(place, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("photos/c.png\n\nx.png\n"))
    assert list(predict.listed(["photos/a.png", "photos", "list.txt", "-"])) == [
        "photos/a.png", "photos/a.png", "photos/below/b.jpg", "photos/c.png", "photos/c.png", "photos/nowhere.png",
        "photos/c.png", "x.png",
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"photo: there is no such file or folder; the nearest is 'photos'"):
        list(predict.listed(["photo"]))
    with pytest.raises(FileNotFoundError, match="model: there is no image in this folder"):
        list(predict.listed(["model"]))


def test_tables(place, capsys):
    assert predict.main(["--input=model", "photos", "list.txt", "--output=p.csv", "--top=2", "--orientations"]) == 1
    assert "1 of 5 images cannot be read, the first is photos/nowhere.png: there is no such" in capsys.readouterr().err
    rows = list(csv.DictReader(io.StringIO((place / "p.csv").read_text())))
    assert [row["image"] for row in rows] == [
        "photos/a.png",
        "photos/below/b.jpg",
        *["photos/c.png"] * 2,
        "photos/nowhere.png",
    ]
    assert (
        rows[2] == rows[3]
        and rows[0]["class"] in NAMES
        and float(rows[0]["probability"]) > float(rows[0]["probability_2"])
    )
    assert 0 <= float(rows[0]["turned"]) <= 1 and rows[4]["class"] == "" and rows[4]["error"]

    assert predict.main(["--input=model", "photos", "--output=p.jsonl"]) == 0
    found = [json.loads(line) for line in (place / "p.jsonl").read_text().splitlines()]
    assert [one["classes"][0] for one in found] == [row["class"] for row in rows[:3]] and len(found[0]["classes"]) == 5
    assert predict.main(["--input=model", "photos/a.png", "--top=1"]) == 0
    assert f"photos/a.png: {rows[0]['class']} " in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--input=model", "photos", "--output=p.txt"], "--output=p.txt must end in .csv or .jsonl"),
    (["--input=model", "photos", "--output=no/p.csv"], "there is no directory no"),
    (["--input=models", "photos"], "'models' is neither a run nor a saved model"),
    (["--input=model", "photos", "--weights=averaged"], "--weights=averaged is only for a run"),
])  # fmt: skip
def test_mistakes_are_one_line(place, capsys, arguments, message):
    assert predict.main(arguments) == 1
    assert message in capsys.readouterr().err


def test_in_python(place):
    model = predict.load("model", top=3)
    assert [len(found.classes) for found in model(["photos/a.png", "photos/c.png"])] == [3, 3]
