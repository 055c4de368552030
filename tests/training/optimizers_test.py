"""LAMB and AdamW against arrays from apex's rules (timm's Lamb) and torch's AdamW, and the rules on logical tensors."""

import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical
from equivit.layers.stack import Stack
from equivit.logical import Tensor
from equivit.objectives.objective import Rule
from equivit.training import optimizers, schedules
from equivit.training.config import get_base

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "losses"
# Five steps in float32: six roundings of 6e-8.  Entries near 0 are judged by the largest of their tensor.
TOLERANCE = 4e-7


class Problem(NamedTuple):
    """The parts of an objective and its module that an optimiser uses."""

    tables: dict[str, np.ndarray]
    rule: Callable[[Tensor], Rule]


def tensor(name, shape, layers=(), last=0):
    return Tensor(name, tuple(shape), decay=True, product=False, norm=False, layers=layers, last=last)


def stacked(names, params, rule):
    """Leaves whose leading axes are stacks; `names` are those of the logical tensors."""
    tables = {}
    for leaf, table in names.items():
        tables[leaf] = np.empty(table.shape, object)
        for i in np.ndindex(table.shape):
            tables[leaf][i] = tensor(str(table[i]), params[leaf].shape[table.ndim :])
    return Problem(tables, rule)


def unstacked(params, rule):
    return stacked({name: np.asarray(name) for name in params}, params, rule)


def make(problem, params, lr=0.01, total=10, **options):
    config = get_base().optimizer
    with config.unlocked():
        config.update(options)
    weight_decay = schedules.weight_decay(config, total_steps=total)
    return optimizers.create(config, problem.rule, problem.tables, params, lambda step: jnp.float32(lr), weight_decay)


def run(optimizer, params, gradients):
    """The parameters after each step."""
    state, history = jax.jit(optimizer.init)(params), []
    update, apply = jax.jit(lambda g, s, p: optimizer.update(g, s, p)), jax.jit(optax.apply_updates)
    for g in gradients:
        updates, state = update(g, state, params)
        params = apply(params, updates)
        history.append(jax.device_get(params))
    return history


def parity_case(file):
    data = np.load(FIXTURES / file)
    params = {f"p{i}": data[f"input/p{i}"] for i in range(4)}
    gradients = [{f"p{i}": data[f"input/g{i}"][t] for i in range(4)} for t in range(5)]
    return data, params, gradients


def some_decay(tensor):
    return Rule(decay=tensor.name in ("p0", "p3"))


def all_decay(tensor):
    return Rule()


@pytest.mark.parametrize(
    ("file", "case", "rule", "options"),
    [
        ("lamb.npz", "deit3", some_decay, dict(name="lamb", lr=3e-2, weight_decay=0.05, clip=1.0)),
        ("lamb.npz", "noclip", some_decay, dict(name="lamb", lr=1e-2, weight_decay=0.05, eps=1e-6, clip=None)),
        ("lamb.npz", "default", all_decay, dict(name="lamb", lr=1e-2, weight_decay=0.01, eps=1e-6, clip=1.0)),
        ("adamw.npz", "default", all_decay, dict(name="adamw", lr=1e-2, weight_decay=0.01, clip=None)),
        ("adamw.npz", "wd0p4", some_decay, dict(name="adamw", lr=3e-3, weight_decay=0.4, clip=None)),
        (
            "adamw.npz",
            "b2_95",
            some_decay,
            dict(name="adamw", lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6, clip=None),
        ),
    ],
)
def test_parity(file, case, rule, options):
    data, params, gradients = parity_case(file)
    history = run(make(unstacked(params, rule), params, **options), params, gradients)
    for name in params:
        expected = data[f"output/{case}_{name}"]
        ours = np.stack([step[name] for step in history])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("name", ["lamb", "lars", "lars_optax", "adamw", "sgd"])
def test_a_stack_is_optimised_as_its_tensors(name):
    """Three steps on stacked leaves [block, irrep, ...] equal those on the separate tensors, every rule included."""
    rng = np.random.default_rng(0)
    shapes = {"blocks.w": (3, 2, 4, 5), "blocks.b": (3, 7), "head": (5, 6)}
    params, *gradients = ({k: np.float32(rng.normal(size=s)) for k, s in shapes.items()} for _ in range(4))
    # So that a ratio of the whole stack would be wrong.
    params["blocks.w"] *= np.float32([[1.0, 30.0], [0.1, 3.0], [0.0, 5.0]])[..., None, None]
    table = {
        "blocks.w": np.array([[f"blocks.{i}.w.{irrep}" for irrep in ("A1", "A2")] for i in range(3)]),
        "blocks.b": np.array([f"blocks.{i}.b" for i in range(3)]),
        "head": np.asarray("head"),
    }

    def rule(tensor):
        return Rule(
            lr=0.5 if "blocks.1." in tensor.name else 1.0,
            decay=len(tensor.shape) > 1,
            clip="head" if tensor.name == "head" else "body",
            frozen=tensor.name == "blocks.2.b",
            starts=2 if tensor.name == "blocks.0.b" else 0,
        )

    def separate(tree):
        return {str(table[k][i]): a[i] for k, a in tree.items() for i in np.ndindex(table[k].shape)}

    options = dict(name=name, weight_decay=0.1, clip=0.5)
    ours = run(make(stacked(table, params, rule), params, **options), params, gradients)
    alone = separate(params)
    apart = run(make(unstacked(alone, rule), alone, **options), alone, [separate(g) for g in gradients])[-1]
    chex.assert_trees_all_close(separate(ours[-1]), apart, rtol=1e-6, atol=1e-7)  # the order of sums differs
    chex.assert_trees_all_equal(ours[-1]["blocks.b"][2], params["blocks.b"][2])
    chex.assert_trees_all_equal(ours[1]["blocks.b"][0], params["blocks.b"][0])
    assert (ours[2]["blocks.b"][0] != params["blocks.b"][0]).any()


def test_lars_of_optax():
    """With a rate that changes from step to step, since momentum holds it; a tensor of zeros has no ratio."""
    rng = np.random.default_rng(0)

    def draw(**sizes):
        return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}

    params = draw(w=(3, 4), b=(4,)) | {"zero": np.zeros(2, np.float32)}
    gradients = [draw(w=(3, 4), b=(4,), zero=(2,)) for _ in range(4)]
    config = get_base().optimizer
    config.update(name="lars_optax", clip=None, weight_decay=0.0)
    problem = unstacked(params, all_decay)
    ours = optimizers.create(config, problem.rule, problem.tables, params, lambda t: 6.4 / (1 + t), lambda t: 0.0)
    theirs = optax.lars(lambda t: 6.4 / (1 + t))
    for a, b in zip(run(ours, params, gradients), run(theirs, params, gradients), strict=True):
        chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-7)  # the order of products differs


def test_a_step_makes_no_copies_of_the_moments():
    params = {"w": jnp.zeros((512, 512))}
    optimizer = make(unstacked(params, all_decay), params, name="adamw")

    def step(params, state, gradients, good):
        updates, new = optimizer.update(gradients, state, params, good=good)
        new = optax.apply_updates(params, updates), new
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, (params, state))

    arguments = params, optimizer.init(params), params, jnp.bool_(True)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert not re.search(r"= f32\[512,512\]\S* copy\(", compiled.as_text())


def test_clip_groups_have_norms_of_their_own():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    gradients = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3, 0.4])}
    problem = unstacked(params, lambda tensor: Rule(decay=False, clip=tensor.name))
    updates = run(make(problem, params, lr=1.0, name="sgd", momentum=0.0, clip=1.0), params, [gradients])[-1]
    chex.assert_trees_all_close(updates, {"a": jnp.array([-0.6, -0.8]), "b": jnp.array([-0.3, -0.4])}, rtol=1e-6)


def test_no_decay_patterns():
    params = {"head.w": jnp.ones((2, 2)), "body.w": jnp.ones((2, 2))}
    options = dict(name="adamw", weight_decay=0.1, no_decay=("head.*",), lr=1.0)
    zero = [jax.tree.map(jnp.zeros_like, params)]
    after = run(make(unstacked(params, all_decay), params, **options), params, zero)[-1]
    chex.assert_trees_all_close(after, {"head.w": jnp.ones((2, 2)), "body.w": 0.9 * jnp.ones((2, 2))}, rtol=1e-6)
    with pytest.raises(ValueError, match="'heed.*' matches no parameter"):
        make(unstacked(params, all_decay), params, no_decay=("heed.*",))


def test_rates_by_name():
    """The last pattern decides, and a factor multiplies the rate of the objective's rule."""
    params = {name: jnp.zeros(2) for name in ("head.w", "blocks.0.w", "blocks.1.w")}
    gradients = [jax.tree.map(jnp.ones_like, params)]
    problem = unstacked(params, lambda tensor: Rule(lr=0.5 if tensor.name == "blocks.1.w" else 1.0, decay=False))
    options = dict(lr=1.0, name="sgd", momentum=0.0, clip=None)
    after = run(make(problem, params, rates=("*=3", "blocks.*=1/6"), **options), params, gradients)[-1]
    expected = {"head.w": -3.0, "blocks.0.w": -1 / 6, "blocks.1.w": -1 / 12}
    chex.assert_trees_all_close(after, {k: np.full(2, v, np.float32) for k, v in expected.items()}, rtol=1e-6)
    for wrong in ("head.*", "head.*=0", "head.*=1/0", "=2"):
        with pytest.raises(ValueError, match=re.escape(f"optimizer.rates: {wrong!r} must be a pattern")):
            make(problem, params, rates=(wrong,))
    with pytest.raises(ValueError, match=r"optimizer.rates: 'heed.\*' matches no parameter"):
        make(problem, params, rates=("heed.*=2",))


def test_weight_decay_may_follow_a_schedule():
    """Against a loop written out: SGD without momentum, whose decay goes from 0.04 to 0.4 in half a cosine."""
    params = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(2, 3.0)}
    gradients = [{"w": jnp.full((2, 2), 0.1 * t), "b": jnp.ones(2)} for t in range(4)]
    problem = unstacked(params, lambda tensor: Rule(decay=tensor.name == "w"))
    options = dict(name="sgd", momentum=0.0, clip=None, weight_decay=0.04, weight_decay_end=0.4, lr=0.5, total=4)
    history = run(make(problem, params, **options), params, gradients)
    w = 3.0
    for t, after in enumerate(history):
        decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * t / 4))
        w -= 0.5 * (0.1 * t + decay * w)
        np.testing.assert_allclose(after["w"], w, rtol=1e-6)
        np.testing.assert_allclose(after["b"], 3 - 0.5 * (t + 1), rtol=1e-6)


def test_a_tensor_starts_to_move_at_its_step_with_the_moments_gathered_before():
    params = {"late": jnp.ones(2), "other": jnp.ones(2)}
    gradients = [{k: jnp.full(2, 1.0 + t) for k in params} for t in range(4)]
    problem = unstacked(params, lambda tensor: Rule(decay=False, starts=2 if tensor.name == "late" else 0))
    history = run(make(problem, params, name="sgd", momentum=0.9, clip=None, lr=0.1), params, gradients)
    assert all((step["late"] == 1).all() for step in history[:2])
    for before, after in zip(history[1:], history[2:], strict=False):
        np.testing.assert_allclose(after["late"] - before["late"], after["other"] - before["other"], rtol=1e-5)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


class Body(nnx.Module):
    """Three blocks in one stack, or in two stages."""

    before = ("embed", "token")
    throughout = ("shared",)

    def __init__(self, stages, rngs):
        self.embed, self.norm = nnx.Linear(2, 2, rngs=rngs), nnx.LayerNorm(2, rngs=rngs)
        self.token, self.shared = nnx.Param(jnp.zeros((1, 2)), decay=False), nnx.Linear(2, 2, rngs=rngs)
        if stages:
            self.stages = nnx.List([Stage(length, rngs) for length in (1, 2)])
        else:
            self.blocks = Stack([(3, Block)], rngs=rngs)


class Stage(nnx.Module):
    def __init__(self, length, rngs):
        self.blocks = Stack([(length, Block)], rngs=rngs)


class Around(nnx.Module):
    def __init__(self, name, stages, rngs):
        setattr(self, name, Body(stages, rngs))
        self.decoder = Stage(2, rngs)


def factors(module, decay=0.5):
    tables = logical.tensors(module).values()
    return {t.name: optimizers.layer_factor(t, decay) for table in tables for t in table.flat}


@pytest.mark.parametrize("prefix", ["", "encoder.", "backbone."])
@pytest.mark.parametrize("stages", [False, True])
def test_the_rate_falls_from_layer_to_layer_wherever_the_blocks_are(prefix, stages):

    def make():
        rngs = nnx.Rngs(0)
        return Around(prefix[:-1], stages, rngs) if prefix else Body(stages, rngs)

    found = factors(jax.eval_shape(make))
    last = "stages.1.blocks.1" if stages else "blocks.2"
    expected = {
        "embed.kernel": 1 / 16,
        "token": 1 / 16,
        ("stages.0.blocks.0" if stages else "blocks.0") + ".linear.bias": 1 / 8,
        ("stages.1.blocks.0" if stages else "blocks.1") + ".linear.kernel": 1 / 4,
        f"{last}.linear.kernel": 1 / 2,
        "shared.kernel": (1 / 2 + 1 / 4 + 1 / 8) / 3,
        "norm.scale": 1,
    }
    assert {name: found[prefix + name] for name in expected} == expected


def test_layer_decay_multiplies_the_rate_of_each_slice():
    body = Body(False, nnx.Rngs(0))
    params, tables = jax.tree.map(jnp.zeros_like, logical.take(body)), logical.tensors(body)
    problem = Problem(tables, lambda tensor: Rule(lr=3.0 if tensor.name.startswith("norm") else 1.0))
    gradients = [jax.tree.map(jnp.ones_like, params)]
    options = dict(name="sgd", weight_decay=0.0, clip=None, lr=1.0, layer_decay=0.5)
    after = run(make(problem, params, **options), params, gradients)[-1]
    rows = -jnp.array([[1 / 8], [1 / 4], [1 / 2]]) * jnp.ones(2)
    chex.assert_trees_all_equal(after["blocks.runs.0.linear.bias"], rows)
    chex.assert_trees_all_equal(after["norm.scale"], -3 * jnp.ones(2))


def test_layer_decay_without_layers_is_refused():
    params = {"head": jnp.zeros(3)}
    with pytest.raises(ValueError, match="layer_decay=0.5: no part of the model declares the layers before its blocks"):
        make(unstacked(params, all_decay), params, layer_decay=0.5)
