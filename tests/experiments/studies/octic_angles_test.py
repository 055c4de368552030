"""Accuracy over angles: which runs are made, the images that models see, and what is made of it."""

import json
import pathlib
import types

import numpy as np
import pytest

from equivit.training import checkpoints
from experiments.studies import octic_angles as script
from experiments.studies import several_seeds


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 20), ("test", 6)):
        arrays[f"{split}_image"] = rng.integers(0, 256, (n, 48, 48, 3), np.uint8)
        arrays[f"{split}_label"] = np.arange(n) % 8
    np.savez(tmp_path / "made_up.npz", **arrays, classes=np.array(list("01234567")))
    return f"npz:{tmp_path}/made_up.npz"


def corner(images):
    """Logits of two classes: whether the right half is lighter than the left one."""
    half = images.shape[2] // 2
    right, left = images[:, :, half:].mean((1, 2, 3)), images[:, :, :half].mean((1, 2, 3))
    return np.stack([left, right], -1) if isinstance(images, np.ndarray) else script.jax.numpy.stack([left, right], -1)


def test_models_see_turned_images_and_each_arm_has_its_width_and_rate(source, tmp_path, monkeypatch, capsys):
    runs = []
    monkeypatch.setattr(several_seeds, "trained", lambda config, workdir: runs.append((config, workdir)))
    monkeypatch.setattr(checkpoints, "load_run", lambda workdir: types.SimpleNamespace(model=corner))
    arguments = ["--data=blood_cells", f"--source={source}", "--seeds=0,1", "--steps=7", f"--workdir={tmp_path}/runs"]
    arguments += ["--override=data.train_examples=20"]
    assert script.main([*arguments, f"--output={tmp_path}/o.json"]) == 1  # this model is not symmetric
    found = json.loads((tmp_path / "o.json").read_text())["blood_cells"]
    chosen = json.loads(pathlib.Path("experiments/studies/octic_equal_compute.json").read_text())
    chosen = chosen[script.ENTRIES["blood_cells"]]["rows"]
    for (config, workdir), arm in zip(runs[::2], script.ARMS, strict=True):
        family = script.ARMS[arm][0]
        row = next(row for row in chosen if row["family"] == family and row["rule"] in (None, "multiply-adds"))
        assert (config.model.width, config.schedule.lr, config.steps) == (row["width"], row["rate"], 7)
        assert config.model.init == "xavier_uniform"
        assert config.data.augment.octic == (arm == "plain, turned") and workdir.name == "seed_0"
    assert len({workdir for _, workdir in runs}) == 10
    each = np.array(found["accuracy"]["I8"])
    assert each.shape == (2, 24) and found["rows"]["I8"]["same"][0] < 1
    assert found["rows"]["I8"]["worst"][0] == each[0].min() and (tmp_path / "o_blood_cells.png").is_file()
    assert "FAILS      I8: change of the accuracy after 90 degrees" in capsys.readouterr().out


def test_quarter_turns_are_left_out_between():
    accuracy = [1.0 if angle % 90 == 0 else 0.25 for angle in script.ANGLES]
    found = script.summary([dict(accuracy=accuracy, same=0.5)])
    assert found == dict(upright=[1.0], between=[0.25], worst=[0.25], best=[1.0], same=[0.5])
