"""`python -m equivit.predict`: which images it takes, and its tables."""

import csv
import io
import json
import os
import pathlib
import shutil

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


def test_label_maps_replace_neither_each_other_nor_an_image(tmp_path, monkeypatch):
    """All places are known before the first map is written."""
    monkeypatch.chdir(tmp_path)

    def places(folder, *images):
        return predict._places(pathlib.Path(folder), list(images))

    assert places("out", "a/x.jpg", "a/b/x.jpg", "a/x.jpg") == {
        "a/x.jpg": pathlib.Path("out/x.png"),
        "a/b/x.jpg": pathlib.Path("out/b/x.png"),
    }
    with pytest.raises(ValueError, match=r"a/x.jpg and .*a/x.png would both have the label map out/x.png; rename one"):
        places("out", "a/x.jpg", "a/y.jpg", "a/x.png")
    with pytest.raises(ValueError, match="--output=a: the label map a/x.png would replace an image"):
        places("a", "a/x.png")


def test_an_empty_list_and_a_name_of_other_bytes(place, capsys):
    (place / "empty.txt").write_text("\n")
    assert predict.main(["--input=model", "empty.txt"]) == 1
    assert "empty.txt: there are no images in these lists" in capsys.readouterr().err
    name = b"photos/\xff.png"
    shutil.copy("photos/a.png", os.fsdecode(name))
    (place / "bytes.txt").write_bytes(name)
    for ending in predict.ENDINGS:
        assert predict.main(["--input=model", "bytes.txt", f"--output=p{ending}"]) == 0
        assert name in (place / f"p{ending}").read_bytes()
    assert predict.main(["--input=model", "bytes.txt"]) == 0
    assert r"photos/\udcff.png: class" in capsys.readouterr().out
