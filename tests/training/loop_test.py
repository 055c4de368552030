"""The loop in this process, on a tiny model: resuming, signals, losses that are not finite, evaluation, full disks."""

import errno
import functools
import json
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from tensorboardX.proto import event_pb2

from equivit.evaluation import figures
from equivit.objectives.supervised import Supervised
from equivit.training import checkpoints, loop
from equivit.training import config as configs
from equivit.training import logging as logs
from equivit.training.run import checkpoint_files, resuming, stopping
from tests.training import tiny
from tests.training.state_test import mesh_of


class Pipeline:
    """Batches of `tiny`; `before(t)` is called before batch t is made."""

    steps_per_epoch = 4

    def __init__(self, before=lambda t: None):
        self.before = before

    def batches(self, start=0):
        while True:
            self.before(start)
            yield tiny.batch(start)
            start += 1


@functools.cache
def program_of(sections, mesh, total):
    """Build the program of the config sections in a JSON text."""
    return tiny.make_program(tiny.config(**json.loads(sections)), mesh, total=total, per_epoch=4)


def make_program(config, mesh, *, total, per_epoch):
    """Return one program for all configs that differ only in settings of the loop."""
    assert per_epoch == Pipeline.steps_per_epoch
    sections = {name: config[name].to_dict() for name in ("model", "data", "objective", "optimizer", "schedule")}
    return program_of(json.dumps(sections), mesh, total)


def train(workdir, options, pipeline=None, evaluate=lambda model, config: {"accuracy": {"top1": 0.5}}):
    """The final figures of a run, None if it was stopped."""
    pipeline = pipeline or Pipeline()
    outcome = loop.train(options, workdir=workdir, pipeline=pipeline, evaluate=evaluate, make_program=make_program)
    return outcome and outcome.report


def options(**sections):
    defaults = dict(schedule=dict(lr=1e-2), log=dict(every_steps=2, to=()), checkpoint=dict(every_steps=4))
    return tiny.config(**{**defaults, **sections})


def last(workdir):
    mesh, config = mesh_of(8, 1), options()
    with jax.set_mesh(mesh), checkpoints.Checkpoints(workdir, config.checkpoint) as manager:
        return jax.device_get(manager.restore(make_program(config, mesh, total=10, per_epoch=4).abstract))


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, train(workdir, options())


def test_the_report_and_the_files(whole):
    workdir, report = whole
    assert report == json.loads((workdir / "report.json").read_text()) == {"step": 10, "eval/accuracy/top1": 0.5}
    assert [row["step"] for row in rows(workdir)] == [2, 4, 6, 8, 10, 10]


def test_the_outcome_is_the_model_and_what_was_measured_on_it(whole):
    seen = []

    def evaluate(model, config):
        seen.append(model)
        return {"accuracy": {"top1": 0.5, "of": [1, 2]}}

    outcome = loop.train(options(), workdir=whole[0], pipeline=Pipeline(), evaluate=evaluate, make_program=make_program)
    assert outcome.report == {"step": 10, "eval/accuracy/top1": 0.5}
    assert outcome.results == {"accuracy": {"top1": 0.5, "of": [1, 2]}} and outcome.model is seen[-1]


def test_the_objective_knows_the_length_of_the_run(tmp_path):
    clocks = []

    class Watching(Supervised):
        def after_step(self, trainable, extra, clock):
            clocks.append(clock)
            return extra

    config = options()
    make = functools.partial(tiny.make_program, objective=Watching(config))
    loop.train(config, workdir=tmp_path, pipeline=Pipeline(), evaluate=lambda *_: {}, make_program=make)
    assert {(clock.total, clock.per_epoch) for clock in clocks} == {(10, 4)}


def test_what_is_static_follows_the_length_of_the_schedules(tmp_path):
    seen = []

    class Watching(Supervised):
        def static(self, module, progress):
            seen.append(progress)

    config = options(schedule=dict(lr=1e-2, length=20))
    make = functools.partial(tiny.make_program, objective=Watching(config))
    loop.train(config, workdir=tmp_path, pipeline=Pipeline(), evaluate=lambda *_: {}, make_program=make)
    assert seen == [step / 20 for step in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on(whole, tmp_path, number, status):
    pipeline = Pipeline(before=lambda t: os.kill(os.getpid(), number) if t == 4 else None)
    before = signal.getsignal(number)
    with pytest.raises(stopping.Stopped) as stopped:
        train(tmp_path, options(), pipeline)
    assert stopped.value.code == stopped.value.status == status
    assert last(tmp_path).step == 5
    assert signal.getsignal(number) == before
    assert train(tmp_path, options())["step"] == 10
    chex.assert_trees_all_equal(last(tmp_path), last(whole[0]))
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [2, 4, 6, 8, 10]


def test_a_signal_before_the_first_step_is_not_lost(tmp_path):
    """An exception would be lost in a hook of the garbage collector, which JAX has."""

    def make(*args, **others):
        program = make_program(*args, **others)
        os.kill(os.getpid(), signal.SIGINT)
        return program

    with pytest.raises(stopping.Stopped):
        loop.train(options(), workdir=tmp_path, pipeline=Pipeline(), evaluate=lambda *_: {}, make_program=make)
    assert last(tmp_path).step == 1


@pytest.mark.parametrize(("every", "step"), [(1, 4), (None, 10)])
def test_a_signal_ends_an_evaluation_with_everything_saved(tmp_path, capsys, every, step):
    """An evaluation every few epochs, and the final one."""

    def evaluate(model, config):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the evaluation went on")

    config = options(evaluation=dict(every_epochs=every), checkpoint=dict(every_steps=None))
    with pytest.raises(stopping.Stopped):
        train(tmp_path, config, evaluate=evaluate)
    assert last(tmp_path).step == step
    assert f"SIGTERM: saved {tmp_path}/checkpoints/{step}; start again" in capsys.readouterr().out


def test_where_all_processes_stop_after_the_last_step_nothing_is_evaluated(tmp_path, monkeypatch):
    """They agree once, so a later run in the same processes would not hear of the signal."""
    answers = iter([False] * 9 + [True])
    monkeypatch.setattr(stopping.Signals, "asked", lambda self: next(answers))
    with pytest.raises(stopping.Stopped):
        train(tmp_path, options(), evaluate=lambda model, config: pytest.fail("it was evaluated"))
    assert last(tmp_path).step == 10


GONE = jax.errors.JaxRuntimeError("DATA_LOSS: of a device")


@pytest.mark.parametrize(("where", "error", "every", "step"), [
    ("evaluation", ValueError("a bad label"), None, 4), ("evaluation", GONE, 4, 4),
    ("data", FileNotFoundError("an image"), 4, 6), ("data", GONE, 4, 4),
])  # fmt: skip
def test_an_error_in_the_data_or_an_evaluation_loses_no_step(tmp_path, capsys, where, error, every, step):
    """Where the device itself failed, nothing more is saved; a checkpoint that is due comes before the evaluation."""

    def fail(t):
        if t == 6:
            raise error

    def evaluate(model, config):
        if where == "evaluation":
            raise error
        return {"accuracy": {"top1": 0.5}}

    config = options(evaluation=dict(every_epochs=1), checkpoint=dict(every_steps=every))
    with pytest.raises(type(error)):
        train(tmp_path, config, Pipeline(fail), evaluate)
    assert last(tmp_path).step == step
    assert (f"{type(error).__name__}: saved {tmp_path}/checkpoints/{step};" in capsys.readouterr().out) == (
        error != GONE
    )
    train(tmp_path, config)
    assert [row["step"] for row in rows(tmp_path) if "eval/accuracy/top1" in row] == [4, 8, 10]


def test_an_error_before_the_first_step_leaves_no_checkpoint(tmp_path):
    def fail(t):
        raise FileNotFoundError("an image")

    with pytest.raises(FileNotFoundError):
        train(tmp_path, options(), Pipeline(fail))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_another_teacher_on_resuming_is_told(tmp_path, capsys):
    """Such as a run that has trained on."""

    def run(steps, seed):
        config = options()
        config.steps = steps
        teachers = {"teacher": tiny.Tiny(nnx.Rngs(seed))}
        make = functools.partial(tiny.make_program, teachers=teachers)
        loop.train(config, workdir=tmp_path, pipeline=Pipeline(), evaluate=lambda *_: {}, make_program=make)
        return capsys.readouterr().out

    run(2, seed=0)
    assert "teacher" not in run(2, seed=0)
    said = run(2, seed=1)
    assert "  teacher: 'checksum " in said and "uninterrupted run, by teacher." in said


def test_a_finished_run_is_only_evaluated_again(whole):
    before = last(whole[0])
    assert train(whole[0], options())["step"] == 10
    chex.assert_trees_all_equal(last(whole[0]), before)


def test_another_evaluation_of_a_finished_run_replaces_its_report_and_trains_nothing(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    before = last(tmp_path)

    def evaluate(model, config):
        assert not (tmp_path / "report.json").exists()  # an interruption must not leave the figures of the other one
        return {"shift": {"top1": 0.25}}

    assert train(tmp_path, options(evaluation=dict(suite=("shift",))), evaluate=evaluate)["eval/shift/top1"] == 0.25
    chex.assert_trees_all_equal(last(tmp_path), before)


def test_a_run_that_is_extended_has_no_report_before_its_end(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    config = options()
    config.steps = 14
    with pytest.raises(loop.NotFiniteError):
        train(tmp_path, config, Poisoned())
    assert not (tmp_path / "report.json").exists() and not resuming.is_finished(tmp_path, config)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_and_loses_nothing(tmp_path, log_every):
    class Poisoned(Pipeline):
        def batches(self, start=0):
            for t, batch in enumerate(super().batches(start), start):
                if t == 6:
                    batch["image"] = np.full(batch["image"].shape, np.nan, np.float32)
                yield batch

    config = options(log=dict(every_steps=log_every, to=()))
    with pytest.raises(loop.NotFiniteError, match=r"not finite at step 6 \(learning rate .*good checkpoint: .*/6\."):
        train(tmp_path, config, Poisoned())
    state = last(tmp_path)
    assert state.step == 6 and state.good
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert train(tmp_path, config)["step"] == 10  # with the cause removed it goes on from there


class Poisoned(Pipeline):
    """From batch 6 on nothing is finite."""

    def batches(self, start=0):
        for t, batch in enumerate(super().batches(start), start):
            yield batch if t < 6 else {**batch, "image": np.full(batch["image"].shape, np.nan, np.float32)}


def test_where_the_first_step_is_not_finite_nothing_is_said_to_be_saved(tmp_path):
    pipeline = Poisoned()
    batches = pipeline.batches
    pipeline.batches = lambda start=0: batches(6)
    match = r"not finite at step 0 \(.*\); nothing was saved\.  To begin again, lower schedule\.lr"
    with pytest.raises(loop.NotFiniteError, match=match):
        train(tmp_path, options(), pipeline)


def test_what_is_advised_after_a_loss_that_is_not_finite_works(tmp_path):
    """Gradients that were not clipped can be, and the checkpoint from before the trouble is named and kept."""
    config = options(optimizer=dict(clip=None))
    with pytest.raises(loop.NotFiniteError) as caught:
        train(tmp_path, config, Poisoned())
    message = str(caught.value)
    assert "clip gradients with optimizer.clip (now None)" in message
    assert "delete it if the loss had risen before, to continue from the one of step 4" in message
    assert train(tmp_path, options(optimizer=dict(clip=1.0)))["step"] == 10


def test_a_run_of_another_model_is_left_as_it_is(whole):
    before = (whole[0] / "config.json").read_text()
    with pytest.raises(checkpoint_files.OtherModelError, match="extra.ema"):
        train(whole[0], options(objective=dict(ema=0.9)))
    assert (whole[0] / "config.json").read_text() == before


@pytest.mark.parametrize(("sections", "message"), [
    (dict(model=dict(num_heads=6)), "config.model.num_heads=6: the run in .* has its default, and the model must"),
    (dict(model=dict(name="vit_s16")), "config.model.name='vit_s16': the run in .* has 'vit_ti16'"),
])  # fmt: skip
def test_a_run_keeps_its_model(whole, sections, message):
    """Arrays of the same shapes do not make it the same model."""
    before = (whole[0] / "config.json").read_text()
    with pytest.raises(ValueError, match=message):
        train(whole[0], options(**sections))
    assert (whole[0] / "config.json").read_text() == before


def test_what_leaves_the_model_the_same_can_change(tmp_path):
    """A default may be given or not, a size as a number or a pair, and blocks are run in one way or another."""
    before = tiny.config(model=dict(patch_size=8))
    for changes in (dict(patch_size=(8, 8)), dict(patch_size=8, registers=0), dict(patch_size=8, remat="full")):
        resuming.check(tmp_path, tiny.config(model=changes), before)
    with pytest.raises(ValueError, match=r"config.model.patch_size=4: .* has 8"):
        resuming.check(tmp_path, tiny.config(model=dict(patch_size=4)), before)


def test_a_run_keeps_its_objective(tmp_path):
    """Supervised training and distillation have the same arrays."""
    before, after = tiny.config(), tiny.config(model=dict(num_heads=6)).unlock()
    after.objective = configs.get_base("distillation").objective
    with pytest.raises(
        ValueError,
        match="config.objective.name='distillation': the run in .* has 'supervised', and this setting must",
    ):
        resuming.check(tmp_path, after, before)


def test_a_run_cannot_end_before_it_goes_on(whole):
    config = options()
    config.steps = 9
    with pytest.raises(ValueError, match="config.steps=9: .* the checkpoint is of step 10; give at least 10 steps"):
        train(whole[0], config)
    assert json.loads((whole[0] / "report.json").read_text())["step"] == 10


def test_changed_values_are_told_on_resuming(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    train(tmp_path, options(schedule=dict(lr=2e-2)))
    assert "Changed values: schedule.lr." in capsys.readouterr().out


def test_a_trace_before_the_step_of_resuming_is_told(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    train(tmp_path, options(log=dict(every_steps=2, to=(), profile="2:4")))
    assert "log.profile begins at step 2, and the run resumes at step 10." in capsys.readouterr().out


def test_evaluation_every_so_many_epochs_sees_the_model(tmp_path):
    seen = []

    def evaluate(model, config):
        seen.append(float(np.abs(model.head.kernel[...]).sum()))
        return {"accuracy": {"top1": 0.25}}

    config = options(evaluation=dict(every_epochs=1))
    train(tmp_path, config, evaluate=evaluate)
    assert len(set(seen)) == 3  # after steps 4, 8 and 10
    assert [row["step"] for row in rows(tmp_path) if "eval/accuracy/top1" in row] == [4, 8, 10]


@pytest.mark.parametrize("error", [stopping.Stopped, InterruptedError])
def test_an_evaluation_that_is_due_where_a_run_stops_is_made_once(tmp_path, error):
    """A signal stops a run before the evaluation, an error in the next batch after it."""

    def stop(t):
        if error is stopping.Stopped and t == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        elif error is InterruptedError and t == 4:
            raise error

    config = options(evaluation=dict(every_epochs=1))
    with pytest.raises(error):
        train(tmp_path, config, Pipeline(stop))
    assert last(tmp_path).step == 4
    train(tmp_path, config)
    assert [row["step"] for row in rows(tmp_path) if "eval/accuracy/top1" in row] == [4, 8, 10]
    assert [row["step"] for row in rows(tmp_path)] == [2, 4, 4, 6, 8, 8, 10, 10]


def test_lines_after_the_checkpoint_are_dropped_on_resuming(whole, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "lo')
    train(tmp_path, options())
    assert [row["step"] for row in rows(tmp_path)] == [2, 4, 6, 8, 10, 10]


def test_lines_that_cannot_be_read_are_left_out_and_kept_aside(tmp_path, caplog):
    log = b'{"step": 2}\nbroken\n\xff\xfe\n{"loss": 1.0}\nnull\n{"step": 4}\n{"step": 6}\n{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_bytes(log)
    with logs.Log(tmp_path, options().log, total=10, start=4):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 2}\n{"step": 4}\n'
    (aside,) = (tmp_path / "damaged").iterdir()
    assert aside.read_bytes() == log
    assert f"{tmp_path}/metrics.jsonl: 4 lines cannot be read" in caplog.text


BAD = {
    "nested": b"[" * 200_000,
    "surrogate": b'{"step": 2, "\xed\xa0\x80": 1.0}',
    "list": b'{"step": 2, "loss": [1.0]}',
    "text": b'{"step": 2, "loss": "low"}',
    "huge": b'{"step": 2, "loss": 1' + b"0" * 400 + b"}",
    "huge step": b'{"step": 1' + b"0" * 5000 + b"}",
    "no step": b"[1, 2]",
}


def test_no_line_of_metrics_stops_a_run(whole, tmp_path, caplog):
    """Neither at its start nor at its end, where a picture is drawn; the lines are reported, and nothing is lost."""
    good = b'{"step": 2, "loss": 1.0}\n{"step": 4, "loss": NaN}\n'
    content = good + b"".join(line + b"\n" for line in BAD.values()) + b'{"step": 6, "loss": 1.0'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with logs.Log(tmp_path, options().log, total=10, start=4):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == good
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl: {len(BAD)} lines cannot be read and are left out"
    ]
    (aside,) = (tmp_path / "damaged").iterdir()
    assert aside.read_bytes() == content
    (tmp_path / "metrics.jsonl").write_bytes(content)
    figures.learning_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()


def test_a_finished_run_has_its_final_figures_once(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    before = rows(tmp_path)
    for _ in range(2):
        train(tmp_path, options())
        assert rows(tmp_path) == before
    train(tmp_path, options(), evaluate=lambda model, config: {"accuracy": {"top1": 0.25}})
    assert rows(tmp_path) == [*before[:-1], {"step": 10, "eval/accuracy/top1": 0.25}]


def test_where_the_disk_is_full_the_error_says_what_is_kept(whole, tmp_path, monkeypatch):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)

    def write(self, step, metrics):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs.Log, "write", write)
    with pytest.raises(OSError, match=r"No space left .*; the last whole checkpoint, .*/checkpoints/10, is kept"):
        train(tmp_path, options())


def test_events_for_tensorboard(tmp_path):
    with logs.Log(tmp_path, options(log=dict(to=("tensorboard",))).log, total=10, start=4) as log:
        log.write(6, {"loss": 1.5, "lr": 0.1})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    events = list(read_events(path))
    assert events[0].file_version and events[1].session_log.status == 1 and events[1].step == 5
    assert events[2].step == 6 and {v.tag: v.simple_value for v in events[2].summary.value} == {
        "loss": 1.5, "lr": np.float32(0.1),
    }  # fmt: skip


def read_events(path):
    """Records of a length, its check sum, an event, and its check sum."""
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
