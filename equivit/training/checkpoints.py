"""Checkpoints of a run (Orbax), and the models in them.

A checkpoint holds the train state and the number of the next batch, which is the data position.  With each array goes
the sum of its bits, so that any damage is noticed.
"""

import functools
import logging
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from equivit import logical
from equivit.training import config as configs
from equivit.training import program
from equivit.training.state import State, begin


class OtherModelError(ValueError):
    """A checkpoint holds other arrays than the run that reads it."""


_log = logging.getLogger("equivit")


class Checkpoints:
    """The checkpoints of one run, `<workdir>/checkpoints/<step>/`.

    Args:
      workdir: the run directory.
      options: the `checkpoint` section: `keep` of them stay, saved every `every_steps` or `every_seconds`.
    """

    def __init__(self, workdir: pathlib.Path, options: ConfigDict):
        self._directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._options, self._saved_at = options, time.monotonic()
        self._manager = ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(max_to_keep=options.keep)
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
            return  # a process is gone, and a save that is under way would wait for it
        self._manager.close()  # waits for a save that is under way

    @property
    def latest(self) -> pathlib.Path | None:
        """The newest checkpoint."""
        step = self._manager.latest_step()
        return None if step is None else self._directory / str(step)

    def due(self, step: int, *, clock: bool = True) -> bool:
        """Whether a checkpoint should be saved after `step` steps; `clock` says whether the time counts now."""
        steps, seconds = self._options.every_steps, self._options.every_seconds
        late = bool(clock and seconds and time.monotonic() - self._saved_at >= seconds)
        return bool(steps and step % steps == 0) or _agreed(late, asked=bool(clock and seconds))

    def save(self, state: State) -> None:
        """Save in the background; does nothing where this step is saved already."""
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        leaves = _leaves(state)
        about = {"step": step, "next_batch": step, "leaves": _about_leaves(leaves), "bits": _bits(leaves)}
        items = {item: ocp.args.StandardSave(part) for item, part in _items(state).items()}
        self._manager.save(step, args=ocp.args.Composite(about=ocp.args.JsonSave(about), **items), force=True)
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._manager.wait_until_finished()

    def restore(self, like: State) -> State | None:
        """The newest whole checkpoint as a state with the shapes and shardings of `like`; None where there is none.

        A damaged checkpoint is set aside with a warning, and the one before is taken.  Raises ValueError for a
        checkpoint of another model or optimiser.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
                _check_leaves(self._directory / str(step), about["leaves"], _leaves(like))
                return self._restore(step, like, about)
            except OtherModelError:
                raise
            except Exception as error:  # whatever a damaged file makes its reader raise
                self._set_aside(step, error)
        return None

    def restore_model(self, like: State) -> State:
        """The newest checkpoint as numpy arrays, for a state without optimiser that gives the shapes."""
        step = self._manager.latest_step()
        empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _leaves(like).items()}
        args = ocp.args.Composite(model=ocp.args.StandardRestore(empty))
        return _fill(like, self._manager.restore(step, args=args)["model"])

    def _restore(self, step, like, about):
        args = {item: ocp.args.StandardRestore(leaves) for item, leaves in _items(like).items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        leaves = {name: array for item in args for name, array in restored[item].items()}
        wrong = [name for name, bits in _bits(leaves).items() if bits != about["bits"][name]]
        if wrong:
            raise ValueError(f"the bits of {wrong[0]} (and {len(wrong) - 1} more arrays) are not those that were saved")
        return _fill(like, leaves)

    def _set_aside(self, step, error):
        path, aside = self._directory / str(step), self._directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        first_line = str(error).strip().split("\n")[0][:200]
        _log.warning("checkpoint %s is damaged (%s); moved to %s, taking the one before.", path, first_line, aside)
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        multihost_utils.sync_global_devices("damaged checkpoint moved")
        self._manager.reload()


def load_run(workdir: pathlib.Path, *, averaged: bool = False) -> tuple[ConfigDict, nnx.Module]:
    """Config and model of a run directory, from its newest checkpoint.

    Args:
      workdir: the directory.
      averaged: take the averaged weights (`objective.ema`) instead of the trained ones.

    Raises:
      FileNotFoundError: there is no run, or it has no checkpoint yet.
      ValueError: averaged weights are asked for and the run keeps none.
    """
    workdir = pathlib.Path(workdir)
    if not (workdir / "config.json").is_file():
        raise FileNotFoundError(f"{workdir} holds no config.json; give the --workdir of a run.")
    config = configs.from_json(workdir / "config.json")
    if averaged and config.objective.get("ema") is None:
        raise ValueError(f"{workdir} keeps no averaged weights: its config.objective.ema is None.")
    objective = program.make_objective(config)
    module = jax.eval_shape(lambda: objective.module(program.make_model(config, nnx.Rngs(0)), jax.random.key(0)))
    like = jax.eval_shape(lambda module: begin(objective, module), module)
    with Checkpoints(workdir, config.checkpoint) as checkpoints:
        if checkpoints.latest is None:
            raise FileNotFoundError(f"{workdir} has no checkpoint yet; train on with the same --workdir.")
        stored = jax.tree.map(jnp.asarray, checkpoints.restore_model(like))
    arrays = {**stored.arrays, **(stored.extra["ema"] if averaged else {})}
    return config, objective.exported(logical.put(module, arrays), stored.extra)


def _items(state):
    """The leaves of each part of a checkpoint, by name.  The optimiser is apart, so that a model loads without it."""
    leaves = _leaves(state)
    optimizer = {name: leaf for name, leaf in leaves.items() if name.startswith("optimizer.")}
    return {"model": {name: leaf for name, leaf in leaves.items() if name not in optimizer}, "optimizer": optimizer}


def _leaves(tree):
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _fill(tree, leaves):
    """The tree with the leaves that have a name in `leaves` replaced."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(name(path), leaf), tree)


def _bits(leaves):
    """The sum of each array's bits modulo 2^32, the same for any number of devices and processes."""
    sums = np.array([_bit_sum(leaf) for leaf in leaves.values()], np.uint32)
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return dict(zip(leaves, sums.tolist(), strict=True))


def _bit_sum(array):
    """This process's part of the sum.  NumPy adds: a compiled sum over every leaf costs seconds at the first save."""
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
