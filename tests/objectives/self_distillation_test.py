"""The interface is enough for self-distillation such as DINO: this objective is written in this file alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical
from equivit.data.pixels import normalize
from equivit.objectives.objective import Loss, Objective, usual_rule
from equivit.training.checkpoints import Checkpoints
from tests.training import tiny
from tests.training.state_test import mesh_of


class Student(nnx.Module):
    """A backbone and its projection."""

    def __init__(self, model, *, rngs):
        self.backbone, self.hidden = model, nnx.Linear(tiny.CLASSES, 16, rngs=rngs)
        self.last_layer = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, images):
        return self.last_layer(nnx.relu(self.hidden(self.backbone(images))))


class SelfDistillation(Objective):
    """A student learns what its own average, the teacher, says of another view of the image."""

    def module(self, model, key):
        return Student(model, rngs=nnx.Rngs(key))

    def rule(self, tensor):
        part = tensor.name.split(".")[0]
        return usual_rule(tensor)._replace(clip=part, starts=3 if part == "last_layer" else 0)

    def extra(self, trainable):
        return {"teacher": jax.tree.map(jnp.copy, trainable), "centre": jnp.zeros(32)}

    def prepare(self, module, batch, key):
        images = normalize(batch["image"], (0.5,), (0.5,))
        return {"global": images, "local": jnp.flip(images, 2) + 0.1 * jax.random.normal(key, images.shape)}

    def loss(self, module, batch, step):
        teacher, temperature = self.holding(module, step.extra["teacher"]), step.clock.ramp(0.4, 0.7, steps=4)
        scores, centre = jax.lax.stop_gradient(teacher(batch["global"])), step.extra["centre"]
        target = jax.nn.softmax((scores - centre) / temperature)
        value = optax.softmax_cross_entropy(module(batch["local"]) / 0.1, target).mean()
        extra = {**step.extra, "centre": 0.9 * centre + 0.1 * scores.mean(0)}
        return Loss(value, {"temperature": temperature}, extra)

    def after_step(self, trainable, extra, clock):
        moved = optax.incremental_update(trainable, extra["teacher"], 1 - clock.cosine(0.9, 1.0))
        return {**extra, "teacher": moved}

    def exported(self, module, extra):
        return logical.put(module, extra["teacher"]).backbone


TOTAL, MESH = 6, mesh_of(2, 1)


def program():
    config = tiny.config(
        optimizer=dict(name="adamw", weight_decay=0.04, weight_decay_end=0.4, clip=0.3, accumulation=2)
    )
    with jax.set_mesh(MESH):
        return tiny.program(config, MESH, objective=SelfDistillation(config), total=TOTAL, lr=1e-3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The program, the state before each step and after the last, the metrics, and the place of two checkpoints."""
    compiled, workdir = program(), tmp_path_factory.mktemp("run")
    states, metrics = [], []
    with jax.set_mesh(MESH), Checkpoints(workdir, tiny.config().checkpoint) as manager:
        state = compiled.init({})
        for _ in range(TOTAL):
            states.append(jax.device_get(state))
            state, seen = tiny.run(compiled, MESH, int(state.step) + 1, start=state)
            metrics.append(jax.device_get(seen))
            if state.step == 4:
                manager.save(state)
    return compiled, [*states, jax.device_get(state)], metrics, workdir


@pytest.mark.slow
def test_the_last_layer_starts_later(run):
    kernels = [state.trainable["last_layer.kernel"] for state in run[1]]
    assert [bool((after != before).any()) for before, after in zip(kernels, kernels[1:], strict=False)] == (
        [False] * 3 + [True] * 3
    )
    assert all((run[1][1].trainable[k] != run[1][0].trainable[k]).any() for k in ("hidden.kernel", "backbone.scale"))


def test_temperature_and_momentum_follow_the_run(run):
    _, states, metrics, _ = run
    np.testing.assert_allclose([m["temperature"] for m in metrics], [0.4, 0.5, 0.6, 0.7, 0.7, 0.7], rtol=1e-6)
    for t, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        momentum = 1 + 0.5 * (0.9 - 1) * (1 + np.cos(np.pi * t / TOTAL))
        expected = {k: momentum * before.extra["teacher"][k] + (1 - momentum) * a for k, a in after.trainable.items()}
        chex.assert_trees_all_close(after.extra["teacher"], expected, rtol=1e-5, atol=1e-7)


def test_the_centre_passes_from_one_micro_batch_to_the_next(run):
    compiled, states, _, _ = run
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))
    batch = compiled.objective.prepare(compiled.module, tiny.batch(0), keys[0])
    teacher = logical.put(compiled.module, states[0].extra["teacher"])
    first, second = (teacher(batch["global"][part::2]).mean(0) for part in (0, 1))
    np.testing.assert_allclose(states[1].extra["centre"], 0.09 * first + 0.1 * second, rtol=1e-4, atol=1e-6)


def test_stopped_and_resumed_equals_uninterrupted(run):
    with jax.set_mesh(MESH), Checkpoints(run[3], tiny.config().checkpoint) as manager:
        compiled = program()
        state = manager.restore(compiled.abstract)
        assert state.step == 4
        state, _ = tiny.run(compiled, MESH, TOTAL, start=state)
    chex.assert_trees_all_equal(jax.device_get(state), run[1][-1])


def test_the_teacher_is_exported(run):
    compiled, states, _, _ = run
    model = compiled.exported(states[-1])
    np.testing.assert_array_equal(model.head.kernel[...], states[-1].extra["teacher"]["backbone.head.kernel"])
    assert (model.head.kernel[...] != states[-1].trainable["backbone.head.kernel"]).any()
