"""Checkpoints: exact, on any number of devices, and never taken when damaged or of another model."""

import errno
import gc
import json
import logging
import os
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from equivit import files
from equivit.training import checkpoints
from equivit.training import config as configs
from equivit.training.run import checkpoint_files, disk_errors
from tests.training import tiny
from tests.training.state_test import mesh_of

# Orbax drops its unfinished reads when one of them fails; Python reports them when they are collected, perhaps after
# the last test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

OPTIONS = tiny.config(objective=dict(ema=0.9, mixup=0.8))


def saved(workdir, mesh, steps=(2, 4, 6)):
    """A run that saves after each of `steps`; returns its program and the states at the last two."""
    with jax.set_mesh(mesh), checkpoints.Checkpoints(workdir, OPTIONS.checkpoint) as manager:
        program, states = tiny.program(OPTIONS, mesh), [None]
        for step in steps:
            states.append(tiny.run(program, mesh, step, start=states[-1] and jax.device_put(states[-1]))[0])
            manager.save(states[-1])
            states[-1] = jax.device_get(states[-1])
    return program, states[-1], states[-2]


def restored(workdir, program, mesh):
    with jax.set_mesh(mesh), checkpoints.Checkpoints(workdir, OPTIONS.checkpoint) as manager:
        return manager.restore(program.abstract)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, *saved(workdir, mesh_of(1, 1))


def test_two_are_kept_and_the_newest_comes_back_exactly(run):
    workdir, program, state, _ = run
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["4", "6"]
    chex.assert_trees_all_equal(jax.device_get(restored(workdir, program, mesh_of(1, 1))), state)


def test_devices_divide_large_arrays_among_them_and_write_small_ones_whole(tmp_path, caplog):
    """Orbax compiles a program for each slice."""
    caplog.set_level(logging.WARNING)
    checkpoint_files.write_small_arrays_whole.cache_clear()
    checkpoint_files.write_small_arrays_whole()
    assert not caplog.records
    place = NamedSharding(mesh_of(8, 1), PartitionSpec())
    for name, width in (("small", 5), ("large", 2**18)):
        x = jax.device_put(np.arange(8 * width, dtype=np.float32).reshape(8, width), place)
        caplog.clear()
        with jax.log_compiles(), checkpoints.ocp.CheckpointManager(tmp_path / name) as manager:
            manager.save(0, args=checkpoints.ocp.args.StandardSave({"x": x}))
        with checkpoints.ocp.CheckpointManager(tmp_path / name) as manager:
            found = manager.restore(0, args=checkpoints.ocp.args.StandardRestore({"x": x}))["x"]
        np.testing.assert_array_equal(found, x)
        compiled = [record for record in caplog.records if record.getMessage().startswith("Compiling jit(slice)")]
        assert len(compiled) == (0 if name == "small" else 8)


def test_a_checkpoint_that_a_killed_run_had_yet_to_remove_is_removed(run, copy):
    shutil.copytree(copy / "checkpoints" / "4", copy / "checkpoints" / "2")
    restored(copy, run[1], mesh_of(1, 1))
    assert listing(copy) == ["4", "6"]


def test_all_processes_remove_the_same_checkpoints(run, copy, monkeypatch):
    """Each removal has a barrier, so a process takes part though the first one has removed the directory already."""
    removed, mesh = [], mesh_of(1, 1)
    monkeypatch.setattr(checkpoints.ocp.CheckpointManager, "delete", lambda self, step: removed.append(step))
    shutil.copytree(copy / "checkpoints" / "4", copy / "checkpoints" / "2")
    with jax.set_mesh(mesh), checkpoints.Checkpoints(copy, OPTIONS.checkpoint) as manager:
        shutil.rmtree(copy / "checkpoints" / "2")
        manager.restore(run[1].abstract)
    assert removed == [2]


@pytest.mark.parametrize("errors", [(None, True), (ValueError("here"), False), (ValueError("here"), True)])
def test_an_error_in_one_process_is_an_error_in_all(monkeypatch, errors):
    """No process may go on to a checkpoint that another one cannot read."""
    here, there = errors
    gathered = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        checkpoint_files.multihost_utils,
        "process_allgather",
        lambda flag: gathered.append(flag) or np.array([flag, there]),
    )
    with pytest.raises(ValueError, match="here" if here else "another process cannot read it"):
        checkpoint_files._raise_in_all(here)
    assert gathered == [here is not None]


@pytest.mark.parametrize(("data", "fsdp"), [(1, 8), (2, 2)])
def test_restores_on_other_devices(run, data, fsdp):
    workdir, _, state, _ = run
    mesh = mesh_of(data, fsdp)
    with jax.set_mesh(mesh):
        program = tiny.program(OPTIONS, mesh)
    again = restored(workdir, program, mesh)
    chex.assert_trees_all_equal(jax.device_get(again), state)
    kernel = again.trainable["head.kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // fsdp


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bits(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("item", "damage"),
    [
        ("model", cut),
        ("model", flip_bits),
        ("model", pathlib.Path.unlink),
        ("optimizer", flip_bits),
        ("about", cut),
        ("about", pathlib.Path.unlink),
    ],
)
def test_a_damaged_newest_one_falls_back_to_the_one_before(run, tmp_path, caplog, item, damage):
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints")
    files = [path for path in (tmp_path / "checkpoints" / "6" / item).rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    with caplog.at_level(logging.WARNING):
        state = restored(tmp_path, run[1], mesh_of(1, 1))
    gc.collect()
    assert "checkpoints/6 is damaged" in caplog.text
    assert state.step == 4
    chex.assert_trees_all_equal(jax.device_get(state), run[3])
    assert listing(tmp_path) == ["4"] and len(list((tmp_path / "damaged").iterdir())) == 1


def listing(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def damage_largest(workdir, step, item="model", damage=flip_bits):
    found = [path for path in (workdir / "checkpoints" / str(step) / item).rglob("*") if path.is_file()]
    damage(max(found, key=lambda path: path.stat().st_size))


@pytest.fixture
def copy(run, tmp_path, monkeypatch):
    """A copy of the run that other programs can load."""
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints")
    files.write_text(tmp_path / "config.json", configs.to_json(OPTIONS))
    monkeypatch.setattr(checkpoints.build, "make_model", lambda config, rngs: tiny.Tiny(rngs))
    return tmp_path


@pytest.mark.parametrize(("item", "damage", "step"), [
    (None, None, 6), ("model", flip_bits, 4), ("model", cut, 4), ("about", cut, 4), ("optimizer", flip_bits, 6),
])  # fmt: skip
def test_a_model_is_loaded_from_the_newest_whole_one_and_nothing_is_moved(run, copy, caplog, item, damage, step):
    """With the optimiser damaged the model is still whole."""
    if item is not None:
        damage_largest(copy, 6, item, damage)
    loaded = checkpoints.load_run(copy)
    gc.collect()
    assert loaded.step == step
    assert ("checkpoints/6 is damaged" in caplog.text) == (step == 4)
    state = run[2] if step == 6 else run[3]
    np.testing.assert_array_equal(loaded.model.head.kernel[...], state.trainable["head.kernel"])
    assert sorted(path.name for path in copy.iterdir()) == ["checkpoints", "config.json"]
    assert listing(copy) == ["4", "6"]


def test_a_checkpoint_that_a_run_replaces_while_it_is_read_is_no_damage(run, copy, caplog, monkeypatch):
    read = checkpoint_files._read

    def replaced(manager, step, *args):
        if (copy / "checkpoints" / "6").exists():
            for old, new in ((4, 8), (6, 10)):
                (copy / "checkpoints" / str(old)).rename(copy / "checkpoints" / str(new))
        return read(manager, step, *args)

    monkeypatch.setattr(checkpoint_files, "_read", replaced)
    assert checkpoints.load_run(copy).step == 10
    assert "damaged" not in caplog.text


def test_where_all_are_damaged_nothing_begins_again(run, copy):
    for step in (4, 6):
        damage_largest(copy, step)
    for read in (lambda: restored(copy, run[1], mesh_of(1, 1)), lambda: checkpoints.load_run(copy)):
        with pytest.raises(
            checkpoint_files.NoWholeCheckpointError, match=r"all .* damaged \(6: the bits of [\w.]+ are"
        ):
            read()
    assert listing(copy) == ["4", "6"] and not (copy / "damaged").exists()


def test_a_reason_says_more_than_a_key():
    assert disk_errors.reason(KeyError(0)) == "KeyError: 0" and disk_errors.reason(EOFError()) == "EOFError"
    with pytest.raises(ValueError) as error:
        json.loads("garbage")  # begins with a StopIteration that it hides
    assert disk_errors.reason(error.value).startswith("Expecting value")


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    ValueError("UNAVAILABLE: Error reading \"trainable.head.kernel\""),
    caused(Exception("Encountered error while reading array"), ValueError("UNKNOWN: Error [os_error_code='5']")),
], ids=lambda error: f"{type(error).__name__} {error}"[:30])  # fmt: skip
@pytest.mark.parametrize("trains", [True, False])
def test_an_outage_ends_the_program_and_moves_nothing(run, copy, caplog, monkeypatch, error, trains):
    def restore(self, step, args):
        raise error

    monkeypatch.setattr(checkpoints.ocp.CheckpointManager, "restore", restore)
    kept = (OSError, MemoryError, jax.errors.JaxRuntimeError)
    with pytest.raises(type(error) if isinstance(error, kept) else checkpoint_files.UnreadableError) as caught:
        restored(copy, run[1], mesh_of(1, 1)) if trains else checkpoints.load_run(copy)
    if isinstance(error, OSError):
        assert f"checkpoints/6 cannot be read: {error.strerror}; nothing was moved" in str(caught.value)
    assert listing(copy) == ["4", "6"] and not (copy / "damaged").exists() and "damaged" not in caplog.text


def test_a_file_that_cannot_be_opened_is_no_damage(run, copy):
    """As Orbax sees it, what it may not look at is missing.  A link to itself is refused to the superuser, too."""

    def close(path):
        path.unlink()
        path.symlink_to(path)

    damage_largest(copy, 6, "optimizer", close)
    with pytest.raises(OSError, match="checkpoints/6.* cannot be read: Too many levels of symbolic links|Errno 40"):
        restored(copy, run[1], mesh_of(1, 1))
    gc.collect()
    assert listing(copy) == ["4", "6"]


@pytest.mark.parametrize("method", ["save", "wait_until_finished"])
def test_a_full_disk_is_one_line_that_names_what_is_kept(run, copy, monkeypatch, method):
    def full(self, *args, **options):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device [os_error_code='28']")

    mesh = mesh_of(1, 1)
    state = jax.device_put(run[2]._replace(step=jnp.int32(7)))
    monkeypatch.setattr(checkpoints.ocp.CheckpointManager, method, full)
    with (
        pytest.raises(checkpoints.NotSavedError) as caught,
        jax.set_mesh(mesh),
        checkpoints.Checkpoints(copy, OPTIONS.checkpoint) as manager,
    ):
        manager.wait() if method != "save" else manager.save(state)
    monkeypatch.undo()
    assert str(caught.value).startswith(f"a checkpoint could not be saved in {copy}/checkpoints: No space left on")
    assert f"the last whole one, {copy}/checkpoints/6, is kept" in str(caught.value)


def test_a_directory_whose_name_is_not_utf8_is_refused(tmp_path):
    """As under LC_ALL=C, where Python cannot decode it."""
    workdir = tmp_path / os.fsdecode(b"run-\xfc")
    with pytest.raises(ValueError, match=r"--workdir='.*run-\\udcfc': checkpoints need UTF-8 names.*PYTHONUTF8=1"):
        checkpoints.Checkpoints(workdir, OPTIONS.checkpoint)
    checkpoint_files.directory(tmp_path / "run-ü")
    assert not list(tmp_path.iterdir())


def test_of_states_before_a_failure_only_the_last_stays(run, copy):
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh), checkpoints.Checkpoints(copy, OPTIONS.checkpoint) as manager:
        for step in (7, 8):
            manager.save_before_failure(jax.device_put(run[2]._replace(step=jnp.int32(step))))
    assert listing(copy) == ["6", "8"]


def test_another_model_is_one_clear_error(run):
    workdir = run[0]
    mesh = mesh_of(1, 1)
    options = tiny.config(objective=dict(ema=None), optimizer=dict(name="sgd"))
    with jax.set_mesh(mesh):
        program = tiny.program(options, mesh)
    with pytest.raises(
        checkpoint_files.OtherModelError, match=r"of another model or optimiser, \d+ arrays differ: extra.ema"
    ):
        restored(workdir, program, mesh)
    assert (workdir / "checkpoints" / "6").is_dir()


def test_a_narrower_leaf_is_named(run):
    workdir, program = run[:2]
    leaf = jax.ShapeDtypeStruct((3,), np.float32)
    other = program._replace(
        abstract=program.abstract._replace(trainable={**program.abstract.trainable, "head.bias": leaf})
    )
    with pytest.raises(
        checkpoint_files.OtherModelError, match=r"head.bias is \[\[8\], 'float32'\], here \[\[3\], 'float32'\]"
    ):
        restored(workdir, other, mesh_of(1, 1))


def test_nothing_saved_is_none(run, tmp_path):
    assert restored(tmp_path, run[1], mesh_of(1, 1)) is None


def test_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    options = tiny.config(checkpoint=dict(every_steps=10, every_seconds=60)).checkpoint
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    manager = checkpoints.Checkpoints(tmp_path, options)
    assert [manager.due(step) for step in (9, 10, 11)] == [False, True, False]
    now[0] = 61.0
    assert manager.due(11)
    assert not manager.due(11, clock=False)


@pytest.mark.parametrize(("processes", "error", "waits"), [
    (2, jax.errors.JaxRuntimeError("Connection reset by peer"), False),  # what a collective raises without its peer
    (2, ValueError("of this process"), True),
    (1, jax.errors.JaxRuntimeError("out of memory"), True),
])  # fmt: skip
def test_where_a_process_is_gone_nobody_waits_for_it(tmp_path, monkeypatch, processes, error, waits):
    closed = []
    with pytest.raises(type(error)), checkpoints.Checkpoints(tmp_path, OPTIONS.checkpoint) as manager:
        close = manager._manager.close
        monkeypatch.setattr(manager._manager, "close", lambda: closed.append(close()))
        monkeypatch.setattr(jax, "process_count", lambda *_: processes)
        raise error
    monkeypatch.undo()
    close()
    assert bool(closed) == waits


def bit_sum(array):
    """The sum of the bits as one program over the whole array, for types of up to four bytes."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    bits = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(array, unsigned)
    return int(bits.astype(jnp.uint32).sum(dtype=jnp.uint32))


@pytest.mark.parametrize("spec", [(), ("data",), (None, "fsdp"), ("fsdp", "data")], ids=str)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "bfloat16", "float16", "float32", "int32", "uint32"])
def test_sums_of_bits_are_those_of_the_whole_array(dtype, spec):
    """Replicas count once; the sums of 32-bit types wrap around."""
    array = jnp.asarray(jax.random.normal(jax.random.key(0), (8, 12)) * 100, dtype)
    placed = jax.device_put(array, NamedSharding(mesh_of(4, 2), PartitionSpec(*spec)))
    leaves = {"array": placed, "scalar": jnp.asarray(3, dtype), "none": jnp.zeros((0, 2), dtype)}
    assert checkpoint_files._bits(leaves) == {name: bit_sum(leaf) for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_sums_of_bits_of_eight_bytes(dtype):
    """The upper half of each entry is left out."""
    with jax.enable_x64(True):
        array = jnp.asarray(jax.random.normal(jax.random.key(0), (64,)) * 1e6, dtype)
        low = jax.lax.bitcast_convert_type(array, jnp.uint64).astype(jnp.uint32)
        assert checkpoint_files._bits({"array": array}) == {"array": int(low.sum(dtype=jnp.uint32))}
