"""Batch statistics in training: devices, groups, micro-batches, averages, resuming, other sizes, and being lost."""

import functools
import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from equivit import logical, models
from equivit.layers import dense
from equivit.layers.batch_stats import recording
from equivit.layers.convolution import NormedConv
from equivit.layers.stack import Stack
from equivit.models import saved
from equivit.objectives.dinov2 import DinoV2, Student
from equivit.training import build, sharding, warm_start
from equivit.training.checkpoints import Checkpoints
from tests.models import backbones
from tests.objectives import dinov2_test
from tests.training import tiny
from tests.training.state_test import CLOSE, mesh_of

pytestmark = pytest.mark.slow

WIDTH, IMAGES = 8, 32
NORMS = ("stem.norm", "blocks.runs.0.norm")


class Block(NormedConv):
    def __init__(self, groups, rngs):
        super().__init__(WIDTH, WIDTH, kernel=(3, 3), groups=WIDTH, statistics_groups=groups, rngs=rngs)

    def __call__(self, x, layout=None, *, train=False, **unused):
        return x + jax.nn.relu(super().__call__(x, train=train))


class Convolutions(nnx.Module):
    """A convolution and a stack of two depthwise ones, each with a batch norm."""

    def __init__(self, rngs, groups=1):
        self.stem = NormedConv(1, WIDTH, kernel=(3, 3), statistics_groups=groups, rngs=rngs)
        self.blocks = Stack([(2, functools.partial(Block, groups))], rngs=rngs)
        self.head = dense.Linear(WIDTH, tiny.CLASSES, init=nnx.initializers.normal(0.1), rngs=rngs)
        self.config = types.SimpleNamespace(width=WIDTH)

    def __call__(self, images, *, key=None, train=False):
        return self.head(self.blocks(self.stem(images, train=train), train=train)[0].mean((1, 2)))


@functools.cache
def program(devices=1, groups=8, parts=1):
    config = tiny.config(objective=dict(ema=0.5), optimizer=dict(accumulation=parts))
    mesh = mesh_of(devices, 1)
    with jax.set_mesh(mesh):
        return tiny.program(config, mesh, build_model=functools.partial(Convolutions, groups=groups)), mesh


@functools.cache
def batch(t):
    rng = np.random.default_rng(t)
    images = rng.integers(0, 256, (IMAGES, tiny.SIDE, tiny.SIDE, 1)).astype(np.uint8)
    return {"image": images, "label": (images[:, 0, 0, 0] // 32).astype(np.int32)}


def run(steps, begin=None, **which):
    """The state after a number of steps, on the host."""
    made, mesh = program(**which)
    with jax.set_mesh(mesh):
        state = made.init({}) if begin is None else begin
        for t in range(int(state.step), steps):
            state, _ = made.step(state, sharding.to_global(mesh, batch(t)))
    return jax.device_get(state)


@pytest.mark.parametrize("groups", [1, 8])
def test_eight_devices_equal_one(groups):
    one, eight = (run(2, devices=devices, groups=groups) for devices in (1, 8))
    assert set(one.statistics) == {f"{norm}.{name}" for norm in NORMS for name in ("mean", "variance")}
    chex.assert_trees_all_close(eight, one, **CLOSE)


def test_groups_make_another_model():
    """So that the equality above is not that of statistics that count for nothing.  A mean of means is the same."""
    one, eight = run(2, groups=1), run(2, groups=8)
    variances = [name for name in one.statistics if name.endswith("variance")]
    assert all(np.abs(one.statistics[name] - eight.statistics[name]).max() > 1e-4 for name in variances)


def test_groups_of_their_own_need_no_other_device():
    """Forward, and back to the images; a norm of the whole batch needs sums over the devices."""
    mesh = mesh_of(8, 1)
    rows = NamedSharding(mesh, sharding.batch(mesh))
    images = jax.ShapeDtypeStruct((IMAGES, tiny.SIDE, tiny.SIDE, 1), jnp.float32, sharding=rows)

    def text(groups):
        model = jax.eval_shape(lambda: Convolutions(nnx.Rngs(0), groups))

        @recording()
        def slopes(model, images):
            logits, back = jax.vjp(lambda images: logical.put(model, {})(images, train=True), images)
            return back(jax.nn.relu(logits))[0]

        with jax.set_mesh(mesh):
            return jax.jit(slopes, out_shardings=rows).lower(model, images).compile().as_text()

    crossing = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    for groups, expected in ((8, set()), (16, set()), (1, {"all-reduce"})):
        assert set(re.findall(crossing, text(groups))) == expected


def test_statistics_of_micro_batches_follow_each_other():
    """Two micro-batches of every second image, on the parameters of the step's beginning."""
    made, _ = program(parts=2)
    images = made.objective.prepare(made.module, batch(0), jax.random.key(0))["image"]

    @jax.jit
    @recording()
    def seen(arrays, images):
        model = logical.put(made.module, arrays)
        model(images, train=True)
        return logical.take_state(model)

    first = jax.device_get(made.init({}))
    expected = first.statistics
    for part in (images[::2], images[1::2]):
        expected = seen({**first.trainable, **expected}, part)
    found = run(1, parts=2).statistics
    chex.assert_trees_all_close(found, jax.device_get(expected), **CLOSE)
    assert all(np.abs(found[name] - run(1).statistics[name]).max() > 1e-4 for name in found)


def test_averaged_weights_have_the_statistics_of_the_trained_ones():
    state = run(2)
    assert set(state.extra["ema"]) == set(state.trainable)
    made, _ = program()
    module = logical.put(made.module, state.arrays)
    average = made.objective.exported(module, state.extra, "averaged")
    chex.assert_trees_all_equal(logical.take(average), state.extra["ema"])
    chex.assert_trees_all_equal(logical.take_state(average), state.statistics)


def test_a_teacher_that_is_an_average_has_the_statistics_of_the_student():
    goal = DinoV2(dinov2_test.config_of())
    student = jax.eval_shape(lambda: Student(Convolutions(nnx.Rngs(0)), goal.options, rngs=nnx.Rngs(0)))
    draw = lambda seed: {k: np.full(a.shape, seed, a.dtype) for k, a in logical.take(student, nnx.Variable).items()}  # noqa: E731
    student, extra = logical.put(student, draw(1)), {"teacher": {k: draw(2)[k] for k in logical.take(student)}}
    assert set(jax.eval_shape(goal.extra, logical.take(student))["teacher"]) == set(extra["teacher"])
    teacher = goal.exported(student, extra)
    assert {float(a.min()) for a in logical.take(teacher).values()} == {2.0}
    assert {float(a.min()) for a in logical.take_state(teacher).values()} == {1.0}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Bit for bit, from what lies on the disk; with statistics of the start instead, it does not."""
    made, mesh = program()
    with jax.set_mesh(mesh), Checkpoints(tmp_path, made.objective.config.checkpoint) as manager:
        manager.save(run(2))
        manager.wait()
        state = manager.restore(made.abstract)
    fresh = jax.tree.map(jnp.copy, state)._replace(statistics=made.init({}).statistics)
    whole = run(4)
    chex.assert_trees_all_equal(run(4, begin=state), whole)
    assert np.abs(run(4, begin=fresh).statistics["stem.norm.mean"] - whole.statistics["stem.norm.mean"]).max() > 1e-4


def test_a_model_for_larger_images_keeps_its_statistics(tmp_path):
    """In a new configuration, and in a run that begins with a saved model."""
    model = backbones.model("cvt_13")
    expected = logical.to_logical(model, nnx.BatchStat)
    larger, changes = models.reconfigure(model, image_size=(56, 84))
    chex.assert_trees_all_equal(logical.to_logical(larger, nnx.BatchStat), expected)
    assert str(changes) == "all kept" and len(expected) == 18
    saved.save(tmp_path, model)
    config = tiny.config(model=dict(backbones.CVT, name="cvt_13", image_size=(56, 84)))
    config.init = str(tmp_path)
    config.model.in_channels = 3
    arrays = warm_start.initial_parameters(config, build.model_configuration(config))
    statistics = logical.take(model, nnx.BatchStat)
    chex.assert_trees_all_equal({name: arrays[name] for name in statistics}, statistics)


def test_statistics_that_nobody_takes_are_refused():
    """In a traced function, from layers and stacks; evaluation records none, and a model called as it is keeps them."""
    model, x = Convolutions(nnx.Rngs(0)), np.random.default_rng(0).normal(size=(2, 2, 2, 1)).astype(np.float32)
    for function in (lambda m, x: m(x, train=True), lambda m, x: m.stem(x, train=True)):
        with pytest.raises(ValueError, match=r"which a traced function loses; return .*batch_stats\.recording"):
            jax.eval_shape(function, model, x)
        with pytest.raises(ValueError, match="a traced function loses"):
            jax.eval_shape(functools.partial(function, model), x)
    blocks, maps = model.blocks, np.ones((2, 2, 2, WIDTH), np.float32)
    with pytest.raises(ValueError, match="Stack: train=True"):
        jax.eval_shape(lambda blocks: blocks(maps, train=True), blocks)
    with pytest.raises(ValueError, match="Stack: train=True"):
        jax.eval_shape(lambda blocks: blocks(maps, stop=1, train=True), blocks)
    jax.eval_shape(lambda m: m(x), model)
    jax.eval_shape(recording()(lambda m: m(x, train=True)), model)
    blocks(maps, stop=1, train=True)
    moved = np.abs(np.asarray(blocks.runs[0].norm.mean[...])).max(1) > 0
    assert moved.tolist() == [True, False]
