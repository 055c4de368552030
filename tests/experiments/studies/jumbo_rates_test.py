"""Registers and Jumbo, each with its own rate: which runs are made, the clusters, and that the configs are real."""

import json

import numpy as np
import pytest

from equivit import logical
from equivit.pretrained import mapping
from equivit.training import build, optimizers
from experiments.studies import held_out, several_seeds
from experiments.studies import jumbo_rates as script
from tests.experiments import scripts


@pytest.fixture
def source(tmp_path):
    return scripts.made_up_images(tmp_path, train=100, test=20, side=32, classes=10)


def test_a_rate_is_chosen_for_each_arm_and_all_take_the_same_time(source, tmp_path, monkeypatch):
    runs = []

    def trained(config, workdir):
        runs.append((config.data.split, config.schedule.lr, config.seed, config.steps, workdir))
        good = config.schedule.lr == (1e-2 if config.optimizer.rates else 1e-3)
        return {script.ACCURACY: 0.5 + 0.1 * good + config.seed / 100, "losses": [2.0] * 5 + [1.0] * 5}

    monkeypatch.setattr(held_out, "trained", trained)
    times = {"registers": 0.5, "no MLP": 0.8, "Jumbo": 1.0, "Jumbo, rate / J": 1.0}
    monkeypatch.setattr(several_seeds, "step_seconds", lambda made: times)
    arguments = [f"--source={source}", "--widths=48", "--steps=40", "--rates=1e-3,1e-2", "--seeds=0,1"]
    arguments += ["--override=data.train_examples=100", "--override=data.eval_examples=20"]
    arguments += [f"--workdir={tmp_path}/runs", f"--output={tmp_path}/o.json"]
    assert script.main(arguments) == 0
    found = json.loads((tmp_path / "o.json").read_text())["main"]
    assert [row["steps"] for row in found["rows"]] == [80, 50, 40, 40]
    assert [row["rate"] for row in found["rows"]] == [1e-3, 1e-3, 1e-3, 1e-2]
    assert found["rows"][3]["top1"] == [0.6, 0.61] and found["rows"][3]["loss"] == [1.0, 1.0]
    assert found["gains"]["Jumbo, rate / J - Jumbo, 48"]["gap"] == pytest.approx(0)
    assert [run[:3] for run in runs[:4]] == [("fit", 1e-3, 0), ("fit", 1e-2, 0), ("train", 1e-3, 0), ("train", 1e-3, 1)]
    assert len({run[4] for run in runs}) == len(runs) == 16
    with np.load(tmp_path / "runs/images.npz") as file:
        assert len(file["fit_label"]) == 80 and len(file["held_out_label"]) == 20


def test_every_arm_has_six_tokens_and_its_rates(source):
    options = script._options([f"--source={source}", "--labels=512"])
    for arm in script.ARMS:
        config = script._config(options, 48, arm, 40)
        model = build.model_configuration(config)
        module = mapping.abstract(model)
        names = [tensor.name for table in logical.tensors(module).values() for tensor in table.flat]
        factors = set(optimizers.rate_factors(config.optimizer.rates, names).values())
        assert factors == ({1 / script.J} if arm.endswith("/ J") else set())
        assert model.prefix == 6 and model.num_classes == 512


def test_clusters_follow_the_images():
    """Images of three colours, with noise, form three clusters, the same in both splits."""
    rng = np.random.default_rng(0)
    splits = {}
    for split, n in (("train", 90), ("test", 30)):
        kind = np.arange(n) % 3
        image = 100 * np.eye(3)[kind][:, None, None] + rng.integers(0, 20, (n, 32, 32, 3))
        splits[split] = {"image": image.astype(np.uint8), "label": kind}
    kinds = {split: arrays["label"] for split, arrays in splits.items()}
    script.clustered(splits, 3)
    pairs = {(int(a), int(b)) for split in splits for a, b in zip(kinds[split], splits[split]["label"], strict=True)}
    assert len(pairs) == 3 and len({b for _, b in pairs}) == 3


def test_an_unknown_width_is_refused(source, capsys):
    with pytest.raises(SystemExit):
        script.main([f"--source={source}", "--widths=50"])
    assert "--widths=50 must be one of 48, 96, 192" in capsys.readouterr().err
