"""Checkpoints of a run (Orbax), and the models in them."""

import contextlib
import logging
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.layers.rngs import Keys
from equivit.training import build
from equivit.training import config as configs
from equivit.training.run import checkpoint_files, disk_errors
from equivit.training.state import State, begin

_log = logging.getLogger("equivit")


class NotSavedError(OSError):
    """A checkpoint could not be written."""


class Loaded(NamedTuple):
    """The configuration of a run, the model in its checkpoint, and the step of the checkpoint."""

    config: ConfigDict
    model: nnx.Module
    step: int


class Checkpoints:
    """The checkpoints of one run, `<workdir>/checkpoints/<step>/`.

    Args:
      options: the `checkpoint` section: the intervals `every_steps` and `every_seconds`, and the number to `keep`.

    Raises ValueError if Orbax cannot use the directory.  `save`, `wait` and leaving the context raise NotSavedError if
    the last checkpoint could not be written.
    """

    def __init__(self, workdir: pathlib.Path, options: ConfigDict):
        self._directory = checkpoint_files.directory(workdir)
        self._options, self._saved_at = options, time.monotonic()
        checkpoint_files.write_small_arrays_whole()
        self._manager = ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=options.keep)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
            return  # a process is gone, and a pending save would wait for it
        try:
            with self._saving():
                self._manager.close()  # waits for a pending save
        except NotSavedError as not_saved:
            if error is None:
                raise
            if not isinstance(error, NotSavedError):
                _log.warning("%s", not_saved)

    @property
    def steps(self) -> list[int]:
        """The steps of the existing checkpoints, the newest first."""
        found = self._manager.all_steps()  # as Orbax remembers them
        return sorted((step for step in found if (self._directory / str(step)).is_dir()), reverse=True)

    @property
    def latest(self) -> pathlib.Path | None:
        """The newest checkpoint."""
        return self._directory / str(self.steps[0]) if self.steps else None

    def due(self, step: int, *, clock: bool = True) -> bool:
        """Whether to save a checkpoint after `step` steps; `clock` also allows `every_seconds`."""
        steps, seconds = self._options.every_steps, self._options.every_seconds
        if steps and step % steps == 0:
            return True
        if not (clock and seconds):
            return False
        late = time.monotonic() - self._saved_at >= seconds
        if jax.process_count() > 1:  # all processes follow the clock of the first
            late = multihost_utils.broadcast_one_to_all(np.int32(late))
        return bool(late)

    def save(self, state: State, *, before_failure: bool = False) -> None:
        """Save in the background; do nothing if this step is saved already.

        `before_failure` is stored with the state (`save_before_failure`).  A removed directory is not recreated, as it
        would lack the configuration and the metrics of the run.
        """
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        content = checkpoint_files.content(state, before_failure=before_failure)
        with self._saving():
            self._directory.stat()
            self._manager.save(step, args=content, force=True)
        self._saved_at = time.monotonic()

    def save_before_failure(self, state: State) -> None:
        """Save the state before a failed step, replacing the state before an earlier failure.

        So a run that fails repeatedly keeps its checkpoint from before the first failure.
        """
        self.wait()
        latest = self._manager.latest_step()
        if latest not in (None, int(state.step)) and checkpoint_files.is_before_failure(self._manager, latest):
            self._manager.delete(latest)
        self.save(state, before_failure=True)

    def wait(self) -> None:
        """Wait until everything is on disk."""
        with self._saving():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _saving(self):
        """Turn any failure of a save into one error that names the newest checkpoint."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # from a device or another process
        except Exception as error:
            if not self._directory.is_dir():
                raise NotSavedError(
                    f"a checkpoint could not be saved: {self._directory} was removed during the run, and nothing is "
                    "left in it.  Put back a copy, or start again to begin at step 0."
                ) from error
            self._manager.reload()
            left = f"the last whole one, {self.latest}, is kept" if self.steps else "there is none yet"
            raise NotSavedError(
                f"a checkpoint could not be saved in {self._directory}: {disk_errors.reason(error)}; {left}.  Fix "
                "this, then rerun with the same --workdir."
            ) from error

    def restore(self, like: State) -> State | None:
        """Restore the newest intact checkpoint with the shapes and shardings of `like`; None without checkpoints.

        Moves damaged checkpoints aside with a warning, and removes surplus checkpoints that a killed run may leave.  A
        checkpoint that one process of the run finds damaged counts as damaged.

        Raises:
          checkpoint_files.OtherModelError: the checkpoint belongs to another model or optimiser.
          checkpoint_files.NoWholeCheckpointError: all checkpoints are damaged; they stay in place.
          OSError: a checkpoint cannot be read now.
        """
        self.wait()
        found = checkpoint_files.newest_whole(self._directory, like, checkpoint_files.parts_of(like))
        if found is None:
            return None
        # All processes must call `delete`, so they go by their managers' lists, which agree, not by a changing disk.
        intact = sorted((step for step in self._manager.all_steps() if step <= found.step), reverse=True)
        for step in intact[self._options.keep :]:
            self._manager.delete(step)
        for step, why in found.damaged.items():
            self._set_aside(step, why, found.step)
        return found.state

    def _set_aside(self, step, why, taken):
        path, aside = self._directory / str(step), self._directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        _log.warning("checkpoint %s is damaged (%s); moved to %s; using the one of step %d.", path, why, aside, taken)
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        multihost_utils.sync_global_devices("damaged checkpoint moved")
        self._manager.reload()


def load_run(workdir: pathlib.Path, *, weights: str | None = None) -> Loaded:
    """Load config and model of a run directory from its newest intact checkpoint.

    Nothing is written, so the run may still be training, and the directory may be read-only.  Damaged checkpoints
    cause a warning and stay in place.

    Args:
      weights: one of `Objective.weights`, such as "averaged"; None for the first.

    Raises:
      FileNotFoundError: there is no run, or it has no checkpoint yet.
      ValueError: the run has no such weights, or config.json is damaged.
      OSError, checkpoint_files.OtherModelError, checkpoint_files.NoWholeCheckpointError: as `Checkpoints.restore`.
    """
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").is_file():
        raise FileNotFoundError(f"{workdir} holds no config.json; give the --workdir of a run.")
    config = configs.from_json(workdir / "config.json")
    objective = build.make_objective(config)
    if weights is not None:
        errors.one_of("--weights", weights, objective.weights)
    module = jax.eval_shape(lambda: objective.module(build.make_model(config, Keys(0)), jax.random.key(0)))
    like = jax.eval_shape(lambda module: begin(objective, module), module)
    found = checkpoint_files.read_only(checkpoint_files.directory(workdir), like)
    if found is None:
        raise FileNotFoundError(f"{workdir} has no checkpoint yet; train on with the same --workdir.")
    stored = jax.tree.map(jnp.asarray, found.state)
    try:
        model = objective.exported(logical.put(module, stored.arrays), stored.extra, weights)
    except ValueError as error:
        raise ValueError(f"{workdir}: {error}") from None
    return Loaded(config, model, found.step)
