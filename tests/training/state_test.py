"""The step: micro-batches, devices, shardings, and what happens to a loss that is not finite."""

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from equivit.training import sharding
from tests.training import tiny


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def trained(options, mesh, steps=5):
    with jax.set_mesh(mesh):
        return tiny.run(tiny.program(options, mesh), mesh, steps)


MIXED = dict(objective=dict(mixup=0.8, cutmix=1.0, ema=0.9))
# Sums over the batch are taken in another order; LAMB's first steps divide by the root of small moments.
CLOSE = dict(rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def reference():
    return trained(tiny.config(**MIXED), mesh_of(1, 1))


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (1, 8), (2, 4)])
def test_any_mesh_equals_one_device(reference, data, fsdp):
    state, metrics = trained(tiny.config(**MIXED), mesh_of(data, fsdp))
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(reference[0]), **CLOSE)
    chex.assert_trees_all_close(jax.device_get(metrics), jax.device_get(reference[1]), **CLOSE)


@pytest.mark.parametrize("devices", [1, 4])
def test_micro_batches_equal_one_batch(reference, devices):
    options = tiny.config(optimizer=dict(accumulation=4), **MIXED)
    state, metrics = trained(options, mesh_of(devices, 1))
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(reference[0]), **CLOSE)
    chex.assert_trees_all_close(jax.device_get(metrics), jax.device_get(reference[1]), **CLOSE)


def test_the_step_is_compiled_once():
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(tiny.config(), mesh)
        tiny.run(program, mesh, 3)
    assert program.step._cache_size() == 1


def test_parameters_given_at_the_start_replace_the_drawn_ones():
    program = tiny.program(tiny.config(**MIXED), mesh_of(1, 1))
    state = program.init({"head.bias": np.arange(8.0, dtype=np.float32)})
    for tree in (state.trainable, state.extra["ema"]):
        np.testing.assert_array_equal(tree["head.bias"], np.arange(8))
    chex.assert_trees_all_equal(state.trainable["head.kernel"], program.init({}).trainable["head.kernel"])


def test_the_state_changes(reference):
    start = tiny.program(tiny.config(**MIXED), mesh_of(1, 1)).init({})
    for name, before in start.trainable.items():
        assert np.abs(before - reference[0].trainable[name]).max() > 1e-3, name


def test_fsdp_divides_parameters_and_optimizer():
    mesh = mesh_of(1, 8)
    state, _ = trained(tiny.config(**MIXED), mesh, steps=1)
    for tree in (state.trainable, state.optimizer, state.extra["ema"]):
        leaves = jax.tree.leaves(tree)
        everything = sum(leaf.nbytes for leaf in leaves)
        for device in mesh.devices.flat:
            held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)
            assert held <= everything / 7
    stack = state.trainable["blocks.runs.0.linear.kernel"]
    assert stack.shape[0] == stack.addressable_shards[0].data.shape[0] == 2  # blocks are never divided


def test_a_bad_step_and_those_after_it_change_nothing():
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(tiny.config(**MIXED), mesh)
        state, _ = tiny.run(program, mesh, 2)
        before = jax.device_get(state)
        poisoned = state._replace(trainable=jax.tree.map(lambda a: a * np.nan, state.trainable))
        after, metrics = program.step(poisoned, sharding.to_global(mesh, tiny.batch(2)), None)
        assert not metrics["good"] and not after.good and after.step == 2
        chex.assert_trees_all_equal(jax.device_get(after.optimizer), before.optimizer)
        healed = after._replace(trainable=jax.device_put(before.trainable))
        last, metrics = program.step(healed, sharding.to_global(mesh, tiny.batch(3)), None)
    assert not metrics["good"] and last.step == 2
    chex.assert_trees_all_equal(jax.device_get(last.trainable), before.trainable)


def test_an_average_starts_at_the_weights_and_follows_them():
    options, mesh = tiny.config(objective=dict(ema=0.5)), mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(options, mesh)
        first = jax.device_get(program.init({}))
        one, _ = tiny.run(program, mesh, 1)
    chex.assert_trees_all_equal(first.extra["ema"], first.trainable)
    expected = jax.tree.map(lambda a, b: (a + b) / 2, first.trainable, one.trainable)
    chex.assert_trees_all_close(one.extra["ema"], expected, rtol=1e-6)


class Counting(nnx.Module):
    """Counts its training batches, as running statistics do."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(tiny.SIDE**2, tiny.CLASSES, rngs=rngs)
        self.seen = nnx.BatchStat(jax.numpy.zeros(()))

    def __call__(self, images, *, key=None, train=False):
        if train:
            self.seen[...] += 1
        return self.linear(images.reshape(images.shape[0], -1))


def test_running_statistics_see_every_micro_batch():
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(tiny.config(optimizer=dict(accumulation=4)), mesh, make_model=Counting)
        state, _ = tiny.run(program, mesh, 3)
    assert state.extra["state"]["seen"] == 12


def test_mesh_and_batch_errors_name_the_nearest_fix():
    with pytest.raises(ValueError, match=r"fsdp=3 do not multiply to the 8 devices here; fsdp may be one of \[1, 2, 4"):
        sharding.create_mesh(tiny.config(mesh=dict(fsdp=3)).mesh)
    with pytest.raises(ValueError, match="divisible by 16 .*the nearest are 16 and 32"):
        sharding.check_batch(20, 2, mesh_of(8, 1))
