"""DINOv2: devices, micro-batches and resumed runs; what crosses devices; rules; each collapse; what is refused."""

import functools
import itertools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.data import batches, masking
from equivit.models import saved, zoo
from equivit.objectives.clock import Clock
from equivit.objectives.dinov2 import DinoV2
from equivit.objectives.objective import Step
from equivit.objectives.registry import OBJECTIVES
from equivit.training import build, loop, sharding
from equivit.training.checkpoints import Checkpoints
from equivit.training.config import get_base, validate
from tests.training.state_test import mesh_of

SMALL = dict(name="dinov2_vit_s16", width=32, depth=2, num_heads=2, patch_size=4, num_classes=None)
OCTIC = dict(SMALL, name="octic_dinov2_vit_s16", family="I8")
IMAGES, GRID, GROUPS = 16, (4, 6), 8


def config_of(model=SMALL, optimizer=None, **objective):
    config = get_base("dinov2")
    dropped = dict(drop_path=0.5, drop_path_groups=GROUPS)
    config.model = {**dict(image_size=(16, 24), in_channels=3, layer_scale=0.1), **dropped, **model}
    config.data.update(image_size=(16, 24), mean=(0.5,), std=(0.5,))
    config.data.views.update(locals=2, local_size=(8, 8))
    sizes = dict(prototypes=16, hidden=16, bottleneck=8, groups=GROUPS, prototypes_start=2, temperature_steps=3)
    config.objective.update({**sizes, **objective})
    config.optimizer.update(dict(name="adamw", weight_decay=0.04, weight_decay_end=0.4, clip=0.3) | (optimizer or {}))
    config.schedule.update(name="constant", lr=1e-2)
    config.batch_size, config.steps = IMAGES, 4
    return config


def batch(t=0, parts=1):
    rng = np.random.default_rng(t)
    sizes = {"global_crops": (2, 16, 24, 3), "local_crops": (2, 8, 8, 3)}
    crops = {name: rng.integers(0, 256, (IMAGES, *size), np.uint8) for name, size in sizes.items()}
    transform = DinoV2.transform_of(config_of(optimizer=dict(accumulation=parts)))(config_of().data, 3)
    return transform.finish(crops, rng, batches.Share(IMAGES))


@functools.cache
def compiled(devices):
    config, mesh = config_of(targets="centering"), mesh_of(devices, 1)
    with jax.set_mesh(mesh):
        return build.make_program(config, mesh, total=4, per_epoch=2), mesh


def run(devices, steps, start=None):
    """The state and the metrics after some steps."""
    compiled_, mesh = compiled(devices)
    with jax.set_mesh(mesh):
        state, metrics = compiled_.init({}) if start is None else start, None
        for t in range(int(state.step), steps):
            state, metrics = compiled_.step(state, sharding.to_global(mesh, batch(t)))
    return jax.device_get(state), jax.device_get(metrics)


@pytest.mark.slow
def test_eight_devices_equal_one():
    """Adam's first steps divide small gradients by their own size, which enlarges what rounding leaves."""
    (one, metrics), (eight, others) = (run(devices, 2) for devices in (1, 8))
    assert metrics["good"] and {"global", "local", "koleo", "ibot", "classes/rows", "patches/fullest"} <= metrics.keys()
    chex.assert_trees_all_close(others, metrics, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(eight.extra, one.extra, atol=1e-3)


@pytest.mark.slow
def test_no_token_crosses_devices():
    """With a group on each device, all that they exchange are sums: gradients, counts and losses."""
    compiled_, mesh = compiled(8)
    where = jax.sharding.NamedSharding(mesh, sharding.batch(mesh))
    shapes = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for k, a in batch().items()}
    with jax.set_mesh(mesh):
        text = compiled_.lower(shapes).compile().as_text()
    assert "all-reduce" in text
    crossing = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert not crossing


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Bit for bit, with the teacher and the centres."""
    whole, _ = run(1, 4)
    half, _ = run(1, 2)
    compiled_, mesh = compiled(1)
    with jax.set_mesh(mesh), Checkpoints(tmp_path, config_of().checkpoint) as manager:
        manager.save(half)
        manager.wait()
        state = manager.restore(compiled_.abstract)
    chex.assert_trees_all_equal(run(1, 4, start=state)[0], whole)


def test_prototypes_begin_later_and_the_teacher_follows():
    first, second, last = (run(1, steps)[0] for steps in (1, 2, 4))
    moved = {k: (last.trainable[k] != second.trainable[k]).any() for k in last.trainable}
    assert all(moved.values())
    still = [k for k in first.trainable if (first.trainable[k] == second.trainable[k]).all()]
    assert sorted(still) == ["dino_head.directions", "dino_head.gains"]
    assert (
        first.optimizer["adam"].mu["dino_head.directions"] != second.optimizer["adam"].mu["dino_head.directions"]
    ).any()
    momentum = 1 + (0.992 - 1) * np.cos(np.pi / 2 / 4) ** 2
    expected = {k: momentum * first.extra["teacher"][k] + (1 - momentum) * a for k, a in second.trainable.items()}
    chex.assert_trees_all_close(second.extra["teacher"], expected, rtol=1e-5, atol=1e-7)


def test_what_is_exported():
    compiled_, _ = compiled(1)
    state = run(1, 2)[0]
    module = logical.put(compiled_.module, state.arrays)
    for weights, arrays in ((None, state.extra["teacher"]), ("student", state.trainable)):
        exported = logical.take(compiled_.objective.exported(module, state.extra, weights))
        chex.assert_trees_all_equal(exported, {k: arrays[f"backbone.{k}"] for k in exported})


@pytest.mark.slow
def test_a_run_keeps_its_teachers(tmp_path):
    """Each as a saved model, with what it was at that step."""
    config = config_of(targets="centering")
    config.checkpoint.teacher_every_steps, config.log.to = 2, ()

    class Pipeline:
        steps_per_epoch = 2

        def batches(self, start=0):
            return (batch(t) for t in itertools.count(start))

    options = dict(pipeline=Pipeline(), evaluate=lambda model, config: {})
    loop.train(config, workdir=tmp_path, make_program=lambda *_, **__: compiled(8)[0], **options)
    assert sorted(path.name for path in (tmp_path / "teachers").iterdir()) == ["2", "4"]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    schedules = {"lr": 1e-2, "weight_decay": 0.4 - 0.36 * np.cos(np.pi / 2 * 3 / 4) ** 2}  # at the last of four steps
    assert {name: last[name] for name in schedules} == pytest.approx(schedules)
    assert {"temperature", "momentum", "spread"} <= last.keys()
    for steps in (2, 4):
        kept = logical.take(saved.load(tmp_path / "teachers" / str(steps)))
        teacher = run(8, steps)[0].extra["teacher"]
        chex.assert_trees_all_equal(jax.device_get(kept), {k: teacher[f"backbone.{k}"] for k in kept})


def test_local_crops_may_be_none():
    """Left out, as `data.views.locals=0` does, or none of them."""
    config, losses = config_of(), []
    objective = OBJECTIVES["dinov2"](config)

    def loss(crops):
        module = objective.module(zoo.configuration(**config.model).build(nnx.Rngs(0)), jax.random.key(0))
        extra = objective.extra(logical.take(module))
        step = Step(jax.random.key(1), Clock(jnp.int32(0), 4, 2), None, extra, {})
        return objective.loss(module, objective.prepare(module, crops, jax.random.key(2)), step).metrics

    without = {name: array for name, array in batch().items() if name != "local_crops"}
    for crops in (without, {**without, "local_crops": np.zeros((IMAGES, 0, 8, 8, 3), np.uint8)}):
        losses.append(jax.eval_shape(loss, crops))
    assert losses[0] == losses[1] and "local" in losses[0]


def test_micro_batches_have_their_part_of_every_group():
    """Masked patches of each fit into its buffer, and a group's crops are masked alike in all of them."""
    masks = batch(parts=2)["masks"].reshape(GROUPS, -1, 2, 2, 24)  # a micro-batch takes every second image
    number = masks.transpose(0, 2, 1, 3, 4).reshape(GROUPS, 2, -1).sum(-1)
    assert (number <= masking.capacity(2, GRID, 0.5, (0.1, 0.5))).all() and (number > 0).all()
    assert (masks.any(-1).sum((1, 3)) == 1).all()  # half of the two crops


def test_processes_draw_the_same_masks():
    """Each only those of its own rows, which may begin within a group."""
    transform = DinoV2.transform_of(config_of(groups=2, model=SMALL | dict(drop_path_groups=2)))(config_of().data, 3)
    whole = transform.finish({}, np.random.default_rng(3), batches.Share(IMAGES))["masks"]
    parts = [transform.finish({}, np.random.default_rng(3), batches.Share(IMAGES, i, 4))["masks"] for i in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def rules(model=SMALL, **objective):
    config = config_of(model, **objective)
    objective = OBJECTIVES["dinov2"](config)
    module = jax.eval_shape(
        lambda: objective.module(zoo.configuration(**config.model).build(nnx.Rngs(0)), jax.random.key(0))
    )
    return {t.name: objective.rule(t) for table in logical.tensors(module).values() for t in table.flat}


def test_rules_of_parts():
    found = rules(shared_head=False)
    assert {rule.clip for rule in found.values()} == {"backbone", "dino_head", "ibot_head"}
    assert found["backbone.patch_embed.kernel"].lr == 0.2 and found["backbone.blocks.0.mlp.fc1.weight"].lr == 1
    assert {name for name, rule in found.items() if rule.starts} == {
        f"{head}.{part}" for head in ("dino_head", "ibot_head") for part in ("directions", "gains")
    }
    assert not any(rule.frozen for rule in found.values())
    assert [name for name, rule in rules(fixed_gains=True).items() if rule.frozen] == ["dino_head.gains"]


def test_what_decays_by_name():
    """The public code spares what it calls bias, norm or gamma; octic layer scales it calls alpha."""
    by_name, intended = rules(decay="by_name"), rules()
    more = {name for name in by_name if by_name[name].decay and not intended[name].decay}
    assert more == {"backbone.mask_token", "backbone.position.table", "dino_head.gains"} | {
        f"backbone.prefix.class_{part}" for part in ("token", "position")
    }
    octic = rules(OCTIC, decay="by_name")
    assert octic["backbone.blocks.0.scale1.E"].decay and not octic["backbone.blocks.1.scale1.scale"].decay
    assert not octic["backbone.blocks.0.norm1.E"].decay


def remarks(**metrics):
    healthy = {f"{part}/{name}": 0.8 for part in ("classes", "patches") for name in ("rows", "mean")}
    healthy |= {f"{part}/fullest": 0.1 for part in ("classes", "patches")}
    return OBJECTIVES["dinov2"](config_of()).remarks({**healthy, **metrics})


@pytest.mark.parametrize("collapse", ["uniform collapse", "collapse onto one prototype"])
def test_each_collapse_is_named(collapse):
    """Forced: a high temperature makes every row uniform; logits far from their centre all have the same leader."""
    assert not remarks()
    compiled_, mesh = compiled(1)
    with jax.set_mesh(mesh):
        state = compiled_.init({})
        head = dict(state.extra["teacher"])
        if collapse == "uniform collapse":  # all prototypes alike
            head["dino_head.directions"] = jnp.ones_like(head["dino_head.directions"])
        else:
            head["dino_head.gains"] = jnp.zeros_like(head["dino_head.gains"])
            centers = tuple(jnp.zeros(16).at[3].set(-1.0) for _ in range(2))
            state = state._replace(extra={**state.extra, "centers": centers})
        state = state._replace(extra={**state.extra, "teacher": head})
        _, metrics = compiled_.step(state, sharding.to_global(mesh, batch()))
    said = compiled_.objective.remarks({name: float(value) for name, value in metrics.items()})
    assert len(said) == 2 and all(remark.startswith(collapse) for remark in said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(groups=3), "objective.groups=3 does not split a micro-batch of 16 images .* nearest are 15 and 18"),
        (dict(groups=16), "of 16 images into equal groups of two or more; of config.batch_size the nearest are 32"),
        (dict(mask_ratio=(0.5, 0.1)), r"must be \(smallest, largest\), as \(0.1, 0.5\)"),
        (dict(prototypes=1), "objective.prototypes=1 must be a whole number, two or more; the nearest is 2"),
        (dict(model=SMALL | dict(num_classes=10)), "model.num_classes=10: .*'dinov2' has no head to train"),
    ],
)
def test_what_a_config_cannot_say(change, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(**change))


@pytest.mark.parametrize(
    ("model", "local", "message"),
    [
        (SMALL | dict(mask_token=False), (8, 8), "config.model.mask_token=False: DINOv2 trains it"),
        (SMALL | dict(class_token=False), (8, 8), "config.model.class_token=False: DINOv2 trains it"),
        (SMALL, (8, 9), "config.data.views.local_size.*9"),
    ],
)
def test_models_that_do_not_fit_are_refused(model, local, message):
    config = config_of(model)
    config.data.views.local_size = local
    config.model.drop_path_groups = None
    with pytest.raises(ValueError, match=message):
        OBJECTIVES["dinov2"](config).check_model(zoo.configuration(**config.model), {})


def test_other_groups_of_the_model_are_refused():
    config = config_of(groups=4)
    with pytest.raises(ValueError, match="model.drop_path_groups=8 must equal objective.groups=4"):
        OBJECTIVES["dinov2"](config).check_model(zoo.configuration(**config.model), {})
