"""Linear probing: a backbone that stays as it is, statistics over the global batch, a head that folds into one map."""

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical
from equivit.layers.batch_stats import recording
from equivit.models import saved, zoo
from equivit.objectives.linear_probe import ProbeHead
from equivit.training import build, sharding
from equivit.training.config import get_base, validate
from tests.training import tiny
from tests.training.state_test import mesh_of

SIZE = dict(image_size=(8, 12), patch_size=4, width=24, num_heads=2, depth=1, jumbo=2, num_classes=4, layer_scale=1.0)


def batch(t=0):
    rng = np.random.default_rng(t)
    return {"image": rng.integers(0, 256, (16, 8, 12, 3), np.uint8), "label": rng.integers(0, 4, 16, np.int32)}


def steps(mesh, number=2, **objective):
    """The program, the first state, the state after some steps, and the last metrics."""
    config = get_base("linear_probe")
    config.model = dict(SIZE, name="jumbo_vit_ti16", drop_path=0.5)
    config.data.update(mean=(0.5,), std=(0.5,))
    config.objective.update(objective)
    config.optimizer.update(name="lars", clip=None, weight_decay=0.0)
    config.schedule.update(name="constant", lr=100.0)
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=number, per_epoch=number)
        state = run.init({})
        first = jax.device_get(state)
        for t in range(number):
            state, metrics = run.step(state, sharding.to_global(mesh, batch(t)))
    return run, first, jax.device_get(state), metrics


@pytest.fixture(scope="module")
def run():
    return steps(mesh_of(1, 1))


def test_only_the_head_is_trained(run):
    _, before, after, metrics = run
    assert set(after.trainable) == {"head.linear.weight", "head.linear.bias"}
    assert after.frozen and all(name.startswith("backbone.") for name in after.frozen)
    chex.assert_trees_all_equal(before.frozen, after.frozen)
    assert all(np.abs(after.trainable[k] - before.trainable[k]).max() > 1e-4 for k in after.trainable)
    chex.assert_trees_all_equal_shapes(after.optimizer, before.optimizer)
    sizes = {leaf.shape for leaf in jax.tree.leaves(after.optimizer)}
    assert sizes == {(), (4,), (48, 4)}  # momentum of the head alone
    assert metrics["good"]


def test_eight_devices_equal_one(run):
    after = steps(mesh_of(8, 1))[2]
    # Sums over the batch are taken in another order.
    chex.assert_trees_all_close(after.trainable, run[2].trainable, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(after.statistics, run[2].statistics, rtol=1e-4, atol=1e-5)


def test_the_loss_by_hand(run):
    goal, before = run[0].objective, run[1]
    prepared = goal.prepare(run[0].module, batch(), jax.random.key(0))

    @jax.jit
    @recording()
    def value(arrays):
        module = logical.put(run[0].module, arrays)
        loss = goal.loss(module, prepared, tiny.step()).value
        backbone = zoo.abstract("jumbo_vit_ti16", drop_path=0.5, **SIZE)
        parameters = {name.removeprefix("backbone."): array for name, array in before.frozen.items()}
        features = logical.put(backbone, parameters).features(prepared["image"]).cls
        return features, loss, logical.take_state(module)

    features, loss, statistics = jax.device_get(value(before.arrays))
    normal = (features - features.mean(0)) / np.sqrt(features.var(0) + 1e-6)
    logits = normal @ before.trainable["head.linear.weight"] + before.trainable["head.linear.bias"]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, prepared["label"]).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-4)  # drop path 0.5 is off
    np.testing.assert_allclose(statistics["head.norm.mean"], 0.1 * features.mean(0), rtol=1e-3, atol=1e-5)


def test_the_exported_model_is_one_that_can_be_saved(run, tmp_path):
    program, _, after, _ = run
    model = program.exported(after)
    saved.save(tmp_path, model)
    images = program.objective.prepare(program.module, batch(), None)["image"]
    ours, again = (np.asarray(jax.jit(lambda m: m(images))(m)) for m in (model, saved.load(tmp_path)))
    np.testing.assert_array_equal(ours, again)
    assert ours.shape == (16, 4) and np.abs(ours - ours.mean(0)).max() > 0.01


@pytest.mark.parametrize("affine", [False, True])
def test_folding(affine):
    section = get_base("linear_probe").objective
    section.affine = affine
    head = ProbeHead(6, 3, section, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(0), 20))
    values = {**logical.take(head), **logical.take_state(head)}
    head = logical.put(head, {k: 0.5 + jax.random.uniform(next(keys), a.shape) for k, a in values.items()})
    x = jax.random.normal(next(keys), (5, 6))
    np.testing.assert_allclose(head.folded()(x), head(x), rtol=1e-5)
    assert np.abs(head(x, train=True) - head(x)).max() > 0.1


def test_bad_values():
    config = get_base("linear_probe")
    config.epochs, config.objective.momentum = 1, 2.0
    with pytest.raises(ValueError, match=r"objective.momentum=2.0 must be in \[0, 1\]"):
        validate(config)
