"""Checkpoints of a run (Orbax), and the models in them.

A checkpoint holds the train state and the number of the next batch, which is the data position.  With each array goes
the sum of its bits, so that any damage is noticed.
"""

import contextlib
import functools
import logging
import os
import pathlib
import time
from collections.abc import Mapping
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
from equivit.training import config as configs
from equivit.training import disk_errors, program
from equivit.training.state import State, begin


class OtherModelError(ValueError):
    """A checkpoint holds other arrays than the run that reads it."""


class NoWholeCheckpointError(ValueError):
    """There are checkpoints, and all of them are damaged."""


class UnreadableError(OSError):
    """A checkpoint cannot be read now, and it is not known to be damaged."""


class NotSavedError(OSError):
    """A checkpoint could not be written."""


_log = logging.getLogger("equivit")


class Loaded(NamedTuple):
    """The model of a run.

    Attributes:
      config: of the run.
      model: from the checkpoint.
      step: after how many steps the checkpoint was saved.
    """

    config: ConfigDict
    model: nnx.Module
    step: int


class Checkpoints:
    """The checkpoints of one run, `<workdir>/checkpoints/<step>/`.

    Args:
      workdir: the run directory.
      options: the `checkpoint` section: `keep` of them stay, saved every `every_steps` or `every_seconds`.

    Raises ValueError if the directory cannot be given to Orbax.  `save`, `wait` and leaving the context raise
    NotSavedError if the last checkpoint could not be written.
    """

    def __init__(self, workdir: pathlib.Path, options: ConfigDict):
        self._directory = _directory(workdir)
        self._options, self._saved_at = options, time.monotonic()
        self._manager = ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=options.keep)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
            return  # a process is gone, and a save that is under way would wait for it
        try:
            with self._saving():
                self._manager.close()  # waits for a save that is under way
        except NotSavedError as not_saved:
            if error is None:
                raise
            if not isinstance(error, NotSavedError):
                _log.warning("%s", not_saved)

    @property
    def steps(self) -> list[int]:
        """After how many steps the checkpoints were saved that are there, the newest first."""
        found = self._manager.all_steps()  # as Orbax remembers them
        return sorted((step for step in found if (self._directory / str(step)).is_dir()), reverse=True)

    @property
    def latest(self) -> pathlib.Path | None:
        """The newest checkpoint."""
        return self._directory / str(self.steps[0]) if self.steps else None

    def due(self, step: int, *, clock: bool = True) -> bool:
        """Whether a checkpoint should be saved after `step` steps; `clock` says whether the time counts now."""
        steps, seconds = self._options.every_steps, self._options.every_seconds
        late = bool(clock and seconds and time.monotonic() - self._saved_at >= seconds)
        return bool(steps and step % steps == 0) or _agreed(late, asked=bool(clock and seconds))

    def save(self, state: State, *, before_failure: bool = False) -> None:
        """Save in the background; does nothing where this step is saved already.

        `before_failure` is written beside the state (`save_before_failure`).  A directory that somebody has removed is
        not made again: the rest of the run would lie there without its configuration and its metrics.
        """
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        leaves = _leaves(state)
        about = {"step": step, "next_batch": step, "before_failure": before_failure}
        about |= {"leaves": _about_leaves(leaves), "bits": _bits(leaves)}
        items = {item: ocp.args.StandardSave(part) for item, part in _items(state).items()}
        with self._saving():
            self._directory.stat()
            self._manager.save(step, args=ocp.args.Composite(about=ocp.args.JsonSave(about), **items), force=True)
        self._saved_at = time.monotonic()

    def save_before_failure(self, state: State) -> None:
        """Save the state before a step that cannot be done, in place of an earlier one of the kind.

        So a run that is tried several times keeps its checkpoint from before the trouble.
        """
        self.wait()
        latest = self._manager.latest_step()
        if latest not in (None, int(state.step)) and _about(self._manager, latest).get("before_failure"):
            self._manager.delete(latest)
        self.save(state, before_failure=True)

    def wait(self) -> None:
        """Return when everything is on disk."""
        with self._saving():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _saving(self):
        """Turn any failure of a save into one error that names what is left."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # of a device, or of another process
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
        """The newest whole checkpoint as a state with the shapes and shardings of `like`; None where there is none.

        Damaged checkpoints are set aside with a warning, and the one before is taken.  Removes checkpoints beyond the
        number to keep, such as a run leaves that was killed before it could.

        Raises:
          OtherModelError: the checkpoint is of another model or optimiser.
          NoWholeCheckpointError: there are checkpoints, and all are damaged; they stay where they are.
          OSError: a checkpoint cannot be read now.
        """
        found = _newest_whole(self._manager, like, _items(like))
        if found is None:
            return None
        for step, why in found.damaged.items():
            self._set_aside(step, why, found.step)
        for step in self.steps[self._options.keep :]:
            self._manager.delete(step)
        return found.state

    def _set_aside(self, step, why, taken):
        path, aside = self._directory / str(step), self._directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        _log.warning("checkpoint %s is damaged (%s); moved to %s, that of step %d is taken.", path, why, aside, taken)
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        multihost_utils.sync_global_devices("damaged checkpoint moved")
        self._manager.reload()


def load_run(workdir: pathlib.Path, *, weights: str | None = None) -> Loaded:
    """Config and model of a run directory, from its newest whole checkpoint.

    Nothing is written, so that a run may go on meanwhile and the directory need not be one's own: of damaged
    checkpoints there is a warning, and they stay where they are.

    Args:
      workdir: the directory.
      weights: which of those that it keeps (`Objective.weights`), such as "averaged"; None: what it exports.

    Raises:
      FileNotFoundError: there is no run, or it has no checkpoint yet.
      ValueError: the run keeps no such weights, or config.json is damaged.
      OtherModelError, NoWholeCheckpointError, OSError: as `Checkpoints.restore`.
    """
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").is_file():
        raise FileNotFoundError(f"{workdir} holds no config.json; give the --workdir of a run.")
    config = configs.from_json(workdir / "config.json")
    objective = program.make_objective(config)
    if weights is not None:
        errors.one_of("--weights", weights, objective.weights)
    module = jax.eval_shape(lambda: objective.module(program.make_model(config, Keys(0)), jax.random.key(0)))
    like = jax.eval_shape(lambda module: begin(objective, module), module)
    found = _read_only(_directory(workdir), like)
    if found is None:
        raise FileNotFoundError(f"{workdir} has no checkpoint yet; train on with the same --workdir.")
    stored = jax.tree.map(jnp.asarray, found.state)
    try:
        model = objective.exported(logical.put(module, stored.arrays), stored.extra, weights)
    except ValueError as error:
        raise ValueError(f"{workdir}: {error}") from None
    return Loaded(config, model, found.step)


def _directory(workdir):
    """Where the checkpoints of a run are.

    Python gives a path to the system in the encoding of the locale, TensorStore in UTF-8: to both it must be the same.
    """
    path = pathlib.Path(workdir).absolute() / "checkpoints"
    try:
        same = os.fsencode(path) == str(path).encode()
    except UnicodeEncodeError:
        same = False
    if not same:
        raise ValueError(
            f"--workdir={str(workdir)!a}: this locale does not use UTF-8, in which checkpoints are named; set "
            "PYTHONUTF8=1, or give a directory with a name in ASCII."
        )
    return path


class _Found(NamedTuple):
    """A checkpoint that was read; `damaged` are the newer ones, and why each of them is taken for damaged."""

    step: int
    state: State
    damaged: dict[int, str]


def _read_only(directory, like):
    """As `_newest_whole`, of numpy arrays; None also where the directory is missing."""
    if not directory.is_dir():
        return None
    empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _leaves(like).items()}
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(directory, options=options) as manager:
        found = _newest_whole(manager, like, {"model": empty})
    if found is not None:
        for step, why in found.damaged.items():
            path = directory / str(step)
            _log.warning("checkpoint %s is damaged (%s); that of step %d is taken.", path, why, found.step)
    return found


def _newest_whole(manager, like, items) -> _Found | None:
    """The newest checkpoint whose bits are those that were saved; None where there are no checkpoints.

    Args:
      manager: of Orbax.
      like: the state that is filled.
      items: what is read, as `_items` gives it; numpy arrays are read whole by each process.
    """
    damaged = {}
    for step in sorted(manager.all_steps(), reverse=True):
        path = pathlib.Path(manager.directory) / str(step)
        try:
            return _Found(step, _read(manager, step, like, items), damaged)
        except OtherModelError:
            raise
        except Exception as error:  # whatever a damaged file makes its reader raise
            manager.reload()
            if max(manager.all_steps(), default=step) > step and not damaged:
                return _newest_whole(manager, like, items)  # the run is still training, and has replaced it meanwhile
            if disk_errors.is_outage(error, path):
                if isinstance(error, MemoryError | jax.errors.JaxRuntimeError) or getattr(error, "filename", None):
                    raise
                raise UnreadableError(
                    f"checkpoint {path} cannot be read: {disk_errors.reason(error)}; nothing was moved.  Fix this, "
                    "then rerun with the same --workdir."
                ) from error
            damaged[step] = disk_errors.reason(error)
    if damaged:
        steps = "; ".join(f"{step}: {why}" for step, why in damaged.items())
        raise NoWholeCheckpointError(
            f"all checkpoints in {manager.directory} are damaged ({steps}).  Put back a copy, or give another "
            "--workdir to begin again."
        )
    return None


def _read(manager, step, like, items):
    about = _about(manager, step)
    is_wanted = {name: _item(name) in items for name in about["leaves"]}
    wanted = {name: leaf for part in items.values() for name, leaf in part.items()}
    stored = {name: leaf for name, leaf in about["leaves"].items() if is_wanted[name]}
    _check_leaves(pathlib.Path(manager.directory) / str(step), stored, wanted)
    args = {item: ocp.args.StandardRestore(part) for item, part in items.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**args))
    leaves = {name: array for item in args for name, array in restored[item].items()}
    wrong = [name for name, bits in _bits(leaves).items() if bits != about["bits"][name]]
    if wrong:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"the bits of {wrong[0]}{others} are not those that were saved")
    return _fill(like, leaves)


def _about(manager, step):
    return manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]


def _items(state):
    """The leaves of each part of a checkpoint, by name."""
    items = {"model": {}, "optimizer": {}}
    for name, leaf in _leaves(state).items():
        items[_item(name)][name] = leaf
    return items


def _item(name):
    """The part of a checkpoint that a leaf is in.  The optimiser is apart, so that a model loads without it."""
    return "optimizer" if name.startswith("optimizer.") else "model"


def _leaves(tree):
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _fill(tree, leaves):
    """The tree with the leaves that have a name in `leaves` replaced."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(name(path), leaf), tree)


def _bits(leaves):
    """The sum of each array's bits modulo 2^32, the same for any number of devices and processes.

    Numpy arrays are whole in each process, and nothing is asked of the others.
    """
    sums = np.array([_bit_sum(leaf) for leaf in leaves.values()], np.uint32)
    if jax.process_count() > 1 and any(isinstance(leaf, jax.Array) for leaf in leaves.values()):
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return dict(zip(leaves, sums.tolist(), strict=True))


def _bit_sum(array):
    """This process's part of the sum.  NumPy adds: a compiled sum over every leaf costs seconds at the first save."""
    if isinstance(array, np.ndarray):
        shards = [array]
    else:
        shards = (np.asarray(shard.data) for shard in array.addressable_shards if shard.replica_id == 0)
    return sum(int(a.reshape(-1).view(f"u{a.itemsize}").sum(dtype=np.uint32)) for a in shards) % 2**32


def _about_leaves(leaves):
    return {name: [list(a.shape), a.dtype.name] for name, a in leaves.items()}


def _check_leaves(path, about, like):
    if lines := _differences(about, like):
        raise OtherModelError(
            f"checkpoint {path} is of another model or optimiser, {len(lines)} arrays differ: {some(lines)}.  Give "
            "the config that wrote it, or another --workdir."
        )


def differences(arrays: Mapping[str, jax.Array], like: Mapping[str, jax.Array]) -> list[str]:
    """A line for each array whose shape or type is not that in `like`."""
    return _differences(_about_leaves(arrays), like)


def some(lines: list[str]) -> str:
    """The first of them, on one line."""
    return "; ".join(lines[:6]) + (" ..." if len(lines) > 6 else "")


def _differences(about, like):
    """A line for each leaf whose shape or type in `about` is not that of `like`."""
    wanted = _about_leaves(like)
    lines = [f"{name} is missing" for name in wanted.keys() - about.keys()]
    lines += [f"{name} is not of this model" for name in about.keys() - wanted.keys()]
    both = (name for name in wanted.keys() & about.keys() if list(about[name]) != wanted[name])
    return sorted(lines + [f"{name} is {about[name]}, here {wanted[name]}" for name in both])


def _agreed(late: bool, *, asked: bool) -> bool:
    """Clocks differ between processes: all do what the first one says."""
    if not asked or jax.process_count() == 1:
        return late
    return bool(multihost_utils.broadcast_one_to_all(np.int32(late)))
