"""Ordinary and adaptive models until flat: which runs are made, where tuning begins, and that the configs are real."""

import argparse
import json
import pathlib

import pytest

from equivit.training import build
from experiments.studies import adaptive_longer as script
from experiments.studies import held_out
from tests.experiments import scripts


@pytest.fixture
def source(tmp_path):
    return scripts.made_up_images(tmp_path, train=20, test=8, side=64, classes=10)


def test_each_arm_has_its_rate_and_tuning_begins_at_the_ordinary_run(source, tmp_path, monkeypatch):
    runs = {}

    def trained(config, workdir):
        runs[workdir] = config
        good = config.schedule.lr == (1e-2 if "adaptive" in config.model else 1e-3)
        figures = dict.fromkeys(script.FIGURES.values(), 0.5 + 0.1 * good + config.seed / 100)
        return figures | {"losses": [2.0] * 5 + [1.0] * 5, script.FIGURES["circular"]: 1.0 if good else 0.5}

    monkeypatch.setattr(held_out, "trained", trained)
    arguments = [f"--source={source}", "--steps=40", "--rates=1e-3,1e-2", "--seeds=0,1", f"--workdir={tmp_path}/runs"]
    arguments += ["--override=data.train_examples=20", "--override=data.eval_examples=8"]
    assert script.main([*arguments, f"--output={tmp_path}/o.json"]) == 0
    found = json.loads((tmp_path / "o.json").read_text())["main"]
    assert [row["rate"] for row in found["rows"].values()] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert found["gains"]["adaptive - ordinary, top1"]["gap"] == pytest.approx(0)
    assert len(runs) == 16
    for workdir, config in runs.items():
        tuned = workdir.parent.name == "adaptive_tuned"
        assert config.steps == (13 if tuned else 40)
        begin = pathlib.Path(config.init) if tuned else None
        if begin:
            assert begin in runs and runs[begin].schedule.lr == 1e-3 and "adaptive" not in runs[begin].model
            assert (runs[begin].seed, runs[begin].data.split) == (config.seed, config.data.split)
        assert (config.data.eval_split == "held_out") == (config.data.split == "fit")


@pytest.mark.parametrize("model", script.MODELS)
def test_models_are_real_and_images_fit_their_windows(source, model):
    options = argparse.Namespace(source=source, override=[], model=model, steps=40)
    for arm, words in script.ARMS.items():
        begin = ["init=/tmp/somewhere"] if words.startswith("adapted") else []
        config = script.config_of(options, arm, *begin)
        made = build.model_configuration(config)
        assert bool(made.adaptive) == ("adapt" in words)
        assert config.data.augment.circular_shift == (words == "da")
        assert made.image_size == (64, 64)
