"""Checkpoints: exact, on any number of devices, and never taken when damaged or of another model."""

import gc
import logging
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from equivit.training import checkpoints
from tests.training import tiny
from tests.training.state_test import mesh_of

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


# Orbax drops its unfinished reads when one of them fails; Python reports them when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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


def test_another_model_is_one_clear_error(run):
    workdir = run[0]
    mesh = mesh_of(1, 1)
    options = tiny.config(objective=dict(ema=None), optimizer=dict(name="sgd"))
    with jax.set_mesh(mesh):
        program = tiny.program(options, mesh)
    with pytest.raises(
        checkpoints.OtherModelError, match=r"of another model or optimiser, \d+ arrays differ: extra.ema"
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
        checkpoints.OtherModelError, match=r"head.bias is \[\[8\], 'float32'\], here \[\[3\], 'float32'\]"
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
    assert checkpoints._bits(leaves) == {name: bit_sum(leaf) for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_sums_of_bits_of_eight_bytes(dtype):
    """The upper half of each entry is left out."""
    with jax.enable_x64(True):
        array = jnp.asarray(jax.random.normal(jax.random.key(0), (64,)) * 1e6, dtype)
        low = jax.lax.bitcast_convert_type(array, jnp.uint64).astype(jnp.uint32)
        assert checkpoints._bits({"array": array}) == {"array": int(low.sum(dtype=jnp.uint32))}
