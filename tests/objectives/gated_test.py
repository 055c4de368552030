"""Training gates: two steps of a run, the exported model, segmentation, and refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.depthwise import gates
from equivit.models import zoo
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Rule
from equivit.objectives.registry import OBJECTIVES
from equivit.training import build, freezing, sharding
from equivit.training.config import get_base, validate
from tests.depthwise import attending
from tests.training import tiny
from tests.training.state_test import mesh_of

MODEL = attending.SMALL | dict(name="vit_b16", num_classes=4, in_channels=3)


def config_of(objective="gated_supervised", model=None, **options):
    config = get_base(objective)
    config.model = {**MODEL, **(model or {})}
    config.data.update(image_size=(12, 20), mean=(0.5,), std=(0.5,))
    config.objective.update({"gates": 2, **options})
    config.optimizer.update(name="adamw")
    config.schedule.update(name="constant", lr=1e-3)
    config.batch_size, config.steps = 4, 4
    return config


def batch(t=0):
    rng = np.random.default_rng(t)
    return {"image": rng.integers(0, 256, (4, 12, 20, 3), np.uint8), "label": rng.integers(0, 4, 4).astype(np.int32)}


@pytest.mark.slow
def test_two_steps_of_a_run():
    """Weights, taps and all of the model are trained; the gates follow the weights with new noise."""
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        run = build.make_program(config_of(by_head=True), mesh, total=4, per_epoch=4)
        states = [run.init({})]
        before, gates = jax.device_get(states[0]), []
        for t in range(2):
            state, metrics = run.step(states.pop(), sharding.to_global(mesh, batch(t)))
            gates.append(np.asarray(state.statistics["model.blocks.runs.0.attention.gate"]))
            states.append(state)
    assert metrics["good"] and metrics["temperature"] == pytest.approx(1e-3 ** (1 / 120))
    for name, array in before.trainable.items():
        moved = np.abs(state.trainable[name] - array).max()
        # Adam's first two steps: the gates' rate is 10 times the others'.
        assert (5e-3 if name == "gates" else 1e-5) < moved < (3e-2 if name == "gates" else 3e-3), name
    for one in gates:
        np.testing.assert_allclose(one.sum(), 2, rtol=1e-5)
    assert np.abs(gates[1] - gates[0]).max() > 1e-3
    chosen = run.exported(state).config.replaced
    largest = np.argsort(-np.asarray(state.trainable["gates"]).ravel())[:2]
    assert {(one.block, h) for one in chosen for h in one.heads or (0, 1)} == {divmod(int(i), 2) for i in largest}


@pytest.mark.parametrize(
    ("step", "cooling", "exponent"), [(0, 30.0, 0), (60, 30.0, 0.5), (120, 30.0, 1), (500, 30.0, 1), (500, None, 0.5)]
)
def test_the_temperature_falls_within_epochs_or_the_whole_run(step, cooling, exponent):
    objective = OBJECTIVES["gated_supervised"](config_of(cooling=cooling))
    found = objective.temperature(Clock(jnp.asarray(step), total=1000, per_epoch=4))
    np.testing.assert_allclose(found, 1e-3**exponent, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [dict(), dict(by_head=True, kind="conv", gates=3), dict(kind="spvit", gates=1)], ids=str
)
def test_the_exported_model_is_the_gated_one_with_hard_gates(options):
    objective = OBJECTIVES["gated_supervised"](config_of(**options))
    module = objective.module(attending.model(**MODEL), jax.random.key(0))
    assert module.gates[...].min() >= 0 and module.gates[...].max() < 1
    weights = np.random.default_rng(0).normal(size=module.gates.shape).astype(np.float32)
    module = logical.put(module, {"gates": weights})
    exported = objective.exported(module, {})
    hard = gates.hard_top_k(weights.ravel(), objective.options.gates).reshape(weights.shape)
    gates.set_gates(module.model, jnp.broadcast_to(hard, (3, 2)))
    x = attending.images(2)
    logits = [np.asarray(forward(model, x)) for model in (module.model, exported, attending.model(**MODEL))]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5 * np.abs(logits[0]).max())
    assert np.abs(logits[2] - logits[1]).max() > 1e-3
    number = {"dw": 4, "conv": 3, "spvit": 2}[objective.options.kind]
    assert sum(len(one.heads or (0, 1)) for one in exported.config.replaced) == number


forward = jax.jit(lambda model, x: model(x))


def test_segmentation_has_gates_in_its_backbone():
    config = config_of("gated_segmentation", decoder="linear", auxiliary=0.0, frozen=True)
    model = tiny.exported_model(config)
    assert [one.block for one in model.backbone.config.replaced] == [0, 1] and model.config.num_classes == 4
    objective = OBJECTIVES["gated_segmentation"](config)
    module = jax.eval_shape(lambda: objective.module(zoo.create(**MODEL), jax.random.key(0)))
    rules = {t.name: objective.rule(t) for table in logical.tensors(module).values() for t in table.flat}
    assert rules["gates"] == Rule(lr=10, decay=False, clip="gates")
    assert all(rule.frozen == name.startswith("model.backbone.") for name, rule in rules.items())


def test_gates_in_a_frozen_backbone_are_refused_and_the_advice_trains_them():
    options, freeze = dict(decoder="linear", auxiliary=0.0), ("model.backbone.*", "!*.attention.taps")
    config = config_of("gated_segmentation", frozen=True, **options)
    advice = re.escape(f"frozen=False, and freeze the rest by optimizer.freeze={','.join(freeze)}")
    with pytest.raises(ValueError, match=advice):
        OBJECTIVES["gated_segmentation"](config).check_model(zoo.configuration(**config.model), {})
    config = config_of("gated_segmentation", **options)
    config.optimizer.freeze = freeze
    objective = OBJECTIVES["gated_segmentation"](config)
    objective.check_model(zoo.configuration(**config.model), {})
    tables = logical.tensors(jax.eval_shape(lambda: objective.module(zoo.create(**MODEL), jax.random.key(0))))
    rule = freezing.rule(objective, tables)
    trained = {t.name for table in tables.values() for t in table.flat if not rule(t).frozen}
    inside = {name for name in trained if name.startswith("model.backbone.")}
    assert inside == {f"model.backbone.blocks.{i}.attention.taps" for i in range(3)} and "gates" in trained


def test_a_run_begins_with_the_decoder_that_it_is_given():
    config, mesh = config_of("gated_segmentation", decoder="linear", auxiliary=0.0), mesh_of(1, 1)
    model = tiny.exported_model(config)
    given = {leaf: a for leaf, a in logical.take(model, nnx.Variable).items() if not leaf.startswith("backbone.")}
    given = {leaf: np.full(a.shape, 7, np.float32) for leaf, a in given.items()}
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=4, per_epoch=4)
        state = run.init(given)
    assert given and all((state.arrays[f"model.{leaf}"] == 7).all() for leaf in given)


@pytest.mark.parametrize(
    ("model", "objective", "message"),
    [
        ({}, dict(gates=4), "gates=4 must be at most 3"),
        ({}, dict(gates=7, by_head=True), "gates=7 must be at most 6"),
        ({}, dict(by_head=True, kind="spvit"), "by_head=True: the kind 'spvit' merges all heads"),
        ({}, dict(kernel_size=4), "kernel_size=4 must be odd"),
        (dict(class_token=True), {}, "patch tokens alone; use one with class_token=False"),
        (
            {},
            dict(token_drop=(0.5, 0.0)),
            r"token_drop=\(0.5, 0.0\): .*name='gated_supervised' need .*set token_drop=None",
        ),
        (dict(replaced=((1, "dw"),)), {}, r"set model.replaced=\(\)"),
    ],
)
def test_what_does_not_go_together_is_refused(model, objective, message):
    config = config_of(model=model, **objective)
    with pytest.raises(ValueError, match=message):
        OBJECTIVES["gated_supervised"](config).check_model(zoo.configuration(**config.model), {})


def test_an_impossible_value_is_refused():
    with pytest.raises(ValueError, match="objective.kind='ens_dw' is not one of"):
        validate(config_of(kind="ens_dw"))
