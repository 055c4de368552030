"""Every recipe's quick mode runs two steps, and leaves what a run leaves.  On one device (see the Makefile)."""

import json
import math
import pathlib

import pytest

from equivit import train
from equivit.evaluation import figures
from equivit.training import config as configs

ROOT = pathlib.Path(__file__).parents[2] / "configs"
PICTURES = {"learning_curves.png", "patch_filters.png"}
DRAWN = "octic_h.py"  # what pictures show is for tests/evaluation/figures_test.py; one recipe has them drawn


# A sweep has a configuration and a command of its own: tests/training/sweep_test.py.
@pytest.mark.parametrize(
    "name", sorted(path.name for path in ROOT.glob("*.py") if path.name not in ("recipes.py", "timeseries.py"))
)
def test_quicktest_runs(name, tmp_path, monkeypatch):
    config = configs.load(f"{ROOT / name}:quicktest")
    with config.unlocked():
        config.batch_size = 24 if name != "quickstart.py" else 64
        config.data.train_examples = 48 if name != "quickstart.py" else 128
        config.checkpoint.every_steps = None  # saved at the end; tests/training proves that runs resume
        if "orientation" in (config.evaluation.suite or ()) and name != "octic_h.py":
            config.evaluation.suite = ("accuracy",)  # the protocol takes longest, and is the same for every recipe
    if name != DRAWN:
        for draw in ("learning_curves", "patch_filters"):
            monkeypatch.setattr(figures, draw, lambda content, output, *more: output.touch())
    report = train.train(config, tmp_path)
    assert report["step"] == 2
    if name == "mae.py":
        assert 0 < report["eval/reconstruction/loss"] < 10
    else:
        assert 0 <= report["eval/accuracy/top1"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    assert all((path.stat().st_size > 0) == (name == DRAWN) for path in tmp_path.glob("*.png"))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
