"""Segmentation: which pixels count, devices and micro-batches, a frozen backbone, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.objectives import segmentation
from equivit.objectives.registry import OBJECTIVES
from equivit.training import build, sharding
from equivit.training.config import get_base, validate
from tests.models import segmenter_test
from tests.training import tiny
from tests.training.state_test import mesh_of

ARRAYS = ("trainable", "frozen", "statistics")  # of a state: those of the module
SWIN = dict(name="swin_t", width=8, depths=(1, 1), num_heads=(1, 2), window_size=(2, 2), patch_size=2)


def config_of(model=None, **objective):
    config = get_base("segmentation")
    config.model = {**SWIN, "image_size": (16, 8), "in_channels": 3, "num_classes": 4, **(model or {})}
    config.data.update(image_size=(16, 8), mean=(0.5,), std=(0.5,))
    config.objective.update({"width": 8, **objective})
    config.optimizer.update(name="sgd", clip=None, weight_decay=0.0, momentum=0.0)
    config.schedule.update(name="constant", lr=1.0)
    config.batch_size, config.steps = 8, 2
    return config


def batch(t=0):
    """Images with very different numbers of pixels that count; the first has none."""
    rng = np.random.default_rng(t)
    maps = rng.integers(-1, 4, (8, 16, 8), np.int32)
    maps[0], maps[1, 1:] = -1, -1
    return {"image": rng.integers(0, 256, (8, 16, 8, 3), np.uint8), "map": maps}


@functools.cache
def step(devices, **objective):
    """The state before and after a step, and the metrics."""
    config, mesh = config_of(**objective), mesh_of(devices, 1)
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=2, per_epoch=2)
        before = random_state(run)
        first = jax.device_put(before, jax.tree.map(lambda a: a.sharding, run.abstract))
        after, metrics = run.step(first, sharding.to_global(mesh, batch()))
    return before, jax.device_get(after), jax.device_get(metrics)


def random_state(run):
    """With all parameters and statistics random; `run.init` would take as long to compile as the step."""
    arrays = jax.device_get(logical.take(segmenter_test.model(run.module.config), nnx.Variable))
    start = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), run.abstract)
    parts = {part: {name: arrays[name] for name in getattr(start, part)} for part in ARRAYS}
    return start._replace(good=np.bool_(True), **parts)


@pytest.mark.slow
def test_eight_devices_equal_one():
    """Though some devices have hardly a pixel that counts."""
    (_, one, metrics), (_, eight, others) = step(1), step(8)
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-5, err_msg=name)
    for name, value in one.trainable.items():
        np.testing.assert_allclose(eight.trainable[name], value, atol=2e-5, err_msg=name)
    assert {"loss", "accuracy", "auxiliary"} <= metrics.keys() and metrics["good"]


def test_the_mean_is_that_of_all_pixels_that_count():
    """However the batch is split: the second half has nearly all of them."""
    rng, maps = np.random.default_rng(0), batch()["map"]
    logits = rng.normal(size=(8, 16, 8, 4)).astype(np.float32)
    counted = maps >= 0
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, np.maximum(maps, 0)[..., None], -1)[..., 0][counted].mean()
    share = np.full(8, 8 / counted.sum(), np.float32)
    loss = jax.jit(segmentation.pixel_cross_entropy)
    np.testing.assert_allclose(loss(logits, maps, share), expected, rtol=1e-5)
    halves = [loss(logits[k : k + 4], maps[k : k + 4], share[k : k + 4]) for k in (0, 4)]
    np.testing.assert_allclose(np.mean(halves), expected, rtol=1e-5)


def test_a_batch_without_a_pixel_that_counts_has_the_loss_zero():
    prepared = OBJECTIVES["segmentation"](config_of()).prepare(
        None, {"image": np.zeros((2, 4, 4, 3), np.uint8), "map": np.full((2, 4, 4), -1)}, jax.random.key(0)
    )
    assert np.isfinite(prepared["share"]).all()
    assert segmentation.pixel_cross_entropy(jnp.ones((2, 4, 4, 3)), prepared["map"], prepared["share"]) == 0


def test_labels_come_to_the_size_of_the_logits():
    """Before pixels are counted; the auxiliary logits are of that size too."""
    objective = OBJECTIVES["segmentation"](config_of(own_size=True))
    built = jax.eval_shape(lambda: objective.module(zoo.create(**config_of().model), jax.random.key(0)))
    prepared = objective.prepare(built, batch(), jax.random.key(0))
    expected = batch()["map"][:, 1::2, 1::2]  # patches of 2: the centre of a new entry lies where four old ones meet
    np.testing.assert_array_equal(prepared["map"], expected)
    np.testing.assert_allclose(prepared["share"], 8 / (expected >= 0).sum(), rtol=1e-6)
    arrays = jax.eval_shape(lambda: prepared)
    loss = jax.eval_shape(recording()(lambda m, b: objective.loss(m, b, tiny.step())), built, arrays)
    assert loss.value.shape == () and {"accuracy", "auxiliary"} == loss.metrics.keys()


def test_a_frozen_backbone_stays_as_it_is():
    before, after, metrics = step(1, decoder="linear", frozen=True)
    assert after.frozen and all(name.startswith("backbone.") for name in after.frozen)
    assert after.trainable and all(name.startswith("decoder.") for name in after.trainable)
    jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
    assert metrics["good"] and metrics["grad_norm"] > 0


def test_the_exported_model_has_the_decoder_and_no_head():
    exported = tiny.exported_model(config_of())
    assert exported.config.num_classes == 4 and exported.backbone.head is None and exported.auxiliary is not None
    assert tiny.exported_model(config_of(auxiliary=0.0)).auxiliary is None


@pytest.mark.parametrize(
    ("model", "objective", "message"),
    [
        ({}, dict(decoder="octic"), "decoder='octic' takes fields, and the last blocks of this Swin have none"),
        ({}, dict(equivariant=True), "equivariant=True needs an adaptive backbone"),
        (dict(num_classes=None), {}, "model.num_classes=None: swin_t has no head"),
    ],
)
def test_what_does_not_go_together_is_refused(model, objective, message):
    config = config_of(model, **objective)
    with pytest.raises(ValueError, match=message):
        OBJECTIVES["segmentation"](config).check_model(zoo.configuration(**config.model), {})


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="objective.auxiliary=-1.0 must be zero or more; the nearest is 0"):
        validate(config_of(auxiliary=-1.0))
