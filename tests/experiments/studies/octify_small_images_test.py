"""Octify against training from scratch: which runs are made, with how many steps, and what is claimed."""

import json
import pathlib
import types

import pytest

from experiments.studies import octify_small_images as script


def test_each_family_has_a_third_of_the_steps_and_the_images_of_the_teacher(tmp_path, monkeypatch):
    runs, calls = [], []

    def trained(config, workdir):
        runs.append((config.model.family, config.steps, config.seed))
        return {"eval/accuracy/top1": 0.4, "eval/orientation/accuracy_mean": 0.3}

    def octify(arguments):
        calls.append(dict(argument.removeprefix("--").split("=", 1) for argument in arguments))
        agreement = dict(agreement=dict(prefix=0.9, prefix_left=0.2))
        report = dict(starts=dict(layers=0.1, drawn=0.5), figures=dict(start=agreement, stage2=agreement))
        workdir = pathlib.Path(calls[-1]["workdir"])
        workdir.mkdir(parents=True)
        (workdir / "report.json").write_text(json.dumps(report))
        return 0

    monkeypatch.setattr(script.several_seeds, "trained", trained)
    monkeypatch.setattr(script, "octify", types.SimpleNamespace(main=octify))
    monkeypatch.setattr(script, "averaged", lambda config, teacher: dict.fromkeys(script.FIGURES, 0.42))
    values = {"start": 0.1, "model": 0.39}
    monkeypatch.setattr(
        script, "evaluated", lambda config, model, teacher: dict.fromkeys(script.FIGURES, values[model.name])
    )
    arguments = ["--data=cifar10", "--source=npz:/data/x.npz", "--steps=60", "--seeds=0,1", f"--workdir={tmp_path}"]
    arguments += ["--override=batch_size=32", "--override=schedule.lr=1e-4"]
    assert script.main([*arguments, f"--output={tmp_path / 'o.json'}"]) == 0
    assert runs[:5] == [("plain", 60, 0), ("H8", 20, 0), ("H8", 60, 0), ("I8", 20, 0), ("I8", 60, 0)]
    assert [(call["family"], call["config.steps"], call["config.seed"]) for call in calls[:2]] == [
        ("H8", "20", "0"),
        ("I8", "20", "0"),
    ]
    assert calls[0]["config.data.source"] == "npz:/data/x.npz" and calls[0]["config.data.image_size"] == "(32, 32)"
    assert calls[0]["config.batch_size"] == "32" and "config.schedule.lr" not in calls[0]  # its recipe has a rate
    found = json.loads((tmp_path / "o.json").read_text())["cifar10"]
    assert found["overrides"] == ["batch_size=32", "schedule.lr=1e-4"] and found["source"] == "x.npz"
    assert found["rows"]["H8, octify"]["upright"] == [0.39, 0.39]
    assert found["features"]["I8"]["error by start"] == {"layers": [0.1, 0.1], "drawn": [0.5, 0.5]}
    assert [claim["holds"] for claim in found["claims"]] == [True, True]
    assert found["gains"]["I8, octify - teacher, eight orientations"]["gap"] == pytest.approx(0.09)


def test_a_failure_of_octify_ends_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "octify", types.SimpleNamespace(main=lambda arguments: 1))
    options = types.SimpleNamespace(data="cifar10", source="npz:x.npz", override=[])
    with pytest.raises(SystemExit):
        script.octified(options, "H8", script.config_of(options, "plain", 30, 0), tmp_path, 5, 0)
