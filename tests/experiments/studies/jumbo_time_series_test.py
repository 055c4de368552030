"""The order of the models over sets and seeds, on made-up results."""

import json

import pytest

from experiments.studies import jumbo_time_series as study
from tests.experiments import scripts
from tests.experiments.tables.jumbo.timeseries_test import result


def test_data_that_are_not_there_are_one_line(tmp_path, capsys):
    names = "--override=data.names=('MelbournePedestrian','Crop')"
    sets = ["--config=configs/timeseries.py:small", names, f"--directory={tmp_path}"]
    assert (
        scripts.status(study, [f"--workdir={tmp_path / 'results'}", f"--output={tmp_path / 'none.json'}", *sets]) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: series 'MelbournePedestrian': {tmp_path} has neither MelbournePedestrian.npz nor")


def test_the_order_over_seeds(tmp_path, monkeypatch, capsys):
    """In made-up results, ours have the order of the paper in one of two seeds, the public ones in none."""
    models = [name for three in study.VARIANTS.values() for name in three]

    def run(config, workdir):
        assert config.models == tuple(models) and workdir == tmp_path / f"seed_{config.seed}"
        three = {0: (0.7, 0.6, 0.9), 1: (0.7, 0.8, 0.8)}[config.seed]
        made = [result("Waves", m, b, b) for m, b in zip(models, three + (0.9, 0.8, 0.7), strict=True)]
        made += [result("Steps", m, b, b, channels=2) for m, b in zip(models, three + (0.5, 0.5, 0.5), strict=True)]
        return [*made, result("Half", "patchtst", 0.1, 0.1)]

    monkeypatch.setattr(study.sweep, "run", run)
    arguments = [f"--workdir={tmp_path}", "--seeds=0,1", f"--output={tmp_path / 'a.json'}"]
    assert scripts.status(study, [*arguments, "--config=configs/timeseries.py:quicktest,public"]) == 0
    text, rows = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())["main"]["rows"]
    assert [(r["variant"], r["kind"], r["sets"]) for r in rows[:1]] == [("ours", "best", ["Steps", "Waves"])]
    assert rows[0]["ranks"] == {"0": [2, 3, 1], "1": [3, 1.5, 1.5]}
    assert rows[0]["as_in_the_paper"] == {"0": True, "1": False}
    assert rows[2]["ranks"]["0"] == [1.5, 2, 2.5] and not any(rows[2]["as_in_the_paper"].values())
    assert rows[0]["gains"]["Jumbo - plain"]["gap"] == pytest.approx(0.15)
    assert "Jumbo - plain in the paper's ten univariate sets: +0.46 points, standard error 0.34, p = 0.2: not" in text
    assert "the paper's order (plain 2.00, registers 2.50, Jumbo 1.50) in 1 of 2 seeds" in text
    assert "resolved" in text
