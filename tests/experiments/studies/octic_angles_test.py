"""Accuracy over angles: which runs are made, the images that models see, and what is made of it."""

import json
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

from equivit.training import checkpoints
from experiments.studies import octic_angles as script
from experiments.studies import several_seeds
from tests.experiments import scripts


@pytest.fixture
def source(tmp_path):
    return scripts.made_up_images(tmp_path, train=20, test=6, side=48, classes=8)


def lighter_half(images):
    """Logits of two classes: the lightness of the left and of the right half."""
    left, right = jnp.split(images, 2, axis=2)
    return jnp.stack([left.mean((1, 2, 3)), right.mean((1, 2, 3))], -1)


def test_models_see_turned_images_and_each_arm_has_its_width_and_rate(source, tmp_path, monkeypatch, capsys):
    runs = []
    monkeypatch.setattr(several_seeds, "trained", lambda config, workdir: runs.append((config, workdir)))
    monkeypatch.setattr(checkpoints, "load_run", lambda workdir: types.SimpleNamespace(model=lighter_half))
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
    images = np.load(tmp_path / "runs" / "images.npz")["train_image"]
    assert (images[:, 0, 0] == script.mean_colour(runs[0][0].data)).all() and images.std() > 1  # a disc alone
    each = np.array(found["accuracy"]["I8"])
    assert each.shape == (2, 24) and found["rows"]["I8"]["same"][0] < 1
    assert found["rows"]["I8"]["worst"][0] == each[0].min() and (tmp_path / "o_blood_cells.png").is_file()
    assert "FAILS      I8: change of the accuracy after 90 degrees" in capsys.readouterr().out


def test_quarter_turns_are_left_out_between():
    accuracy = [1.0 if angle % 90 == 0 else 0.25 for angle in script.ANGLES]
    found = script.summary([dict(accuracy=accuracy, same=0.5)])
    assert found == dict(upright=[1.0], between=[0.25], worst=[0.25], best=[1.0], same=[0.5])
