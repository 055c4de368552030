"""Trackers beside metrics.jsonl, and the traced steps."""

import contextlib
import csv
import sys
import types

import pytest

from equivit import train
from equivit.training import config as configs
from equivit.training import logging, trackers


def log(workdir, start, **options):
    section = configs.get_base().log
    section.update(options)
    return logging.Log(workdir, section, total=10, start=start)


def test_a_table_of_all_metrics(tmp_path, capsys):
    """A resumed run drops later rows; a new metric gets a column; final figures replace earlier ones."""
    with log(tmp_path, 0, to=("csv",)) as first:
        first.write(2, {"loss": 1.0})
        first.write(4, {"loss": 0.5, "eval/top1": 0.3})
    with log(tmp_path, 2, to=("csv",)) as second:
        second.write(4, {"loss": 0.6, "lr": 0.1})
        second.write(6, {"loss": 0.4})
        second.conclude({"eval/top1": 0.8})
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["lr"], row["eval/top1"]) for row in rows] == [
        ("2", "1.0", "", ""), ("4", "0.6", "0.1", ""), ("6", "0.4", "", ""), ("10", "", "", "0.8"),
    ]  # fmt: skip


def test_weights_and_biases_goes_on_in_its_record(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for start in (0, 2):
        with log(tmp_path, start, to=("wandb",)) as one:
            one.write(start + 2, {"loss": 1.0})
    first, second = calls[0], calls[3]
    assert first["id"] == second["id"] and first["resume"] == "allow" and first["config"] == {"seed": 3}
    assert calls[1:3] == [(2, {"loss": 1.0}), "finish"]


@pytest.mark.parametrize(("change", "message"), [
    ("log.to=tensorbord", r"config\.log\.to='tensorbord' is not one of tensorboard, csv, wandb; the nearest"),
    ("log.to=wandb", r"config\.log\.to: 'wandb' needs the library of that name .*; pip install wandb"),
    ("log.profile=105:100", r"config\.log\.profile='105:100' must be the first step and the one after the last"),
    ("log.profile=5:", r"config\.log\.profile='5:' must be"),
])  # fmt: skip
def test_mistakes_are_reported_before_a_run(change, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(ValueError, match=message):
        configs.load("configs/quickstart.py:quicktest", [change])


def test_a_stored_config_needs_no_library_of_a_tracker(tmp_path, monkeypatch):
    """Runs are read, evaluated and compared where their tracker is not installed; other values are still checked."""
    config = configs.load("configs/quickstart.py:quicktest").unlock()
    config.log.to, path = ("wandb",), tmp_path / "config.json"
    path.write_text(configs.to_json(config))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    stored = configs.from_json(path)
    configs.validate(stored)
    assert stored.log.to == ("wandb",)
    config.log.profile = "5:"
    path.write_text(configs.to_json(config))
    with pytest.raises(ValueError, match=r"config\.log\.profile='5:' must be"):
        configs.from_json(path)


def test_a_trace_that_a_run_does_not_reach_is_refused():
    changes = ["data.source=synthetic", "epochs=None", "steps=10", "data.workers=0"]
    for first, most in ((9, None), (10, 9)):
        config = configs.load("configs/quickstart.py:quicktest", [*changes, f"log.profile={first}:20"])
        with contextlib.nullcontext() if most is None else pytest.raises(ValueError, match="has 10 steps; .*most 9"):
            train.prepare(config)


def test_a_run_that_resumes_after_the_first_traced_step_says_so(tmp_path):
    for steps, starts in (("2:4", (3, 9)), ("0:4", (1,)), (None, ())):
        with logging.Profile(tmp_path, steps) as profile:
            late = [start for start in range(10) if profile.remarks(start)]
        assert late == list(range(starts[0], 10) if starts else ())


def test_some_steps_are_traced(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda place: calls.append(place))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    with logging.Profile(tmp_path, "2:4") as profile:
        ends = []
        for step in range(6):
            profile.before(step)
            ends.append(profile.after(step, step))
            calls.append(step)
    assert calls == [0, 1, str(tmp_path / "profile"), 2, "stop", 3, 4, 5]
    assert ends == [None, None, None, tmp_path / "profile", None, None]
    with logging.Profile(tmp_path, "0:4") as profile:
        profile.before(0)
    assert calls[-1] == "stop"  # a run that ends early ends the trace too
    assert set(trackers.TRACKERS) == {"tensorboard", "csv", "wandb"}
