"""The loop in this process, on a tiny model: resuming, SIGTERM, losses that are not finite, evaluation."""

import functools
import json
import os
import shutil
import signal

import chex
import jax
import numpy as np
import pytest

from equivit.objectives.supervised import Supervised
from equivit.training import checkpoints, loop
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


def train(workdir, options, pipeline=None, evaluate=lambda model, config: {"accuracy": {"top1": 0.5}}):
    """The final figures of a run, None if it was stopped."""
    pipeline = pipeline or Pipeline()
    outcome = loop.train(options, workdir=workdir, pipeline=pipeline, evaluate=evaluate, make_program=tiny.of_config)
    return outcome and outcome.report


def options(**sections):
    defaults = dict(schedule=dict(lr=1e-2), log=dict(every_steps=2, tensorboard=False), checkpoint=dict(every_steps=4))
    return tiny.config(**{**defaults, **sections})


def last(workdir):
    mesh, config = mesh_of(8, 1), options()
    with jax.set_mesh(mesh), checkpoints.Checkpoints(workdir, config.checkpoint) as manager:
        return jax.device_get(manager.restore(tiny.program(config, mesh).abstract))


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

    outcome = loop.train(
        options(), workdir=whole[0], pipeline=Pipeline(), evaluate=evaluate, make_program=tiny.of_config
    )
    assert outcome.report == {"step": 10, "eval/accuracy/top1": 0.5}
    assert outcome.results == {"accuracy": {"top1": 0.5, "of": [1, 2]}} and outcome.model is seen[-1]


def test_the_objective_knows_the_length_of_the_run(tmp_path):
    clocks = []

    class Watching(Supervised):
        def after_step(self, trainable, extra, clock):
            clocks.append(clock)
            return extra

    config = options()
    make = functools.partial(tiny.of_config, objective=Watching(config))
    loop.train(config, workdir=tmp_path, pipeline=Pipeline(), evaluate=lambda *_: {}, make_program=make)
    assert {(clock.total, clock.per_epoch) for clock in clocks} == {(10, 4)}


def test_sigterm_saves_and_the_run_goes_on(whole, tmp_path):
    pipeline = Pipeline(before=lambda t: os.kill(os.getpid(), signal.SIGTERM) if t == 4 else None)
    before = signal.getsignal(signal.SIGTERM)
    assert train(tmp_path, options(), pipeline) is None
    assert last(tmp_path).step == 5
    assert signal.getsignal(signal.SIGTERM) == before
    assert train(tmp_path, options())["step"] == 10
    chex.assert_trees_all_equal(last(tmp_path), last(whole[0]))
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [2, 4, 6, 8, 10]


def test_a_finished_run_is_only_evaluated_again(whole):
    before = last(whole[0])
    assert train(whole[0], options())["step"] == 10
    chex.assert_trees_all_equal(last(whole[0]), before)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_and_loses_nothing(tmp_path, log_every):
    class Poisoned(Pipeline):
        def batches(self, start=0):
            for t, batch in enumerate(super().batches(start), start):
                if t == 6:
                    batch["image"] = np.full(batch["image"].shape, np.nan, np.float32)
                yield batch

    config = options(log=dict(every_steps=log_every, tensorboard=False))
    with pytest.raises(loop.NotFiniteError, match=r"not finite at step 6 \(learning rate .*good checkpoint: .*/6\."):
        train(tmp_path, config, Poisoned())
    state = last(tmp_path)
    assert state.step == 6 and state.good
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert train(tmp_path, config)["step"] == 10  # with the cause removed it goes on from there


def test_a_run_of_another_model_is_left_as_it_is(whole):
    before = (whole[0] / "config.json").read_text()
    with pytest.raises(checkpoints.OtherModelError, match="extra.ema"):
        train(whole[0], options(objective=dict(ema=0.9)))
    assert (whole[0] / "config.json").read_text() == before


def test_changed_values_are_told_on_resuming(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    train(tmp_path, options(schedule=dict(lr=2e-2)))
    assert "Other values than before: schedule.lr." in capsys.readouterr().out


def test_evaluation_every_so_many_epochs_sees_the_model(tmp_path):
    seen = []

    def evaluate(model, config):
        seen.append(float(np.abs(model.head.kernel[...]).sum()))
        return {"accuracy": {"top1": 0.25}}

    config = options(evaluation=dict(every_epochs=1))
    train(tmp_path, config, evaluate=evaluate)
    assert len(set(seen)) == 3  # after steps 4, 8 and 10
    assert [row["step"] for row in rows(tmp_path) if "eval/accuracy/top1" in row] == [4, 8, 10]


def test_lines_after_the_checkpoint_are_dropped_on_resuming(whole, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "lo')
    train(tmp_path, options())
    assert [row["step"] for row in rows(tmp_path)] == [2, 4, 6, 8, 10, 10]
