"""The step: micro-batches, devices, shardings, and what happens to a loss that is not finite."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from equivit.layers.batch_norm import BatchNorm
from equivit.objectives.objective import Loss, usual_rule
from equivit.objectives.supervised import Supervised
from equivit.training import sharding
from tests.training import tiny


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


MIXED = dict(objective=dict(mixup=0.8, cutmix=1.0, mix_groups=4, ema=0.9))


@functools.cache
def mixed(data=1, fsdp=1, accumulation=1):
    """A program that mixes and averages, and its mesh."""
    mesh = mesh_of(data, fsdp)
    with jax.set_mesh(mesh):
        return tiny.program(tiny.config(**MIXED, optimizer=dict(accumulation=accumulation)), mesh), mesh


@functools.cache
def trained(*which):
    """The state and the metrics of a program of `mixed` after five steps."""
    program, mesh = mixed(*which)
    with jax.set_mesh(mesh):
        return tiny.run(program, mesh, 5)


# Sums over the batch are taken in another order; LAMB's first steps divide by the root of small moments.
CLOSE = dict(rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def reference():
    return jax.device_get(trained())


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (1, 8), (2, 4)])
def test_any_mesh_equals_one_device(reference, data, fsdp):
    chex.assert_trees_all_close(jax.device_get(trained(data, fsdp)), reference, **CLOSE)


@pytest.mark.parametrize("devices", [1, 4])
def test_micro_batches_equal_one_batch(reference, devices):
    chex.assert_trees_all_close(jax.device_get(trained(devices, 1, 4)), reference, **CLOSE)


def test_the_step_is_compiled_once():
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(tiny.config(), mesh)
        tiny.run(program, mesh, 3)
    assert program.compiled._cache_size() == 1


def test_parameters_given_at_the_start_replace_the_drawn_ones():
    program, _ = mixed()
    state = program.init({"head.bias": np.arange(8.0, dtype=np.float32)})
    for tree in (state.trainable, state.extra["ema"]):
        np.testing.assert_array_equal(tree["head.bias"], np.arange(8))
    chex.assert_trees_all_equal(state.trainable["head.kernel"], program.init({}).trainable["head.kernel"])


def test_the_state_changes(reference):
    start = mixed()[0].init({})
    for name, before in start.trainable.items():
        assert np.abs(before - reference[0].trainable[name]).max() > 1e-3, name


def test_fsdp_divides_parameters_and_optimizer():
    mesh = mesh_of(1, 8)
    state, _ = trained(1, 8)
    for tree in (state.trainable, state.optimizer, state.extra["ema"]):
        leaves = jax.tree.leaves(tree)
        everything = sum(leaf.nbytes for leaf in leaves)
        for device in mesh.devices.flat:
            held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)
            assert held <= everything / 7
    stack = state.trainable["blocks.runs.0.linear.kernel"]
    assert stack.shape[0] == stack.addressable_shards[0].data.shape[0] == 2  # blocks are never divided


def test_a_bad_step_and_those_after_it_change_nothing():
    program, mesh = mixed()
    with jax.set_mesh(mesh):
        state, _ = tiny.run(program, mesh, 2)
        before = jax.device_get(state)
        poisoned = state._replace(trainable=jax.tree.map(lambda a: a * np.nan, state.trainable))
        after, metrics = program.step(poisoned, sharding.to_global(mesh, tiny.batch(2)))
        assert not metrics["good"] and not after.good and after.step == 2
        chex.assert_trees_all_equal(jax.device_get(after.optimizer), before.optimizer)
        healed = after._replace(trainable=jax.device_put(before.trainable))
        last, metrics = program.step(healed, sharding.to_global(mesh, tiny.batch(3)))
    assert not metrics["good"] and last.step == 2
    chex.assert_trees_all_equal(jax.device_get(last.trainable), before.trainable)


def test_an_average_starts_at_the_weights_and_follows_them():
    options, mesh = tiny.config(objective=dict(ema=0.5)), mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(options, mesh)
        first = jax.device_get(program.init({}))
        one, _ = tiny.run(program, mesh, 1)
    chex.assert_trees_all_equal(first.extra["ema"], first.trainable)

    def halfway(average, a, b):
        """The mean, rounded as the two weights are: where they nearly cancel, that is more than a share of the mean."""
        assert (np.abs(average - (a + b) / 2) <= 1e-6 * np.maximum(np.abs(a), np.abs(b))).all()

    jax.tree.map(halfway, one.extra["ema"], first.trainable, one.trainable)


class Counting(nnx.Module):
    """Counts its training batches, as running statistics do."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(tiny.SIDE**2, tiny.CLASSES, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, images, *, key=None, train=False):
        if train:
            self.seen[...] += 1
        return self.linear(images.reshape(images.shape[0], -1))


class Probing(Supervised):
    """Freezes what `frozen` names, and calls the model as `call` says."""

    def __init__(self, config, frozen=(), call=lambda module, images: module(images, train=True)):
        super().__init__(config)
        self._frozen, self._call = frozen, call

    def rule(self, tensor):
        return usual_rule(tensor)._replace(frozen=tensor.name.startswith(self._frozen))

    def loss(self, module, batch, step):
        return Loss(self.compare(self._call(module, batch["image"]), batch, step), {})


def steps(objective, number, **options):
    config, mesh = tiny.config(**options.pop("config", {})), mesh_of(1, 1)
    with jax.set_mesh(mesh):
        program = tiny.program(config, mesh, objective=objective, **options)
        first = jax.device_get(program.init({}))
        return first, jax.device_get(tiny.run(program, mesh, number)[0])


def test_running_statistics_see_every_micro_batch():
    config = dict(optimizer=dict(accumulation=4))
    assert steps(None, 3, config=config, build_model=Counting)[1].statistics == {"seen": 12}


def copied(module, images):
    return jax.tree.map(lambda a: a, module)(images, train=True)


@pytest.mark.parametrize("call", [copied, lambda module, images: module(images)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_running_statistics_that_are_lost_are_refused(call, accumulation):
    config = dict(optimizer=dict(accumulation=accumulation))
    with pytest.raises(
        ValueError, match=r"Probing.loss left the running statistics .* 'seen'; call the module .* copy"
    ):
        steps(Probing(tiny.config(), call=call), 1, config=config, build_model=Counting)


class Pair(nnx.Module):
    """Two counters, only one of which is set to train."""

    def __init__(self, rngs):
        self.body, self.head = Counting(rngs), Counting(rngs)
        self.norm = BatchNorm(tiny.CLASSES, affine=False)

    def __call__(self, images, *, key=None, train=False):
        return self.body(images) + self.head(images) + self.norm(self.head(images))


def test_running_statistics_of_a_frozen_part_may_stay():
    objective = Probing(tiny.config(), frozen=("body", "head"))
    state = steps(objective, 1, build_model=Pair)[1]
    assert set(state.statistics) == {"body.seen", "head.seen", "norm.mean", "norm.variance"}
    assert state.statistics["body.seen"] == 0 and not state.trainable
    with pytest.raises(ValueError, match="'head.seen'"):  # the norm has no parameters; it belongs to the whole
        steps(Probing(tiny.config(), frozen="body"), 1, build_model=Pair)


def test_frozen_leaves_have_no_gradient_and_no_moments():
    objective = Probing(tiny.config(), frozen=("embed", "blocks.1."))
    first, last = steps(objective, 3, config=dict(optimizer=dict(name="adamw")))
    assert set(first.frozen) == {"embed.kernel", "embed.bias"}
    chex.assert_trees_all_equal(last.frozen, first.frozen)
    names = {path[-1].key for path, _ in jax.tree.leaves_with_path(first.optimizer) if hasattr(path[-1], "key")}
    assert names == set(first.trainable)  # all that has moments
    kernels = [
        state.trainable["blocks.runs.0.linear.kernel"] for state in (first, last)
    ]  # two blocks, one of them frozen
    assert np.abs(kernels[1] - kernels[0]).max(axis=(1, 2)).tolist()[1] == 0 < np.abs(kernels[1] - kernels[0])[0].max()
    np.testing.assert_array_equal(optax.tree.get(last.optimizer, "mu")["blocks.runs.0.linear.kernel"][1], 0)
    whole = steps(Probing(tiny.config()), 3, config=dict(optimizer=dict(name="adamw")))[1]
    assert np.abs(whole.trainable["embed.kernel"] - first.frozen["embed.kernel"]).max() > 1e-3  # else nothing is shown


def test_precision_reaches_the_module_and_teachers_but_not_the_state():
    seen = []

    class Watching(Supervised):
        def loss(self, module, batch, step):
            seen.append((module.head.kernel.dtype, step.teachers["other"].head.kernel.dtype))
            return super().loss(module, batch, step)

    config = tiny.config()
    config.precision = "bfloat16"
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        teachers = {"other": tiny.Tiny(nnx.Rngs(1))}
        program = tiny.program(config, mesh, objective=Watching(config), teachers=teachers)
        state, _ = tiny.run(program, mesh, 1)
    assert set(seen) == {(jnp.dtype("bfloat16"),) * 2}
    assert {a.dtype.name for a in jax.tree.leaves((state.trainable, program.teachers))} == {"float32"}


def test_mesh_and_batch_errors_name_the_nearest_fix():
    with pytest.raises(ValueError, match=r"fsdp=3 do not multiply to the 8 devices here; fsdp may be one of \[1, 2, 4"):
        sharding.create_mesh(tiny.config(mesh=dict(fsdp=3)).mesh)
    with pytest.raises(ValueError, match="divisible by 16 .*the nearest are 16 and 32"):
        sharding.check_batch(20, 2, mesh_of(8, 1))
