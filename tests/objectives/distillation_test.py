"""Distillation: the divergence, one crop and one mix for both models, and a teacher that is never trained or saved."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit import logical, testing
from equivit.data import crops
from equivit.data.pixels import normalize
from equivit.models import zoo
from equivit.objectives import distillation, mixing
from equivit.objectives.distillation import Distillation
from equivit.training import loading
from equivit.training.checkpoints import Checkpoints
from equivit.training.config import get_base, validate
from tests.training import tiny
from tests.training.state_test import mesh_of

SMALL = dict(width=24, num_heads=2, depth=2, patch_size=4, in_channels=3, num_classes=4)


def options(**objective):
    config = get_base("distillation")
    config.steps, config.batch_size = 4, 8
    config.model.update(SMALL, name="jumbo_vit_ti16", image_size=(8, 12), jumbo=2)
    config.data.update(source="synthetic", image_size=(8, 12), train_image_size=(16, 24))
    config.objective.update({"teacher": "zoo:vit_ti16", "mixup": 0.8, "cutmix": 1.0, **objective})
    validate(config)
    return config


@pytest.fixture(scope="module")
def teacher():
    return testing.randomise(zoo.abstract("vit_ti16", image_size=(16, 24), **SMALL), jax.random.key(7))


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
    config = options(teacher_mean=(0.5, 0.4, 0.3), teacher_std=(0.2, 0.3, 0.4), mix_groups=4)
    goal = Distillation(config)

    @jax.jit
    def mixed(mean, std):
        images = normalize(raw()["image"], mean, std)
        return mixing.mix(jax.random.key(3), images, jnp.zeros((8, 4)), mixup=0.8, cutmix=1.0, groups=4)[0]

    batch = jax.jit(lambda batch: goal.prepare(teacher, batch, jax.random.key(3)))(raw())
    ours = mixed(jnp.array(config.data.mean), jnp.array(config.data.std))
    np.testing.assert_allclose(batch["image"], distillation.shrink(ours, (8, 12)), atol=1e-5)
    theirs = mixed(jnp.array((0.5, 0.4, 0.3)), jnp.array((0.2, 0.3, 0.4)))
    np.testing.assert_allclose(batch["teacher_image"], theirs, atol=1e-5)


@pytest.mark.slow
def test_the_loss_is_the_divergence_from_the_teacher(teacher):
    goal = Distillation(options())
    model = testing.randomise(zoo.abstract("jumbo_vit_ti16", image_size=(8, 12), jumbo=2, **SMALL), jax.random.key(0))

    @jax.jit
    def value(trainable):
        batch = goal.prepare(logical.abstract(model), raw(), jax.random.key(1))
        teachers = {"teacher": teacher}

        def loss(trainable):
            return goal.loss(logical.put(model, trainable), batch, tiny.step(teachers=teachers))[:2]

        expected = distillation.divergence(model(batch["image"]), teacher(batch["teacher_image"]))
        return jax.value_and_grad(loss, has_aux=True)(trainable), expected

    ((loss, metrics), gradients), expected = value(logical.take(model))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert set(metrics) == {"accuracy"} and float(jnp.abs(gradients["head.bias"]).max()) > 0


def test_the_teacher_is_neither_trained_nor_saved(tmp_path):
    config, mesh = tiny.config(), mesh_of(2, 1)
    config.objective = dict(get_base("distillation").objective)
    teacher = tiny.Tiny(nnx.Rngs(7))
    with jax.set_mesh(mesh), Checkpoints(tmp_path, config.checkpoint) as checkpoints:
        program = tiny.program(config, mesh, teachers={"teacher": teacher})
        state, _ = tiny.run(program, mesh, 1)
        checkpoints.save(state)
        checkpoints.wait()
        again = checkpoints.restore(program.abstract)  # nothing is drawn to restore it
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(state))
    chex.assert_trees_all_equal(jax.device_get(program.teachers["teacher"]), logical.take(teacher))
    items = [path for path in (tmp_path / "checkpoints" / "1").rglob("*") if path.is_file()]
    assert items and not any(b"teachers" in path.read_bytes() for path in items)
    arrays = [a for a in jax.tree.leaves(jax.device_get(state)) if a.shape == teacher.head.kernel.shape]
    assert arrays and not any((a == teacher.head.kernel[...]).all() for a in arrays)


def test_a_teacher_of_other_classes_is_refused():
    goal, other = Distillation(options()), zoo.abstract("vit_ti16", image_size=(16, 24), **{**SMALL, "num_classes": 5})
    model = zoo.abstract("jumbo_vit_ti16", image_size=(8, 12), jumbo=2, **SMALL)

    def loss(model, other):
        batch = goal.prepare(model, raw(), jax.random.key(0))
        return goal.loss(model, batch, tiny.step(teachers={"teacher": other})).value

    with pytest.raises(ValueError, match="teacher=zoo:vit_ti16: the teacher has 5 classes, the model 4; use a teacher"):
        jax.eval_shape(loss, model, other)


def test_bad_values():
    with pytest.raises(ValueError, match="teacher=None: name a teacher"):
        options(teacher=None)
    with pytest.raises(ValueError, match="teacher_std=.* must have one entry per channel"):
        options(teacher_std=(0.5,))
    config = options()
    config.data.train_image_size = (16, 8)
    with pytest.raises(ValueError, match="must not be smaller than the model's"):
        validate(config)
    with pytest.raises(FileNotFoundError, match="'nowhere' is neither a run nor a saved model"):
        loading.load_model("nowhere")
