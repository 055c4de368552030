"""Comparing runs: seeds of one recipe together, differing keys, mean and spread, unfinished runs; grids of a sweep."""

import csv
import gc
import io
import json
import weakref

import pytest

from equivit import compare, sweep, train
from equivit.training import build, comparison, sweep_grid
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
    with pytest.raises(ValueError, match="two runs have the directory 'source=folder:a_b', in which / becomes _"):
        sweep_grid.runs(["data.source=folder:a/b,folder:a_b"])


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


def stored(place, **model):
    """A finished run whose model the data have completed, and its configuration before they did."""
    config = configs.from_json(run(place) / "config.json").unlock()
    config.model.update(model)
    completed = config.copy_and_resolve_references()
    completed.model.update(image_size=(32, 32), num_classes=10, in_channels=1)
    (place / "config.json").write_text(configs.to_json(completed))
    return config


def test_a_finished_run_has_the_same_model_and_evaluation(tmp_path):
    """The data complete a model, and defaults may be given or not."""
    place = tmp_path / "run"
    config = stored(place, drop_path=0.1)
    assert resuming.is_finished(place, config)
    config.model.registers = 0
    assert resuming.is_finished(place, config)
    resuming.check_recipe(place, config)
    config.evaluation.suite, config.data.corruption, config.data.severity = ("accuracy", "shift"), "fog", 3
    assert not resuming.is_finished(place, config)
    resuming.check_recipe(place, config)
    config.steps += 4
    resuming.check_recipe(place, config)
    config.evaluation.suite, config.data.corruption, config.data.severity, config.steps = None, None, 5, 4
    del config.model["drop_path"], config.model["registers"]
    assert not resuming.is_finished(place, config)
    with pytest.raises(ValueError, match=f"{place} has another recipe, config.model.drop_path=0.1 instead of None"):
        resuming.check_recipe(place, config)


def test_recipes_have_names_of_their_own(tmp_path):
    """Where more than three keys differ, recipes have the names of their directories, of seeds the one around them."""

    def other(place, value, seed=0):
        config = configs.from_json(run(place, seed=seed) / "config.json").unlock()
        config.optimizer.weight_decay = config.optimizer.momentum = config.schedule.lr = config.schedule.min_lr = value
        (place / "config.json").write_text(configs.to_json(config))
        return place

    runs = [
        other(tmp_path / f"{name}/seed_{seed}", value, seed)
        for name, value in (("a", 0.1), ("b", 0.2))
        for seed in (0, 1)
    ]
    found = comparison.recipes(runs)
    assert [recipe.name for recipe in found] == ["a", "b"]
    runs += [other(tmp_path / "c/b", 0.3), other(tmp_path / "a/seed_2", 0.4)]
    names = [recipe.name for recipe in comparison.recipes(runs)]
    assert names == [str(tmp_path / name) for name in ("a/seed_0", "b/seed_0", "c/b", "a/seed_2")]


RECIPE = """
from equivit.training.config import get_base

def get_config():
    config = get_base()
    config.update(steps=4, batch_size=8)
    config.data.update(mean=(0.5,), std=(0.5,))
    config.model = dict(name="vit_ti16", width=16, depth=1, num_heads=2, patch_size=16)
    return config
"""


@pytest.fixture
def sweep_of(tmp_path, monkeypatch):
    """A function that runs a sweep of `RECIPE` without training, and returns its status and the runs."""
    trained = []
    monkeypatch.setattr(train, "train", lambda config, workdir: trained.append(workdir.name) or run(workdir))
    (tmp_path / "recipe.py").write_text(RECIPE)

    def start(*arguments):
        status = sweep.main([f"--config={tmp_path / 'recipe.py'}", f"--workdir={tmp_path / 'sweep'}", *arguments])
        return status, trained

    return start


@pytest.mark.parametrize(("values", "message"), [
    ("schedule.warmup_steps=1,500,0", "config.schedule.warmup_steps=500: a warm-up of 500 steps does not fit"),
    ("batch_size=8,4096,16", "batch_size=4096 must not exceed the 1437 samples"),
    ("batch_size=8,12,16", "config.batch_size=12 must be divisible by 8"),
    ("data.eval_split=test,tset", "there is no split 'tset'"),
    ("optimizer.no_decay=('head.*'),('hed.*')", "optimizer.no_decay: 'hed.*' matches no parameter"),
    ("optimizer.freeze=('head.*'),('*')", "optimizer.freeze=('*',) leaves nothing to train"),
    ("init=none,no/model", "config.init=no/model: there is no no/model"),
])  # fmt: skip
def test_a_value_that_does_not_fit_is_found_before_anything_is_trained(sweep_of, capsys, values, message):
    assert sweep_of(f"--sweep.{values}") == (1, [])
    assert message in capsys.readouterr().err


def test_a_run_with_a_checkpoint_no_longer_needs_its_first_weights(sweep_of, tmp_path):
    (tmp_path / "sweep/init=gone" / "checkpoints").mkdir(parents=True)
    assert sweep_of("--sweep.init=gone")[1] == ["init=gone"]


def test_a_sweep_keeps_one_pipeline_at_a_time(sweep_of, monkeypatch):
    made, make = [], build.make_pipeline

    def counted(config):
        gc.collect()
        assert all(reference() is None for reference in made)
        pipeline = make(config)
        made.append(weakref.ref(pipeline))
        return pipeline

    monkeypatch.setattr(build, "make_pipeline", counted)
    assert sweep_of("--sweep.seed=0,1,2") == (0, ["seed=0", "seed=1", "seed=2"])


def test_a_sweep_refuses_runs_of_another_recipe(sweep_of, tmp_path, capsys):
    config = configs.load(str(tmp_path / "recipe.py"))
    (run(tmp_path / "sweep/seed=0") / "config.json").write_text(configs.to_json(config))
    assert sweep_of("--sweep.seed=0,1", "--config.optimizer.weight_decay=0.3") == (1, [])
    place, before = tmp_path / "sweep/seed=0", config.optimizer.weight_decay
    message = (
        f"{place} has another recipe, config.optimizer.weight_decay={before} instead of 0.3; give another --workdir."
    )
    assert capsys.readouterr().err == f"error: {message}\n"
    assert sweep_of("--sweep.seed=0,1", "--config.log.every_steps=3") == (0, ["seed=1"])


@pytest.mark.parametrize(("arguments", "message"), [
    (["--config=configs/quickstart.py"], "this is the recipe of one run; add lists of values"),
    (["--config=configs/timeseries.py", "--sweep.seed=0,1"], "this recipe is for time series"),
    (["--config=configs/quickstart.py", "--sweep.schedul.lr=1"], "no key 'schedul'; the nearest is 'schedule'"),
])  # fmt: skip
def test_a_config_for_another_command_is_refused(tmp_path, capsys, arguments, message):
    assert sweep.main([*arguments, f"--workdir={tmp_path}"]) == 1
    assert message in capsys.readouterr().err
