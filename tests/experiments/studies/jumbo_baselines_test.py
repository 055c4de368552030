"""Jumbo and the baselines on CIFAR-10: what is planned, and what is made of the accuracies; nothing is trained."""

import json

import pytest

from equivit.training import config as configs
from experiments.studies import jumbo_baselines as script
from experiments.studies import several_seeds

VITS = ["--models=jumbo,registers"]
STEP = {"jumbo": 0.2, "registers": 0.15, "mobilenetv4": 0.4, "shvit": 0.3, "efficientvit": 0.25, "bixt": 0.2}


@pytest.fixture
def trained(monkeypatch):
    """Times and runs made up; what would be trained, by its directory."""
    runs = {}

    def train(config, place):
        runs["/".join(place.parts[-3:])] = config
        return {script.ACCURACY: 0.4 + 0.01 * config.seed + 1e-4 * config.steps}

    times = {name: dict(step_seconds=seconds, speed=100 / seconds) for name, seconds in STEP.items()}
    monkeypatch.setattr(several_seeds, "trained", train)
    monkeypatch.setattr(script, "times", lambda options: {name: times[name] for name in options.models})
    return runs


def test_rules_give_equal_epochs_and_equal_time(tmp_path, trained, capsys):
    options = [*VITS, "--epochs=4", f"--workdir={tmp_path / 'runs'}", f"--output={tmp_path / 'out.json'}"]
    assert script.main([*options, "--plan"]) == 0 and trained == {}
    out = capsys.readouterr().out
    assert "registers, equal time: 832 steps, 5.3 epochs, about 2.1 minutes a seed" in out
    minutes = 3 * (624 * 0.2 + 624 * 0.15 + 832 * 0.15) / 60  # Jumbo's two rules are the same runs
    assert f"about {minutes:.0f} minutes in all" in out
    assert script.main([*options, "--source=npz:images.npz", "--seeds=0,1"]) == 0
    assert {name: config.steps for name, config in trained.items()} == {
        f"{rule}/{model}/seed_{seed}": steps
        for rule, model, steps in (
            ("equal_epochs", "jumbo", 624),
            ("equal_epochs", "registers", 624),
            ("equal_time", "registers", 832),
        )
        for seed in (0, 1)
    }
    written = json.loads((tmp_path / "out.json").read_text())["main"]
    jumbo, registers = written["rows"]["jumbo"], written["rows"]["registers"]
    assert jumbo["equal time"] == jumbo["equal epochs"] == pytest.approx([0.4624, 0.4724])
    assert registers["equal time, epochs"] == pytest.approx(832 / 156) and jumbo["macs"] > registers["macs"] > 16e6
    assert written["gains"]["equal time: jumbo - registers"]["gap"] == pytest.approx(-0.0208)
    assert (tmp_path / "out.png").is_file() and "not resolved" in capsys.readouterr().out


def test_a_plan_is_kept_and_one_of_other_runs_refused(tmp_path, trained, monkeypatch):
    options = [*VITS, "--epochs=4", "--seeds=0", f"--workdir={tmp_path}/runs", f"--output={tmp_path}/out.json"]
    assert script.main([*options, "--plan"]) == 0 and not (tmp_path / "runs").exists()
    assert script.main(options) == 0
    monkeypatch.setattr(script, "times", lambda options: 1 / 0)  # nothing is measured again
    assert script.main(options) == 0
    with pytest.raises(ValueError, match="were begun with epochs=4; give the same again, or another --workdir"):
        script.main([*options, "--epochs=5"])
    with pytest.raises(SystemExit):
        script.main(["--models=registers"])


def test_a_run_is_of_small_images_made_larger():
    options = script._options(["--override=schedule.lr=2e-3", "--source=npz:images.npz"])
    config = script.config_of("registers", options, steps=50, seed=3)
    assert configs.flat(config)["schedule.lr"] == 2e-3 and config.data.image_size == (64, 64)
    assert dict(config.model) == script.MODELS["registers"] | dict(image_size=(64, 64), num_classes=10)
    assert (config.data.train_examples, config.steps, config.schedule.warmup_steps, config.seed) == (10000, 50, 5, 3)
    assert config.objective.mixup == 0 and config.epochs is None and config.data.source == "npz:images.npz"


@pytest.mark.parametrize("name", script.MODELS)
def test_models_are_of_like_cost(name):
    costs = script.measured(name, script._options([]))
    assert 9e6 < costs["macs"] < 20e6 and costs["epoch"] == 156
