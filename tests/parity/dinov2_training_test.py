"""DINOv2's training around its losses, against the official code: schedules, masks, subsets of images."""

import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from equivit import logical
from equivit.data.masking import block_mask
from equivit.layers.stochastic_depth import on_subset
from equivit.models import zoo
from equivit.objectives.clock import Clock
from equivit.objectives.dinov2 import DinoV2
from equivit.objectives.supervised import Supervised
from equivit.training.config import get_base
from equivit.training.optimizers import layer_factor
from equivit.training.schedules import warmup_cosine
from tests.parity.arrays import FIXTURES, Comparison, load
from tests.training import tiny
from tests.training.optimizers_test import make, parity_case, some_decay, unstacked

LOSSES = FIXTURES / "losses"


def test_schedules(record_property):
    data = load(LOSSES / "schedules.npz")
    epoch = int(data["input/epoch_len"])
    total, warmup = (int(data[f"input/{name}"]) * epoch for name in ("epochs", "warmup_epochs"))
    risen = int(data["input/temp_warmup_epochs"]) * epoch
    rate = float(data["input/base_lr"]) * np.sqrt(data["input/global_batch"] / 1024)
    steps = jnp.arange(len(data["output/lr"]))
    comparison = Comparison(data)
    lr = warmup_cosine(rate, 1e-6, total=total, warmup=warmup)(steps)
    comparison.array("output/lr", lr)
    comparison.array("output/last_layer_lr", jnp.where(steps < data["input/freeze_last_epochs"] * epoch, 0, lr))
    comparison.array("output/wd", warmup_cosine(0.04, 0.4, total=total)(steps))
    comparison.array("output/momentum", warmup_cosine(0.992, 1.0, total=total)(steps))
    comparison.array("output/teacher_temp", warmup_cosine(0.07, 0.07, total=risen, warmup=risen, start=0.04)(steps))
    comparison.finish(record_property, "dinov2 training")


def test_block_masks():
    data = load(LOSSES / "masks_pyrandom.npz")
    for seed, target, expected in zip(*data.values(), strict=True):
        rng = random.Random(int(seed))
        assert int(256 * rng.uniform(0.1, 0.5)) == target
        np.testing.assert_array_equal(block_mask(rng, (16, 16), int(target), max_patches=128), expected)


def test_subset(record_property):
    data = load(LOSSES / "drop_path_subset.npz")
    kept = data["input/kept_indices"].astype(int)
    comparison = Comparison(data)
    ours = jax.jit(lambda x: on_subset(lambda x: jnp.tanh(x) * data["input/layerscale"], x, kept))(data["input/x"])
    comparison.array("output/y", ours)
    comparison.finish(record_property, "dinov2 training")
    assert np.abs(ours - data["input/x"])[np.setdiff1d(np.arange(10), kept)].max() == 0


def test_average_of_the_weights(record_property):
    data = load(LOSSES / "ema.npz")
    goal = Supervised(tiny.config(objective=dict(ema=float(data["input/m"]))))
    student, teacher = ({"w": jnp.asarray(data[f"input/{name}"])} for name in ("student", "teacher"))
    comparison = Comparison(data)
    comparison.array(
        "output/teacher", goal.after_step(student, {"ema": teacher}, Clock(jnp.int32(0), 1, 1))["ema"]["w"]
    )
    comparison.finish(record_property, "dinov2 training")


def test_adamw_on_a_problem_of_its_own(record_property):
    """Gradients of mean((A p0 + p1 - y)^2) at each step's parameters; `optimizers_test` has those that are given."""
    data, params, _ = parity_case("adamw.npz")
    params = {name: params[name] for name in ("p0", "p1")}
    optimizer = make(unstacked(params, some_decay), params, name="adamw", lr=3e-3, weight_decay=0.4, clip=None)

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda p: jnp.square(data["input/lin_A"] @ p["p0"] + p["p1"] - data["input/lin_y"]).mean())
        updates, state = optimizer.update(gradients(params), state, params)
        return optax.apply_updates(params, updates), state

    state, history = optimizer.init(params), []
    for _ in range(5):
        params, state = step(params, state)
        history.append(params)
    stored = {key: data[key] for key in data.files if "linear" in key}
    comparison = Comparison(stored)
    for name in params:
        comparison.array(f"output/wd0p4_linear_{name}", np.stack([p[name] for p in history]))
    comparison.finish(record_property, "dinov2 training")


# Official names, as patterns, and ours.  Of the positions the class token's is a parameter of its own here.
NAMES = {
    r"(cls_token|register_tokens|mask_token)": lambda name: {
        "cls_token": "prefix.class_token", "register_tokens": "prefix.registers", "mask_token": "mask_token",
    }[name],
    r"pos_embed": lambda: "position.table",
    r"patch_embed\.proj\.(weight|bias)": lambda part: f"patch_embed.{dict(weight='kernel').get(part, part)}",
    r"blocks\.(?:\d+\.)?(\d+)\.norm(\d)\.(\w+)": lambda i, k, part: f"blocks.{i}.norm{k}.{NORM[part]}",
    r"blocks\.(?:\d+\.)?(\d+)\.attn\.(\w+)\.(\w+)": lambda i, layer, part: f"blocks.{i}.attention.{layer}.{part}",
    r"blocks\.(?:\d+\.)?(\d+)\.mlp\.(\w+)\.(\w+)": lambda i, layer, part: f"blocks.{i}.mlp.{layer}.{part}",
    r"blocks\.(?:\d+\.)?(\d+)\.ls(\d)\.gamma": lambda i, k: f"blocks.{i}.scale{k}.scale",
    r"norm\.(\w+)": lambda part: f"readout.norm.{NORM[part]}",
    r"mlp\.(\d)\.(\w+)": lambda k, part: f"mlp.fc{int(k) // 2 + 1}.{part}",
    r"last_layer\.weight_(\w)": lambda part: dict(g="gains", v="directions")[part],
}  # fmt: skip
NORM = dict(weight="scale", bias="bias")


def ours(name: str) -> str:
    for pattern, translated in NAMES.items():
        if match := re.fullmatch(pattern, name):
            return translated(*match.groups())
    raise KeyError(name)


def test_rules_of_parameters(record_property):
    """Factors of rate and decay, and when the prototypes begin, of the official run."""
    config = get_base("dinov2")
    config.model = dict(name="dinov2_vit_s16", width=16, num_heads=2, registers=4, image_size=(32, 32))
    config.model.update(num_classes=None)
    config.objective.update(decay="by_name", prototypes=8, hidden=8, bottleneck=8)
    objective = DinoV2(config)
    module = jax.eval_shape(
        lambda: objective.module(zoo.configuration(**config.model).build(nnx.Rngs(0)), jax.random.key(0))
    )
    tensors = {t.name: t for table in logical.tensors(module).values() for t in table.flat}
    largest = 0.0
    for group, expected in json.loads((LOSSES / "param_groups.json").read_text()).items():
        part = "dino_head" if group == "dino_head" else "backbone"
        for name, wanted in expected.items():
            tensor = tensors[f"{part}.{ours(name)}"]
            rule = objective.rule(tensor)
            gap = abs(rule.lr * layer_factor(tensor, 0.9) - wanted["lr_multiplier"])
            largest = max(largest, gap)
            assert gap < 1e-12 and rule.decay == bool(wanted["wd_multiplier"]), name
            assert rule.starts == (1250 if wanted["is_last_layer"] else 0), name
    record_property("parity", ("dinov2 training", largest))
