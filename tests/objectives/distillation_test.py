"""Distillation: the divergence, one crop and one mix for both models, and a teacher that is never trained or saved."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit import logical
from equivit.data import crops
from equivit.models import zoo
from equivit.objectives import distillation, mixing, supervised
from equivit.training import build, optimizers, start
from equivit.training.checkpoints import Checkpoints
from equivit.training.config import get_base, validate
from equivit.training.state import compile_program
from tests.training import tiny
from tests.training.state_test import mesh_of

SMALL = dict(width=24, num_heads=2, depth=2, patch_size=4, in_channels=3, num_classes=4)


def options(**objective):
    config = get_base("distillation")
    config.steps, config.batch_size = 4, 8
    config.model.update(SMALL, name="vit_ti16", image_size=(8, 12))
    config.data.update(source="synthetic", image_size=(8, 12), train_image_size=(16, 24))
    config.objective.update({"teacher": "zoo:vit_ti16", "mixup": 0.8, "cutmix": 1.0, **objective})
    validate(config)
    return config


@pytest.fixture(scope="module")
def teacher():
    return jax.jit(lambda: zoo.create("vit_ti16", image_size=(16, 24), rngs=nnx.Rngs(7), **SMALL))()


def raw():
    images = np.random.default_rng(0).integers(0, 256, (8, 16, 24, 3), np.uint8)
    return {"image": images, "label": np.arange(8, dtype=np.int32) % 4}


def test_divergence():
    logits, target = jax.random.normal(jax.random.key(0), (2, 5, 7))
    p, q = jax.nn.softmax(target), jax.nn.softmax(logits)
    np.testing.assert_allclose(
        distillation.divergence(logits, target), np.mean(np.sum(p * np.log(p / q), -1)), rtol=1e-6
    )
    np.testing.assert_allclose(distillation.divergence(target + 3, target), 0, atol=1e-6)
    # Up to the teacher's entropy it is the cross-entropy with soft targets, so gradients are the same.
    gradient = jax.grad(distillation.divergence)(logits, target)
    np.testing.assert_allclose(gradient, (q - p) / 5, atol=1e-7)
    wrong = jax.grad(lambda x: distillation.divergence(target, x))(logits)
    assert np.abs(wrong - gradient).max() > 1e-2


def test_images_shrink_as_those_of_evaluation_do():
    pixels = np.asarray(Image.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 30).convert("RGB")) // 2 + 64
    expected = np.asarray(crops.resize(Image.fromarray(pixels), 37, 55), np.float32)
    ours = distillation.shrink(jnp.asarray(pixels, jnp.float32)[None], (37, 55))[0]
    # The same filters; PIL rounds to whole numbers after each axis.
    np.testing.assert_allclose(ours, expected, atol=1.5)
    assert np.abs(jax.image.resize(pixels, (37, 55, 3), "cubic", antialias=False) - expected).max() > 10
    same = jnp.ones((1, 4, 6, 3))
    assert distillation.shrink(same, (4, 6)) is same


def test_both_see_the_same_mix(teacher):
    config = options(teacher_mean=(0.5, 0.4, 0.3), teacher_std=(0.2, 0.3, 0.4))
    goal = build.make_objective(config, teacher=teacher)

    @jax.jit
    def mixed(mean, std):
        images = supervised.normalize(raw()["image"], mean, std)
        return mixing.mix(jax.random.key(3), images, jnp.zeros((8, 4)), mixup=0.8, cutmix=1.0)[0]

    batch = jax.jit(goal.prepare)(raw(), jax.random.key(3))
    ours = mixed(jnp.array(config.data.mean), jnp.array(config.data.std))
    np.testing.assert_allclose(batch["image"], distillation.shrink(ours, (8, 12)), atol=1e-5)
    theirs = mixed(jnp.array((0.5, 0.4, 0.3)), jnp.array((0.2, 0.3, 0.4)))
    np.testing.assert_allclose(batch["teacher_image"], theirs, atol=1e-5)


def test_the_loss_is_the_divergence_from_the_teacher(teacher):
    goal = build.make_objective(options(), teacher=teacher)
    model = jax.jit(lambda: zoo.create("jumbo_vit_ti16", image_size=(8, 12), jumbo=2, **SMALL))()
    trainable, extra = goal.init(model, jax.random.key(0))
    assert "frozen" not in extra
    extra["frozen"] = {"teacher": logical.take(teacher)}

    @jax.jit
    def value(trainable):
        batch = goal.prepare(raw(), jax.random.key(1))
        loss = jax.value_and_grad(goal.loss, has_aux=True)
        expected = distillation.divergence(model(batch["image"]), teacher(batch["teacher_image"]))
        return loss(trainable, extra, batch, jax.random.key(2), 0, None), expected

    ((loss, (metrics, after)), gradients), expected = value(trainable)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert set(after["frozen"]) == {"teacher"} and set(metrics) == {"accuracy"}
    assert set(gradients) == set(trainable) and float(jnp.abs(gradients["head.bias"]).max()) > 0


def test_the_teacher_is_neither_trained_nor_saved(tmp_path):
    config, mesh, teacher = tiny.config(), mesh_of(2, 1), tiny.Tiny(nnx.Rngs(7))
    size = dict(mean=(0.5,), std=(0.5,), num_classes=tiny.CLASSES, image_size=(tiny.SIDE, tiny.SIDE))
    goal = distillation.Distillation(get_base("distillation").objective, **size, teacher=teacher)
    with jax.set_mesh(mesh), Checkpoints(tmp_path, config.checkpoint) as checkpoints:
        program = compile_program(
            goal,
            tiny.Tiny,
            lambda trainable: optimizers.create(config.optimizer, goal, trainable, lambda step: jnp.float32(1e-2)),
            mesh,
            seed=0,
            frozen={"teacher": teacher},
        )
        state, _ = tiny.run(program, mesh, 1)
        checkpoints.save(state)
        checkpoints.wait()
        again = checkpoints.restore(program.init({}))
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
    chex.assert_trees_all_equal(jax.device_get(state.extra["frozen"]["teacher"]), logical.take(teacher))
    items = [path for path in (tmp_path / "checkpoints" / "1").rglob("*") if path.is_file()]
    assert items and not any(b"frozen" in path.read_bytes() for path in items)


def test_bad_values():
    with pytest.raises(ValueError, match="teacher=None: name a teacher"):
        options(teacher=None)
    with pytest.raises(ValueError, match="teacher_std=.* must have one entry per channel"):
        options(teacher_std=(0.5,))
    config = options()
    with pytest.raises(ValueError, match="tells 5 classes apart and the model 4"):
        build.make_objective(config, teacher=zoo.abstract("vit_ti16", **{**SMALL, "num_classes": 5}))
    config.data.train_image_size = (16, 8)
    with pytest.raises(ValueError, match="must not be smaller than the model's"):
        validate(config)
    with pytest.raises(FileNotFoundError, match="'nowhere' is neither a run nor a saved model"):
        start.load_model("nowhere")
