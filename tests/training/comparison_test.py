"""Comparing runs: seeds of one recipe together, differing keys, mean and spread, unfinished runs; grids of a sweep."""

import csv
import io
import json

import pytest

from equivit import compare
from equivit.training import comparison, sweep_grid
from equivit.training import config as configs
from equivit.training.run import resuming
from tests.evaluation.figures_test import is_a_picture


def run(place, *, lr=1e-3, seed=0, top1: float | None = 0.5):
    """A run directory as training leaves it."""
    config = configs.get_base()
    config.update(steps=4, seed=seed)
    config.schedule.lr = lr
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    rows = [
        {"step": 2, "loss": 1.0, "accuracy": 0.2},
        {"step": 2, "eval/accuracy/loss": 0.9, "eval/accuracy/top1": 0.3},
    ]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if top1 is not None:
        (place / "report.json").write_text(json.dumps({"step": 4, "eval/accuracy/top1": top1}))
    return place


@pytest.fixture
def runs(tmp_path):
    return [
        run(tmp_path / "sweep/a", top1=0.5),
        run(tmp_path / "sweep/b", seed=1, top1=0.7),
        run(tmp_path / "sweep/c", lr=1e-2, top1=None),
    ]


def test_seeds_are_one_recipe(runs, tmp_path):
    assert comparison.runs_in([tmp_path / "sweep"]) == runs
    first, second = comparison.recipes(runs)
    assert first.runs == tuple(runs[:2]) and first.keys == {"schedule.lr": 1e-3} and first.name == "lr=0.001"
    assert first.figures["accuracy/top1"] == (0.5, 0.7) and first.finished
    assert second.figures["accuracy/top1"] == (0.3,) and not second.finished and second.steps == (2,)


def test_tables_and_picture(runs, tmp_path, capsys):
    assert compare.main([str(tmp_path / "sweep"), f"--output={tmp_path / 'out'}"]) == 0
    page = (tmp_path / "out/comparison.md").read_text()
    assert "| accuracy/top1 | 0.6 ± 0.14 | 0.3 |" in page and "| `schedule.lr` | 0.001 | 0.01 |" in page
    assert "2 (unfinished)" in page and page in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/comparison.csv").read_text())))
    assert (
        float(rows[0]["accuracy/top1"]) == 0.6
        and rows[0]["accuracy/top1 runs"] == "2"
        and rows[1]["schedule.lr"] == "0.01"
    )
    assert is_a_picture(tmp_path / "out/comparison.png")
    assert compare.main([str(tmp_path / "none")]) == 1
    assert "none: there is no run in it" in capsys.readouterr().err


def test_the_runs_of_a_sweep():
    found = sweep_grid.runs(["schedule.lr=1e-3,3e-4", "data.image_size=(32,32),(64,64)", "model.name=vit_ti16"])
    assert len(found) == 4
    assert found["lr=3e-4,image_size=(64,64),name=vit_ti16"] == [
        "schedule.lr=3e-4", "data.image_size=(64,64)", "model.name=vit_ti16",
    ]  # fmt: skip
    assert list(sweep_grid.runs(["data.source=folder:a/b"])) == ["source=folder:a_b"]
    assert list(sweep_grid.runs(["data.x=1", "model.x=2"])) == ["data.x=1,model.x=2"]
    for text, message in (("seed=", "give values"), ("seed", "give values"), ("seed=1,1", "a value occurs twice")):
        with pytest.raises(ValueError, match=message):
            sweep_grid.runs([text])


def test_a_finished_run_is_known_by_its_recipe(tmp_path):
    done, begun = run(tmp_path / "done"), run(tmp_path / "begun", top1=None)
    config = configs.from_json(done / "config.json")
    assert resuming.is_finished(done, config) and not resuming.is_finished(begun, config)
    with config.unlocked():
        config.log.every_steps, config.schedule.lr = 7, 1e-3
    assert resuming.is_finished(done, config)
    with config.unlocked():
        config.schedule.lr = 2e-3
    assert not resuming.is_finished(done, config)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config=configs/quickstart.py"], "this is the recipe of one run; add lists of values"),
    (["--config=configs/timeseries.py", "--sweep.seed=0,1"], "this recipe is for time series"),
    (["--config=configs/quickstart.py", "--sweep.schedul.lr=1"], "no key 'schedul'; the nearest is 'schedule'"),
])  # fmt: skip
def test_a_config_for_another_command_is_refused(tmp_path, capsys, arguments, message):
    from equivit import sweep

    assert sweep.main([*arguments, f"--workdir={tmp_path}"]) == 1
    assert message in capsys.readouterr().err
