"""The training loop, one for all objectives."""

import contextlib
import dataclasses
import errno
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from flax import nnx
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from equivit import files, logical
from equivit.data.loader import TrainPipeline
from equivit.evaluation import runner
from equivit.intervals import LARGEST_INT
from equivit.models import saved
from equivit.trained_on import UNKNOWN, TrainedOn
from equivit.training import build, freezing, optimizers, sharding
from equivit.training.build import Program
from equivit.training.checkpoints import Checkpoints, NotSavedError
from equivit.training.logging import Log, Meter, Profile
from equivit.training.run import resuming, stopping
from equivit.training.state import State

Evaluate = Callable[[nnx.Module, ConfigDict], dict[str, dict]]


class Outcome(NamedTuple):
    """The result of a finished run."""

    report: dict[str, float]  # the final figures, as in report.json
    model: nnx.Module
    results: dict[str, dict]  # of `evaluate` for the model


class NotFiniteError(ArithmeticError):
    """The loss or a gradient became NaN or infinite."""


def total_steps(config: ConfigDict, steps_per_epoch: int) -> int:
    """Steps of the whole run.  ValueError if they exceed int32 or `schedule.length`."""
    steps = config.steps if config.steps is not None else max(1, round(config.epochs * steps_per_epoch))
    if steps > LARGEST_INT:
        most = LARGEST_INT // steps_per_epoch
        raise ValueError(f"config.epochs={config.epochs}: steps are counted in int32; at most {most} epochs fit.")
    if (length := config.schedule.length) is not None and length < steps:
        raise ValueError(
            f"config.schedule.length={length} must not be below the steps of the run, {steps}; set it to None, for "
            "schedules that end with the run."
        )
    return steps


def train(
    config: ConfigDict,
    *,
    workdir: pathlib.Path,
    pipeline: TrainPipeline,
    evaluate: Evaluate,
    initial: Callable[[], dict[str, jax.Array]] = dict,
    trained_on: TrainedOn = UNKNOWN,
    make_program: Callable[..., Program] = build.make_program,
) -> Outcome:
    """Train in `workdir`, or resume the run there.

    On SIGTERM or Ctrl-C, saves the state and stops (`run/stopping.py`).  A run of one process also saves it if the data
    or an evaluation raise an error.

    Args:
      config: a checked config, completed from the data.
      evaluate: the results of a model by protocol (`runner.evaluate`).
      initial: initial parameters of a fresh run; all others are random.
      trained_on: the training data, for run.json and saved models.
      make_program: called as `build.make_program(config, mesh, total=, per_epoch=)`.

    Raises:
      NotFiniteError: the loss or a gradient is not finite; the state of the last good step is saved.
      ValueError: the run in `workdir` has another model, other class names, more steps, or only damaged checkpoints.
      OSError: a checkpoint cannot be read or saved.
      stopping.Stopped: a signal ended the run early.
    """
    mesh = sharding.create_mesh(config.mesh)
    sharding.check_batch(config.batch_size, config.optimizer.accumulation, mesh)
    total, per_epoch = total_steps(config, pipeline.steps_per_epoch), pipeline.steps_per_epoch
    with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        agreed = multihost_utils.reached_preemption_sync_point if jax.process_count() > 1 else None
        signals = stack.enter_context(stopping.Signals(agreed))
        run = make_program(config, mesh, total=total, per_epoch=per_epoch)
        checkpoints = stack.enter_context(Checkpoints(workdir, config.checkpoint))
        stack.enter_context(_full_disk_errors(checkpoints))
        state, remarks = _first_state(config, workdir, mesh, run, checkpoints, initial, trained_on, total)
        start = int(state.step)

        log = stack.enter_context(Log(workdir, config.log, total=total, start=start))
        profile = stack.enter_context(Profile(workdir, config.log.profile))
        rows = stack.enter_context(contextlib.closing(pipeline.batches(start)))
        batches = (sharding.to_global(mesh, batch) for batch in rows)
        log.say(f"{'Resuming' if start else 'Starting'} at step {start} of {total} on {mesh.size} device(s).")
        for line in (freezing.summary(run.objective, run.module), *remarks, *profile.remarks(start)):
            log.say(line)
        steps = _Steps(
            config, workdir, run, state, evaluate, trained_on, checkpoints, signals, log, profile, total, per_epoch
        )
        with steps.saved():
            steps.take(batches)
            model = run.exported(steps.state)
            with signals.at_once():
                results = evaluate(model, config)
        figures = _figures(results)
        log.conclude(figures)
    report = {"step": total, **figures}
    write_report(workdir, report)
    return Outcome(report, model, results)


def _first_state(config, workdir, mesh, run, checkpoints, initial, trained_on, total) -> tuple[State, list[str]]:
    """The state of the newest intact checkpoint or a fresh one, and remarks on what changed since the last start."""
    previous = resuming.config_before(workdir)
    if checkpoints.steps:
        resuming.check(workdir, config, previous)
        resuming.check_classes(workdir, config, trained_on)
    state = checkpoints.restore(run.abstract)
    if state is None:
        state = run.init(initial())
    start = int(state.step)
    resuming.check_length(config, start, total)
    conditions = resuming.conditions(mesh, trained_on, run.teachers)
    remarks = resuming.remarks(workdir, config, previous, conditions, start=start)
    # Only after the checkpoint is known to fit this model.
    resuming.record(workdir, config, previous, conditions, ended=start == total)
    return state, remarks


class _Due(NamedTuple):
    """The periodic work, but for checkpoints, that is due after a step."""

    logs: bool
    evaluates: bool
    teacher: bool


@dataclasses.dataclass
class _Steps:
    """The steps of a run, and the periodic work after them; `state` is the newest."""

    config: ConfigDict
    workdir: pathlib.Path
    run: Program
    state: State
    evaluate: Evaluate
    trained_on: TrainedOn
    checkpoints: Checkpoints
    signals: stopping.Signals
    log: Log
    profile: Profile
    total: int
    per_epoch: int

    def __post_init__(self):
        self._meter = Meter(self.config.batch_size)

    def take(self, batches: Iterator[dict[str, jax.Array]]) -> None:
        """Take the remaining steps, and save the last state."""
        start, static = int(self.state.step), None
        if 0 < start < self.total and self._due(start).evaluates and not self.log.has_evaluation(start):
            self._evaluate()  # the run ended before it
        for step in range(start, self.total):
            self.profile.before(step)
            before, static = static, self.run.static(step / self.run.total)
            if static not in (None, before):
                self.log.say(f"{static} from step {step}.")
            with self._meter.waiting():
                batch = next(batches)
            self.state, metrics = self.run.step(self.state, batch, static)
            good, done = self._meter.add(metrics), step + 1
            self.log.advance(done)
            if place := self.profile.after(step, self.state):
                self.log.say(f"Trace of the steps to {done}: {place}; open it with xprof or TensorBoard.")
            self._after(done, good)
        self.checkpoints.wait()

    def _after(self, done: int, good: bool) -> None:
        """Log, save and evaluate if due, or stop after a signal; `good`: no step is known to be bad."""
        due, last, stops = self._due(done), done == self.total, self.signals.asked()
        clock = jax.process_count() == 1 or due.logs  # to agree on the time, several processes wait for the step
        saves = last or stops or self.checkpoints.due(done, clock=clock)
        if saves or any(due):
            good &= self._meter.flush()
        if not good:  # nothing is saved before all steps so far are known to be good
            raise _not_finite(self.state, self.run, self.checkpoints, self.config.optimizer.clip)
        if due.logs or last:
            _log_means(self.log, done, self.run, self.state, self._meter)
        if due.teacher:
            _save_model(self.workdir / "teachers" / str(done), self.run.exported(self.state), self.trained_on)
        if saves:  # before the evaluation, which may fail; a resumed run makes it
            self.checkpoints.save(self.state)
        if stops:
            raise self.signals.stopped()
        if due.evaluates and not last:
            self._evaluate()

    def _evaluate(self) -> None:
        with self._meter.paused(), self.signals.at_once():
            results = self.evaluate(self.run.exported(self.state), self.config)
            self.log.write(int(self.state.step), _figures(results))

    def _due(self, done: int) -> _Due:
        epochs = self.config.evaluation.every_epochs
        evaluate_every = self.config.evaluation.every_steps or epochs and max(1, round(epochs * self.per_epoch))
        intervals = self.config.log.every_steps, evaluate_every, self.config.checkpoint.teacher_every_steps
        return _Due(*(bool(every) and done % every == 0 for every in intervals))

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Save the state if a signal or an error, such as of the data or an evaluation, ends the run."""
        try:
            yield
        except stopping.Stopped as stopped:
            self._save(stopped.name)
            raise
        except (NotFiniteError, NotSavedError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            # Other processes may not have this error, and would not take part.
            if jax.process_count() == 1 and int(self.state.step) and self._meter.flush():
                with contextlib.suppress(NotSavedError):  # `error` came first
                    self._save(type(error).__name__)
            raise

    def _save(self, why: str) -> None:
        self.checkpoints.save(self.state)
        self.checkpoints.wait()
        self.log.say(f"{why}: saved {self.checkpoints.latest}; start again with the same --workdir to go on.")


def _log_means(log, done, run, state, meter):
    means = meter.summary()
    log.write(done, {**run.rates(max(optimizers.updates(state.optimizer) - 1, 0)), **means})
    for remark in run.objective.remarks(means):
        log.say(f"Warning at step {done}: {remark}")


def _save_model(place, model, trained_on):
    """Save a model whose arrays may be sharded over all devices."""
    arrays = multihost_utils.process_allgather(logical.take(model, nnx.Variable), tiled=True)
    if jax.process_index() == 0:
        saved.save(place, logical.put(model, arrays), trained_on)


def write_report(workdir: pathlib.Path, report: dict) -> None:
    """Write report.json, in the first process."""
    if jax.process_index() == 0:
        files.write_text(workdir / resuming.REPORT, json.dumps(report, indent=2) + "\n")


def _figures(results):
    return {f"eval/{name}": value for name, value in runner.scalars(results).items()}


def _not_finite(state, run, checkpoints, clip):
    """Save the state, which the bad step left unchanged, unless it is the first one; return the error."""
    step, rate = int(state.step), float(run.lr(optimizers.updates(state.optimizer)))
    where = f"the loss or a gradient was not finite at step {step} (learning rate {rate:.3g})"
    fix = f"lower schedule.lr, or clip gradients with optimizer.clip (now {clip})"
    if state.loss_scale is not None:
        fix += ", or set precision='mixed', as float16 ends at 65504"
    if not step:
        return NotFiniteError(f"{where}; nothing was saved.  To begin again, {fix}, with the same --workdir.")
    checkpoints.save_before_failure(state._replace(good=state.good | True))
    checkpoints.wait()
    if earlier := [saved for saved in checkpoints.steps if saved < step]:
        other = f"delete it if the loss had risen before, to continue from the one of step {earlier[0]}"
    else:
        other = "if the loss had risen before, begin again in another --workdir"
    return NotFiniteError(
        f"{where}; last good checkpoint: {checkpoints.latest}.  To go on from it, {fix}, with the same --workdir; "
        f"{other}."
    )


@contextlib.contextmanager
def _full_disk_errors(checkpoints):
    """Name the newest checkpoint in errors of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        rest = f"the last whole checkpoint, {checkpoints.latest}, is kept" if checkpoints.steps else "nothing is saved"
        raise OSError(f"{error}; {rest}.  Make room and start again with the same --workdir.") from error
