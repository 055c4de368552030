import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit.objectives import supervised
from tests.training import tiny

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "losses"


@pytest.mark.parametrize("case", ["mixup_s0", "mixup_s1", "cutmix_s0", "cutmix_s1"])
@pytest.mark.parametrize("loss", ["bce", "softce"])
def test_losses_and_gradients_equal_the_recipe(case, loss):
    data = np.load(FIXTURES / "mixup_bce.npz")
    logits, targets = jnp.asarray(data["input/logits"]), jnp.asarray(data[f"output/{case}_soft_targets"])
    function = {
        "bce": supervised.binary_cross_entropy,
        "softce": lambda x, y: optax.softmax_cross_entropy(x, y).mean(),
    }[loss]
    value, gradient = jax.value_and_grad(function)(logits, targets)
    np.testing.assert_allclose(value, data[f"output/{case}_{loss}_loss"], rtol=1e-6)
    np.testing.assert_allclose(gradient, data[f"output/{case}_{loss}_grad"], rtol=1e-5, atol=1e-8)


def test_ema_equals_the_recipe():
    data = np.load(FIXTURES / "ema.npz")
    goal = tiny.objective(tiny.config(objective=dict(ema=float(data["input/m"]))))
    extra = goal.after_step({"w": data["input/student"]}, {"ema": {"w": data["input/teacher"]}, "state": {}}, 1)
    np.testing.assert_allclose(extra["ema"]["w"], data["output/teacher"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("blocks.3.attention.qkv.B1", (8, 24), True),
        ("blocks.3.attention.qkv.bias", (24,), False),
        ("blocks.3.scale.A1", (8,), False),
        ("position", (4, 4, 8), False),
        ("position.A1", (4, 4, 8), False),
        ("class_token", (1, 8), False),
        ("registers", (4, 8), False),
        ("mask_token", (1, 8), False),
        ("patch_embed.A1", (4, 4, 3, 8), True),
        ("head.kernel", (8, 10), True),
    ],
)
def test_which_tensors_decay(name, shape, decays):
    assert tiny.objective(tiny.config()).rules()(name, shape).decay == decays


def test_normalize():
    images = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(supervised.normalize(images, (0.5,), (0.25,)).ravel(), [-2, 2], rtol=1e-6)
    with pytest.raises(ValueError, match="has 2 entries for images of 1 channels"):
        supervised.normalize(images, (0.5, 0.5), (0.5, 0.5))


def test_prepared_images_are_mixed_with_the_mirrored_batch_and_the_loss_is_their_mean():
    goal = tiny.objective(tiny.config(objective=dict(mixup=0.8, loss="cross_entropy")))
    trainable, extra = goal.init(tiny.Tiny(nnx.Rngs(0)), jax.random.key(0))
    raw = tiny.batch(0)
    batch = goal.prepare(raw, jax.random.key(1))
    chex.assert_shape(batch["target"], (16, tiny.CLASSES))
    np.testing.assert_allclose(batch["target"].sum(-1), 1, rtol=1e-6)
    plain = supervised.normalize(raw["image"], (0.5,), (0.5,))
    lam = jnp.vdot(batch["image"] - plain[::-1], plain - plain[::-1]) / jnp.sum((plain - plain[::-1]) ** 2)
    np.testing.assert_allclose(batch["image"], lam * plain + (1 - lam) * plain[::-1], atol=1e-5)
    loss, (metrics, _) = goal.loss(trainable, extra, batch, jax.random.key(2), 0, None)
    logits = goal.exported(trainable, extra)(batch["image"])
    np.testing.assert_allclose(loss, optax.softmax_cross_entropy(logits, batch["target"]).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(-1) == batch["target"].argmax(-1)).mean())
