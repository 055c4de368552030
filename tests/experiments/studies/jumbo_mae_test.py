"""Masked autoencoding with and without a Jumbo token: which runs are made, and that the configs are real."""

import argparse
import json

import pytest

from equivit import logical
from equivit.pretrained import mapping
from equivit.training import build, optimizers
from experiments.studies import held_out, several_seeds
from experiments.studies import jumbo_mae as script
from tests.experiments import scripts


@pytest.fixture
def source(tmp_path):
    return scripts.made_up_images(tmp_path, train=20, test=8, side=48, classes=8)


def test_a_rate_is_chosen_by_the_probe_of_held_out_images(source, tmp_path, monkeypatch):
    runs = []

    def trained(config, workdir):
        runs.append((config.data.split, config.data.eval_split, config.schedule.lr, config.seed, config.steps, workdir))
        good = config.schedule.lr == (1e-2 if config.optimizer.rates else 1e-3)
        figures = dict.fromkeys(script.FIGURES.values(), 0.5 + 0.1 * good + config.seed / 100)
        return figures | {"losses": [2.0] * 5 + [1.0] * 5}

    monkeypatch.setattr(held_out, "trained", trained)
    times = {"plain": 0.5, "no MLP": 0.8, "Jumbo": 1.0, "Jumbo, rate / J": 1.0}
    monkeypatch.setattr(several_seeds, "step_seconds", lambda made: times)
    arguments = [f"--source={source}", "--steps=40", "--rates=1e-3,1e-2", "--seeds=0,1"]
    arguments += [f"--workdir={tmp_path}/runs", f"--output={tmp_path}/o.json"]
    assert script.main(arguments) == 0
    found = json.loads((tmp_path / "o.json").read_text())["main"]
    assert [row["steps"] for row in found["rows"].values()] == [80, 50, 40, 40]
    assert [row["rate"] for row in found["rows"].values()] == [1e-3, 1e-3, 1e-3, 1e-2]
    assert found["gains"]["Jumbo - plain, probe"]["gap"] == pytest.approx(0)
    splits = [("fit", "held_out", 1e-3, 0), ("fit", "held_out", 1e-2, 0)]
    assert [run[:4] for run in runs[:3]] == [*splits, ("train", "test", 1e-3, 0)]
    assert len({run[5] for run in runs}) == len(runs) == 16


def test_arms_differ_in_the_token_and_its_rate(source):
    options = argparse.Namespace(source=source, override=[])
    for arm, (kind, _) in script.ARMS.items():
        config = script.config_of(options, arm, 40)
        model = build.model_configuration(config)
        assert model.prefix == (1 if kind == "plain" else script.J) and model.layer_scale is None
        names = [tensor.name for table in logical.tensors(mapping.abstract(model)).values() for tensor in table.flat]
        named = [f"encoder.{name}" for name in names]
        factors = set(optimizers.rate_factors(config.optimizer.rates, named).values())
        assert factors == ({1 / script.J} if arm.endswith("/ J") else set())
