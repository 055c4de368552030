import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical
from equivit.data.pixels import normalize
from equivit.models import zoo
from equivit.objectives import supervised
from equivit.objectives.clock import Clock
from equivit.objectives.supervised import Supervised
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
    goal = Supervised(tiny.config(objective=dict(ema=float(data["input/m"]))))
    extra = goal.after_step({"w": data["input/student"]}, {"ema": {"w": data["input/teacher"]}}, Clock(0, 10, 4))
    np.testing.assert_allclose(extra["ema"]["w"], data["output/teacher"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["vit_ti16", "octic_vit_ti16", "jumbo_vit_ti16"])
def test_which_tensors_decay(name):
    options = dict(width=32, depth=2, num_heads=2, patch_size=4, image_size=(8, 8), registers=2, mask_token=True)
    options = {k: v for k, v in options.items() if name != "jumbo_vit_ti16" or k != "registers"}
    goal, tables = Supervised(tiny.config()), logical.tensors(zoo.abstract(name, **options))
    decays = {t.name: goal.rule(t).decay for table in tables.values() for t in table.flat}
    position = "position.A1" if name.startswith("octic") else "position.table"
    token = "prefix.jumbo_token" if name.startswith("jumbo") else "prefix.class_token"
    assert not any(decays[k] for k in (position, token, "mask_token", "readout.norm.scale", "head.bias"))
    qkv = "blocks.0.attention.qkv.B1" if name.startswith("octic") else "blocks.0.attention.qkv.weight"
    assert decays[qkv] and decays["head.weight"] and any(v for k, v in decays.items() if k.startswith("patch_embed."))


def test_a_model_without_a_head_is_refused():
    config = tiny.config()
    config.model.num_classes = None
    with pytest.raises(
        ValueError, match="num_classes=None: vit_ti16 has no head, which .*'supervised' trains; set num_cl"
    ):
        Supervised(config)


def test_normalize():
    images = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(normalize(images, (0.5,), (0.25,)).ravel(), [-2, 2], rtol=1e-6)
    with pytest.raises(ValueError, match="has 2 entries for images with 1 channels"):
        normalize(images, (0.5, 0.5), (0.5, 0.5))


@pytest.mark.slow
def test_prepared_images_are_mixed_with_the_mirrored_batch_and_the_loss_is_their_mean():
    goal = Supervised(tiny.config(objective=dict(mixup=0.8, loss="cross_entropy")))
    model, raw = tiny.Tiny(nnx.Rngs(0)), tiny.batch(0)
    batch = goal.prepare(logical.abstract(model), raw, jax.random.key(1))
    chex.assert_shape(batch["target"], (16, tiny.CLASSES))
    np.testing.assert_allclose(batch["target"].sum(-1), 1, rtol=1e-6)
    plain = normalize(raw["image"], (0.5,), (0.5,))
    lam = jnp.vdot(batch["image"] - plain[::-1], plain - plain[::-1]) / jnp.sum((plain - plain[::-1]) ** 2)
    np.testing.assert_allclose(batch["image"], lam * plain + (1 - lam) * plain[::-1], atol=1e-5)
    loss, metrics, _ = goal.loss(model, batch, tiny.step())
    logits = goal.exported(model, {})(batch["image"])
    np.testing.assert_allclose(loss, optax.softmax_cross_entropy(logits, batch["target"]).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(-1) == batch["target"].argmax(-1)).mean())
