"""Checkpoint files (Orbax): reading the newest intact one, and detecting damage.

A checkpoint has the parts "model", "optimizer" and, in precision "float16", "loss_scale", arrays by name, and "about".
"about" holds the step, which is also the number of the next batch, and the shape, type and checksum of each array.
"""

import functools
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from equivit.training.run import disk_errors
from equivit.training.state import State

_log = logging.getLogger("equivit")
_name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")  # of a leaf, by its path


class OtherModelError(ValueError):
    """A checkpoint whose arrays do not match the run that reads it."""


class NoWholeCheckpointError(ValueError):
    """All existing checkpoints are damaged."""


class UnreadableError(OSError):
    """A checkpoint cannot be read now, but may be intact."""


class Found(NamedTuple):
    """A checkpoint that was read; `damaged` holds the newer ones by step, each with the reason."""

    step: int
    state: State
    damaged: dict[int, str]


def directory(workdir: pathlib.Path) -> pathlib.Path:
    """The directory of a run's checkpoints.

    Raises:
      ValueError: the locale does not encode its name in UTF-8.  Python encodes paths as the locale does, TensorStore
        in UTF-8.
    """
    path = pathlib.Path(workdir).absolute() / "checkpoints"
    try:
        same = os.fsencode(path) == str(path).encode()
    except UnicodeEncodeError:
        same = False
    if not same:
        raise ValueError(
            f"--workdir={str(workdir)!a}: checkpoints need UTF-8 names, and this locale uses another encoding; set "
            "PYTHONUTF8=1, or give a directory with an ASCII name."
        )
    return path


@functools.cache
def write_small_arrays_whole() -> None:
    """Let Orbax divide an array among the devices that have copies only into slices of at least 1 MiB.

    Orbax compiles a program for each slice, which takes longer than writing a small array.  Call this before a
    `CheckpointManager` is made.
    """
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
    logger = logging.getLogger("absl")
    disabled, logger.disabled = logger.disabled, True  # Orbax warns of every handler that replaces another
    try:
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    finally:
        logger.disabled = disabled


def content(state: State, *, before_failure: bool) -> ocp.args.Composite:
    """The parts of a state's checkpoint, for `CheckpointManager.save`; it also stores `before_failure`."""
    step, leaves = int(state.step), _leaves(state)
    about = {"step": step, "before_failure": before_failure}
    about |= {"leaves": _about_leaves(leaves), "bits": _bits(leaves)}
    arrays = {name: ocp.args.StandardSave(part) for name, part in parts_of(state).items()}
    return ocp.args.Composite(about=ocp.args.JsonSave(about), **arrays)


def parts_of(state: State) -> dict[str, dict[str, Any]]:
    """The leaves of each part of a checkpoint, by name."""
    found = {"model": {}, "optimizer": {}}
    for name, leaf in _leaves(state).items():
        found.setdefault(_part(name), {})[name] = leaf
    return found


def checksum(tree: Any) -> int:
    """The checksum of all arrays of a tree, for any number of devices and processes."""
    return sum(_bits(_leaves(tree)).values()) % 2**32


def is_before_failure(manager: ocp.CheckpointManager, step: int) -> bool:
    """Whether a checkpoint was saved before a step that failed."""
    return _about(manager, step).get("before_failure", False)


def read_only(place: pathlib.Path, like: State) -> Found | None:
    """Read the model in the newest intact checkpoint, as NumPy arrays; None if there are no checkpoints.

    Nothing is moved; damaged checkpoints cause a warning.  Raises as `newest_whole`.
    """
    if not place.is_dir():
        return None
    empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _leaves(like).items()}
    found = newest_whole(place, like, {"model": empty})
    if found is not None:
        for step, why in found.damaged.items():
            path = place / str(step)
            _log.warning("checkpoint %s is damaged (%s); using the one of step %d.", path, why, found.step)
    return found


def newest_whole(place: pathlib.Path, like: State, parts: Mapping[str, Any]) -> Found | None:
    """Read the newest checkpoint whose checksums match; None if there are no checkpoints.

    All processes of a run must call it: damage that one of them finds counts for all.

    Args:
      place: `directory` of the run.
      like: the state to fill.
      parts: the arrays to read, as from `parts_of`; each process reads NumPy arrays whole.

    Raises:
      OtherModelError: the checkpoint belongs to another model or optimiser.
      NoWholeCheckpointError: all checkpoints are damaged.
      OSError: a checkpoint cannot be read now.
    """
    # Orbax ends each read of several processes with a barrier, which a process that finds damage would never reach.
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
    with ocp.CheckpointManager(place, options=options) as manager:
        return _newest_whole(manager, like, parts)


def _newest_whole(manager, like, parts):
    damaged = {}
    for step in sorted(manager.all_steps(), reverse=True):
        path = pathlib.Path(manager.directory) / str(step)
        try:
            return Found(step, _read_together(manager, step, like, parts), damaged)
        except OtherModelError:
            raise
        except Exception as error:  # readers of damaged files raise many types
            manager.reload()
            if max(manager.all_steps(), default=step) > step and not damaged:
                return _newest_whole(manager, like, parts)  # the run is still training and has replaced it
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


def _read_together(manager, step, like, parts):
    """Read a checkpoint; an error in one process is an error in all."""
    about, leaves, error = {}, {}, None
    try:
        about, leaves = _read(manager, step, parts)
    except Exception as caught:  # readers of damaged files raise many types
        error = caught
    _raise_in_all(error)
    _raise_in_all(_other_bits(leaves, about["bits"]))
    return _fill(like, leaves)


def _raise_in_all(error):
    """Raise the error of this process, if any, or else ValueError if another process has one."""
    failed = error is not None
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.int32(failed)).any()
    if failed:
        raise error or ValueError("another process cannot read it")


def _other_bits(leaves, saved):
    """The error if checksums differ from the saved ones."""
    wrong = [name for name, bits in _bits(leaves).items() if bits != saved[name]]
    if not wrong:
        return None
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return ValueError(f"the bits of {wrong[0]}{others} are not those that were saved")


def _read(manager, step, parts):
    about = _about(manager, step)
    wanted = {name: leaf for part in parts.values() for name, leaf in part.items()}
    stored = {name: leaf for name, leaf in about["leaves"].items() if _part(name) in parts}
    _check_leaves(pathlib.Path(manager.directory) / str(step), stored, wanted)
    args = {name: ocp.args.StandardRestore(part) for name, part in parts.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**args))
    return about, {name: array for part in args for name, array in restored[part].items()}


def _about(manager, step):
    return manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]


def _part(name):
    """The part of a checkpoint that holds a leaf; a model loads without the others."""
    part = name.partition(".")[0]
    return part if part in ("optimizer", "loss_scale") else "model"


def _leaves(tree):
    return {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _fill(tree, leaves):
    """Replace the leaves of a tree that are named in `leaves`."""
    return jax.tree.map_with_path(lambda path, leaf: leaves.get(_name(path), leaf), tree)


def _bits(leaves):
    """The checksum of each array: the sum of its words modulo 2^32, for any number of devices and processes."""
    sums = np.array([_bit_sum(leaf) for leaf in leaves.values()], np.uint32)
    # NumPy arrays are whole in each process.
    if jax.process_count() > 1 and any(isinstance(leaf, jax.Array) for leaf in leaves.values()):
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return dict(zip(leaves, sums.tolist(), strict=True))


def _bit_sum(array):
    """This process's part of the sum.  NumPy: compiling a sum for every leaf would cost seconds at the first save."""
    if isinstance(array, np.ndarray):
        shards = [array]
    else:
        shards = (np.asarray(shard.data) for shard in array.addressable_shards if shard.replica_id == 0)
    return sum(int(a.reshape(-1).view(f"u{a.itemsize}").sum(dtype=np.uint32)) for a in shards) % 2**32


def _about_leaves(leaves):
    return {name: [list(a.shape), a.dtype.name] for name, a in leaves.items()}


def _check_leaves(path, about, like):
    """OtherModelError if the shape or type of a leaf differs between `about` and `like`."""
    wanted = _about_leaves(like)
    lines = [f"{name} is missing" for name in wanted.keys() - about.keys()]
    lines += [f"{name} is not of this model" for name in about.keys() - wanted.keys()]
    both = (name for name in wanted.keys() & about.keys() if list(about[name]) != wanted[name])
    lines = sorted(lines + [f"{name} is {about[name]}, here {wanted[name]}" for name in both])
    if lines:
        raise OtherModelError(
            f"checkpoint {path} is of another model or optimiser, {len(lines)} arrays differ: "
            f"{'; '.join(lines[:6])}{' ...' if len(lines) > 6 else ''}.  Give the config that wrote it, or another "
            "--workdir."
        )
