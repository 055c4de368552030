"""Linear probing: a backbone that stays as it is, statistics over the global batch, a head that folds into one map."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical
from equivit.models import saved, zoo
from equivit.objectives.linear_probe import LinearProbe, ProbeHead
from equivit.training import optimizers, sharding
from equivit.training.config import get_base, validate
from equivit.training.state import compile_program
from tests.training.state_test import mesh_of

SIZE = dict(image_size=(8, 12), patch_size=4, width=24, num_heads=2, depth=1, jumbo=2, num_classes=4, layer_scale=1.0)


def create(rngs):
    return zoo.create("jumbo_vit_ti16", drop_path=0.5, rngs=rngs, **SIZE)


def batch(t=0):
    rng = np.random.default_rng(t)
    return {"image": rng.integers(0, 256, (16, 8, 12, 3), np.uint8), "label": rng.integers(0, 4, 16, np.int32)}


def steps(mesh, number=2, **objective):
    """The objective, and the state after some steps."""
    config = get_base("linear_probe")
    config.objective.update(objective)
    config.optimizer.update(name="lars", clip=None, weight_decay=0.0)
    goal = LinearProbe(config.objective, mean=(0.5,), std=(0.5,), num_classes=4)
    with jax.set_mesh(mesh):
        program = compile_program(
            goal,
            create,
            lambda trainable: optimizers.create(config.optimizer, goal, trainable, lambda step: jnp.float32(100.0)),
            mesh,
            seed=0,
        )
        first = state = program.init({})
        first = jax.device_get(first)
        for t in range(number):
            state, metrics = program.step(state, sharding.to_global(mesh, batch(t)), goal.static(0.0))
    return goal, first, jax.device_get(state), metrics


@pytest.fixture(scope="module")
def run():
    return steps(mesh_of(1, 1))


def test_only_the_head_is_trained(run):
    _, before, after, metrics = run
    assert set(after.trainable) == {"linear.weight", "linear.bias"}
    chex.assert_trees_all_equal(before.extra["backbone"], after.extra["backbone"])
    assert all(np.abs(after.trainable[k] - before.trainable[k]).max() > 1e-4 for k in after.trainable)
    chex.assert_trees_all_equal_shapes(after.optimizer, before.optimizer)
    sizes = {leaf.shape for leaf in jax.tree.leaves(after.optimizer)}
    assert sizes == {(), (4,), (48, 4)}  # momentum of the head alone
    assert metrics["good"]


def test_eight_devices_equal_one(run):
    after = steps(mesh_of(8, 1))[2]
    # Sums over the batch are taken in another order.
    chex.assert_trees_all_close(after.trainable, run[2].trainable, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(after.extra["state"], run[2].extra["state"], rtol=1e-4, atol=1e-5)


def test_the_loss_by_hand(run):
    goal, before = run[:2]
    model = jax.jit(lambda extra: logical.put(create(nnx.Rngs(0)), extra))(before.extra["backbone"])
    prepared = goal.prepare(batch(), jax.random.key(0))
    features = np.asarray(jax.jit(lambda m, x: m.features(x).cls)(model, prepared["image"]))
    normal = (features - features.mean(0)) / np.sqrt(features.var(0) + 1e-6)
    logits = normal @ before.trainable["linear.weight"] + before.trainable["linear.bias"]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, prepared["label"]).mean()
    loss, (_, extra) = jax.jit(goal.loss, static_argnums=5)(
        before.trainable, before.extra, prepared, jax.random.key(0), 0, None
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-4)  # drop path 0.5 is off
    np.testing.assert_allclose(extra["state"]["norm.mean"], 0.1 * features.mean(0), rtol=1e-3, atol=1e-5)


def test_the_exported_model_is_one_that_can_be_saved(run, tmp_path):
    goal, _, after, _ = run
    model = goal.exported(after.trainable, after.extra)
    saved.save(tmp_path, model)
    images = goal.prepare(batch(), None)["image"]
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
