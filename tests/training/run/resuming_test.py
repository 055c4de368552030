"""A run that goes on: names of classes, examples, changed values, and when it goes on bit for bit."""

import json
import shutil

import pytest

from equivit.trained_on import UNKNOWN, TrainedOn, check_classes
from equivit.training import checkpoints, loop
from equivit.training.run import resuming
from tests.training import tiny
from tests.training.loop_test import Pipeline, options

ANIMALS = TrainedOn(("bat", "cat", "dog"), 24)
EXACT = "The run continues as if it had not stopped, bit for bit."


def train(workdir, config=None, data=ANIMALS, pipeline=None):
    return loop.train(
        config or options(), workdir=workdir, pipeline=pipeline or Pipeline(), evaluate=lambda model, config: {},
        trained_on=data, make_program=tiny.make_program,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 4 steps."""
    workdir, config = tmp_path_factory.mktemp("stopped"), options()
    config.steps = 4
    train(workdir, config)
    return workdir, config


@pytest.fixture
def copy(stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run", stopped[1].copy_and_resolve_references()


def contents(workdir):
    return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("ant", "bat", "cat"), "class 0 is 'ant', .* it is 'bat' .new are ant; missing are dog., so labels would"),
        (("cat", "bat", "dog"), "class 0 is 'cat', .* it is 'bat' .they are in another order., so labels would"),
        (("bat", "cat"), "there are 2 classes, .* 3 .missing are dog., so labels would"),
    ],
)
def test_other_classes_are_refused_and_nothing_is_changed(copy, classes, message):
    before = contents(copy[0])
    with pytest.raises(ValueError, match=message) as raised:
        train(*copy, TrainedOn(classes, 24))
    assert str(copy[0] / "run.json") in str(raised.value) and "\n" not in str(raised.value)
    assert contents(copy[0]) == before


def test_an_unchanged_run_goes_on_bit_for_bit(copy, stopped, capsys):
    workdir, config = copy
    config.data.workers, config.log.every_steps, config.checkpoint.every_steps = 3, 1, 2
    train(workdir, config)
    said = capsys.readouterr().out
    assert EXACT in said and "config.data.workers: 0 -> 3" in said
    assert resuming.data_before(workdir) == ANIMALS


def test_another_number_of_examples_is_reported(copy, capsys):
    workdir, config = copy
    train(workdir, config, ANIMALS._replace(examples=28))
    said = capsys.readouterr().out
    assert "examples: 24 -> 28" in said and "will differ from an uninterrupted run, by examples." in said
    assert "bit for bit" not in said and resuming.data_before(workdir).examples == 28


@pytest.mark.parametrize("name", ["_threads", "_processor"])
def test_another_machine_is_reported(copy, capsys, monkeypatch, name):
    monkeypatch.setattr(resuming, name, lambda: "other")
    train(*copy)
    said = capsys.readouterr().out
    assert "uninterrupted run, by devices." in said and "bit for bit" not in said


def test_each_changed_value_is_printed_before_the_run_goes_on_and_the_old_file_is_kept(copy, capsys):
    workdir, config = copy
    files = [(workdir / "config.json").read_bytes()]
    for number, lr in enumerate((2e-2, 3e-2), 1):
        config.schedule.lr, config.optimizer.weight_decay = lr, lr
        config.steps += 1
        train(workdir, config)
        lines = capsys.readouterr().out.splitlines()
        old = json.loads(files[-1])
        place = lines.index(f"  config.schedule.lr: {old['schedule']['lr']} -> {lr}")
        assert f"  config.steps: {old['steps']} -> {config.steps}" in lines
        assert place < next(i for i, line in enumerate(lines) if line.startswith("step "))
        assert not any("bit for bit" in line for line in lines)
        kept = [(workdir / f"config.{i + 1}.json").read_bytes() for i in range(number)]
        assert kept == files
        files.append((workdir / "config.json").read_bytes())
    train(workdir, config)
    assert EXACT in capsys.readouterr().out and not (workdir / "config.3.json").exists()


def test_runs_of_earlier_versions_go_on(copy, capsys):
    (copy[0] / "run.json").unlink()
    train(*copy, TrainedOn(("ant", "bee", "fly"), 9))
    said = capsys.readouterr().out
    assert "It is not known whether data and devices are unchanged." in said and "bit for bit" not in said


@pytest.mark.parametrize("damaged", ["", "[1]", '{"classes": 3}', "[" * 100_000])
def test_a_damaged_file_is_named(copy, damaged):
    (copy[0] / "run.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"run\.json is damaged .*; remove it to create it again"):
        train(*copy)


def test_names_that_count_the_labels_are_no_names():
    numbers = ("0", "1", "2")
    for one, other in ((numbers, ANIMALS.classes), (ANIMALS.classes, numbers), (ANIMALS.classes, UNKNOWN.classes)):
        check_classes("data", one, other, "run.json", "fix it")
    with pytest.raises(ValueError, match="class 0 is '01'"):
        check_classes("data", ("01", "1", "2"), ANIMALS.classes, "run.json", "fix it")


def test_a_run_directory_that_is_removed_is_not_said_to_be_kept(tmp_path):
    """Nor made again, with the rest of a run that has no configuration."""
    workdir = tmp_path / "run"

    def remove(t):
        if t == 2:
            shutil.rmtree(workdir)

    with pytest.raises(checkpoints.NotSavedError, match="checkpoints was removed during the run, and nothing is left"):
        train(workdir, pipeline=Pipeline(remove))
    assert not workdir.exists()
