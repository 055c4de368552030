"""After Flax's `train()` every family drops, or asks for a key; after `eval()` it does not."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from equivit import models, testing
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.models.segmenter.model import SegmenterConfig
from tests.drawing import normal
from tests.models.backbones import BACKBONES
from tests.models.inputs_test import SERIES, VIT

FAMILIES = {
    "vit_ti16": dict(VIT, drop_path=0.5),
    "octic_vit_ti16": dict(VIT, dropout=0.5),
    "bixt_ti_p16": BACKBONES["bixt_ti_p16"].small | dict(drop_path=(0.0, 0.5)),
    "cvt_13": BACKBONES["cvt_13"].small | dict(drop_path=0.5),
    "patchtst_public": SERIES | dict(dropout=0.5),
}
KEY = jax.random.key(0)


def abstract(name):
    if name != "segmenter":
        return zoo.abstract(name, **FAMILIES[name])
    backbone = zoo.configuration("swin_t", **BACKBONES["swin_t"].small | dict(num_classes=None))
    config = SegmenterConfig(backbone, num_classes=3, width=8)
    return jax.eval_shape(lambda: config.build(nnx.Rngs(0)))


@recording()
def draws(model, key, method="__call__"):
    """Whether a call of the model draws random numbers."""
    inputs = jax.ShapeDtypeStruct((2, *model.config.input_shape), jnp.float32)
    call = jax.make_jaxpr(lambda model, inputs, key: getattr(model, method)(inputs, key=key))
    return "random_bits" in str(call(model, inputs, key))


@pytest.mark.parametrize("name", [*FAMILIES, "segmenter"])
def test_a_model_needs_a_key_after_train_and_ignores_it_after_eval(name):
    model = abstract(name)
    assert draws(model, KEY) and not draws(model, None)
    model.train()
    assert draws(model, KEY)
    for method in ("__call__", "pooled", "features")[: 1 if name == "segmenter" else 3]:
        with pytest.raises(ValueError, match=r"after train\(\), dropout and drop path need a key; give key=rngs.drop"):
            draws(model, None, method)
    model.eval()
    assert not draws(model, KEY) and not draws(model, None)


def looks(name):
    """The methods of a model that take no key."""
    if name == "segmenter":
        return [lambda m, x: m.label_maps(x)]
    found = [lambda m, x: m.selections(x)]
    if name == "vit_ti16":
        found += [
            lambda m, x: m.attention_weights(x, 0),
            lambda m, x: m.collected(x, lambda block, x, layout: x),
            lambda m, x: m.folded(x, lambda carry, i, block, x, layout: carry + x.sum(), 0.0),
        ]
    return found


@pytest.mark.parametrize("name", ["vit_ti16", "cvt_13", "segmenter"])
def test_methods_without_a_key_look_at_a_model_in_training(name):
    model = abstract(name)
    inputs = jax.ShapeDtypeStruct((2, *model.config.input_shape), jnp.float32)
    programs = [str(jax.make_jaxpr(look)(model, inputs)) for look in looks(name)]
    model.train()
    assert [str(jax.make_jaxpr(look)(model, inputs)) for look in looks(name)] == programs
    assert model.deterministic is False


def test_a_frozen_backbone_runs_as_in_evaluation_also_after_train():
    """It has stochastic depth, and batch norms, whose statistics a traced function may not record."""
    backbone = zoo.configuration("cvt_13", **FAMILIES["cvt_13"] | dict(num_classes=None))
    config = SegmenterConfig(backbone, num_classes=3, decoder="convolutions", width=8)
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((2, *config.input_shape), jnp.float32)

    def program(frozen):
        call = jax.make_jaxpr(lambda model, images, key: model.both(images, key=key, frozen=frozen)[0])
        return str(call(model, images, KEY))

    before = program(frozen=True)
    model.train()
    assert program(frozen=True) == before
    with pytest.raises(ValueError, match="train=True records running statistics, which a traced function loses"):
        program(frozen=False)
    assert model.backbone.deterministic is False


def test_a_model_without_dropout_needs_no_key():
    model = zoo.abstract("vit_ti16", **VIT)
    model.train()
    assert not draws(model, None)


def test_train_computes_what_an_explicit_key_does_also_inside_a_module_and_eval_what_no_key_does():
    class Wrapped(nnx.Module):
        def __init__(self):
            self.inner = testing.randomise(zoo.abstract("vit_ti16", **FAMILIES["vit_ti16"]), KEY)

        def __call__(self, images, key):
            return self.inner(images, key=key)

    model, images = Wrapped(), normal(4, 8, 8, 3)
    call = nnx.jit(lambda model, key: model(images, key))
    dropped, whole = call(model, KEY), call(model, None)
    model.train()
    chex.assert_trees_all_equal(call(model, KEY), dropped)
    model.eval()
    chex.assert_trees_all_equal(call(model, KEY), whole)
    assert jnp.abs(dropped - whole).max() > 1e-2


def test_train_moves_running_statistics():
    small = functools.partial(models.create, "cvt_13", **BACKBONES["cvt_13"].small)
    model, named = small(), small()
    images = normal(2, *model.config.input_shape)

    def step(model, **options):
        return nnx.jit(recording()(lambda model: model(images, **options)))(model)

    expected = step(named, train=True)
    model.train()
    chex.assert_trees_all_equal(step(model), expected)
    moved, kept = (nnx.state(each, nnx.BatchStat) for each in (model, small()))
    chex.assert_trees_all_equal(moved, nnx.state(named, nnx.BatchStat))
    assert all(jnp.abs(new - old).max() > 0 for new, old in zip(*map(jax.tree.leaves, (moved, kept)), strict=True))
