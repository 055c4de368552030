"""SAR: what it adapts, when it does not, how it starts again, and what it must leave alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.evaluation import adaptation, classification
from equivit.evaluation.adaptation import Sar
from equivit.evaluation.predictions import predictor
from equivit.models import zoo
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training.config import get_base
from tests.drawing import normal
from tests.evaluation.predictors import batches, random_model

pytestmark = pytest.mark.slow

ALL, NONE = 1.0, 0.0  # margins: no entropy is above log(classes), none is below 0


@pytest.fixture(scope="module")
def model():
    return random_model("plain", depth=4)


@pytest.fixture(scope="module")
def images():
    return normal(8, 12, 20, 1)


def step(settings, model, state, images, weight=(1.0,) * 8):
    return adaptation.step(settings, model, state, images, np.float32(weight))


def settings(**changes):
    return Sar(**dict(lr=0.5, margin=ALL, reset_below=0.0) | changes)


def confident(model):
    """The same model with logits so large that the entropy of every prediction is near zero."""
    head = logical.take(model)["head.weight"]
    return logical.put(model, {"head.weight": 1000 * head})


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, *jax.device_get((a, b))))


def names_adapted(model):
    tables = logical.names(model)
    found = set()
    for leaf, mask in adaptation.adapted(model).items():
        rows = np.broadcast_to(mask.reshape(mask.shape[: tables[leaf].ndim]), tables[leaf].shape)
        found |= {str(name) for name in tables[leaf][rows]}
    return found


@pytest.mark.parametrize("name", ["efficientvit_b0", "mobilenetv4_conv_small"])
def test_batch_norms_are_not_adapted(name):
    with pytest.raises(ValueError, match="sar: .* has no layer norm inside its blocks, and SAR adapts nothing else"):
        adaptation.adapted(zoo.abstract(name))


def test_norms_of_the_first_three_quarters_are_adapted():
    expected = {f"blocks.{i}.norm{n}.{part}" for i in range(9) for n in (1, 2) for part in ("scale", "bias")}
    assert names_adapted(zoo.abstract("vit_ti16")) == expected


@pytest.mark.parametrize(("depth", "last"), [(1, 0), (3, 2), (4, 2), (24, 17)])
def test_the_last_quarter_is_left_at_any_depth(depth, last):
    found = names_adapted(zoo.abstract("vit_ti16", depth=depth))
    assert {int(name.split(".")[1]) for name in found} == set(range(last + 1))


def test_equivariant_norms_are_adapted_too():
    found = names_adapted(zoo.abstract("octic_vit_ti16", depth=8, family="H8"))
    parts = {0: ("A1", "A2", "B1", "B2", "E", "bias"), 5: ("scale", "bias")}
    for block, expected in parts.items():
        assert {name for name in found if name.startswith(f"blocks.{block}.norm1")} == {
            f"blocks.{block}.norm1.{part}" for part in expected
        }
    assert not any(name.startswith(("blocks.6", "norm")) for name in found)


def test_a_step_moves_what_is_adapted_and_nothing_else(model, images):
    start = adaptation.start(model)
    state, logits, info = step(settings(), model, start, images)
    np.testing.assert_allclose(logits, model(images), atol=1e-5)  # from before the step
    assert info["kept"].all() and not info["reset"]
    np.testing.assert_allclose(state.entropy, info["entropy"].mean(), atol=0.05)  # a little up the slope
    for leaf, mask in adaptation.adapted(model).items():
        moved = state.parameters[leaf] != start.parameters[leaf]
        assert not (moved & ~mask).any(), leaf
        assert (moved | ~mask).mean() > 0.9, leaf


def test_steps_lower_the_entropy(model, images):
    state, entropies = adaptation.start(model), []
    for _ in range(8):
        state, _, info = step(settings(), model, state, images)
        entropies.append(float(info["entropy"].mean()))
    assert entropies[-1] < 0.8 * entropies[0]


def test_the_sharper_point_counts(model, images):
    near, far = (step(settings(rho=rho), model, adaptation.start(model), images)[0].parameters for rho in (0.0, 0.5))
    assert not equal(near, far)


def test_a_batch_that_keeps_nothing_changes_nothing(model, images):
    state, *_ = step(settings(), model, adaptation.start(model), images)
    after, _, info = step(settings(margin=NONE), model, state, images)
    assert not info["kept"].any() and equal(after, state)
    official = Sar(lr=0.5, margin=NONE, official=True)
    after, *_ = step(official, model, state, images)
    assert not equal(after.parameters, state.parameters)  # by momentum alone, as the public code
    assert equal(after.velocity, jax.tree.map(lambda v: 0.9 * v, state.velocity)) and after.entropy == state.entropy


def test_a_reset_forgets_everything(model, images):
    state, *_ = step(settings(), model, adaptation.start(model), images)
    collapsed = confident(model)
    after, _, info = step(Sar(lr=0.5), collapsed, state._replace(entropy=jnp.float32(jnp.nan)), images)
    assert info["reset"] and equal(after.parameters, adaptation.start(collapsed).parameters)
    assert jnp.isnan(after.entropy) and all(not v.any() for v in after.velocity.values())
    official = Sar(lr=0.5, official=True)
    after, _, info = step(official, collapsed, state._replace(entropy=jnp.float32(jnp.nan)), images)
    assert info["reset"] and equal(after.parameters, adaptation.start(collapsed).parameters)
    assert after.entropy < 0.2 and any(v.any() for v in after.velocity.values())  # the public code keeps both


def test_the_threshold_of_the_reset_counts(model, images):
    _, _, info = step(settings(reset_below=100.0), model, adaptation.start(model), images)
    assert info["reset"]


def test_padding_adapts_nothing(model, images):
    weight = (1.0,) * 5 + (0.0,) * 3
    results = [
        step(settings(), model, adaptation.start(model), images.at[5:].set(noise), weight)[0] for noise in (0.0, 3.0)
    ]
    assert equal(*results)


def test_the_defaults_of_a_config_are_the_authors():
    assert get_base().evaluation.sar.to_dict() == dataclasses.asdict(Sar()) | {"batch_size": 64}


def test_the_learning_rate_follows_the_batch():
    assert [Sar(lr=0.001).rate(size) for size in (64, 16, 1)] == [0.001, 0.00025, 2 * 0.001 / 64]


def test_an_adapted_invariant_model_is_still_invariant():
    model = random_model("D8", depth=2)
    images = jax.random.normal(jax.random.key(1), (4, 16, 16, 1))
    state, *_ = step(settings(), model, adaptation.start(model), images, (1.0,) * 4)
    adapted = logical.put(model, state.parameters)
    assert not equal(state.parameters, adaptation.start(model).parameters)
    turned = jnp.concatenate([fields.act_on_image(g, images) for g in OCTIC.elements])
    logits = jax.jit(lambda model, x: model(x))(adapted, turned).reshape(8, 4, -1)
    np.testing.assert_allclose(logits, jnp.broadcast_to(logits[0], logits.shape), atol=1e-4)


STREAM = dict(mean=(0.3,), std=(0.3,))


@pytest.fixture(scope="module")
def stream():
    rng = np.random.default_rng(0)
    return batches(rng.integers(0, 256, (21, 12, 20, 1)), rng.integers(0, 10, 21), size=8)


def test_the_protocol_compares_with_the_model_as_it_was(model, stream):
    still = adaptation.adaptation(model, stream, settings=settings(lr=0.0), **STREAM)
    before = classification.accuracy(predictor(model, **STREAM), stream)
    assert still["examples"] == 21 and still["kept"] == 1.0 and still["resets"] == 0
    for name in ("top1", "top5"):
        assert still[name] == still[f"unadapted_{name}"] == before[name]
    collapsing = adaptation.adaptation(model, stream, settings=settings(lr=5000.0), **STREAM)
    assert collapsing["unadapted_top5"] == before["top5"] and collapsing["top5"] != before["top5"]


def test_the_protocol_on_a_mesh_equals_one_device(model, stream):
    alone = adaptation.adaptation(model, stream, settings=settings(), **STREAM)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert adaptation.adaptation(model, stream, settings=settings(), **STREAM) == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1.5}, r"momentum=1.5 must be in \[0, 1\]"),
        ({"official": True, "reset_below": 0.3}, "the public code always uses 0.2"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Sar(**changes)


def test_float16_is_refused_as_its_gradients_would_vanish(model, images):
    with pytest.raises(ValueError, match="precision='float16' would lose its gradients, .* --config.precision=mixed"):
        adaptation.step(Sar(), model, adaptation.start(model), images, precision="float16")


def test_a_model_without_norms_is_refused():
    with pytest.raises(ValueError, match="Linear has no layer norm inside its blocks"):
        adaptation.adapted(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
