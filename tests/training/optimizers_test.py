"""LAMB and AdamW against arrays from apex's rules (timm's Lamb) and torch's AdamW, and the rules on logical tensors."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from equivit.objectives.objective import Rule
from equivit.training import optimizers
from equivit.training.config import get_base

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "losses"
# Five steps in float32: six roundings of 6e-8.  Entries near 0 are judged by the largest of their tensor.
TOLERANCE = 4e-7


class Problem:
    """What an optimiser asks of an objective: names and rules."""

    def __init__(self, names, rule):
        self._names, self._rule = names, rule

    def names(self):
        return self._names

    def rules(self):
        return self._rule


def unstacked(params, rule):
    return Problem({name: np.asarray(name) for name in params}, rule)


def make(problem, params, lr=0.01, **options):
    config = get_base().optimizer
    config.update(options)
    return optimizers.create(config, problem, params, lambda step: jnp.float32(lr))


def run(optimizer, params, gradients):
    """The parameters after each step."""
    state, history = optimizer.init(params), []
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p))
    for g in gradients:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def parity_case(file):
    data = np.load(FIXTURES / file)
    params = {f"p{i}": jnp.asarray(data[f"input/p{i}"]) for i in range(4)}
    gradients = [{f"p{i}": jnp.asarray(data[f"input/g{i}"][t]) for i in range(4)} for t in range(5)]
    return data, params, gradients


def some_decay(name, shape):
    return Rule(decay=name in ("p0", "p3"))


def all_decay(name, shape):
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


@pytest.mark.parametrize("name", ["lamb", "lars", "adamw", "sgd"])
def test_a_stack_is_optimised_as_its_tensors(name):
    """Three steps on stacked leaves [block, irrep, ...] equal those on the separate tensors, every rule included."""
    key = jax.random.split(jax.random.key(0), 8)
    scales = jnp.array([[1.0, 30.0], [0.1, 3.0], [0.0, 5.0]])  # so that a ratio of the whole stack would be wrong
    stacked = {
        "blocks.w": jax.random.normal(key[0], (3, 2, 4, 5)) * scales[..., None, None],
        "blocks.b": jax.random.normal(key[1], (3, 7)),
        "head": jax.random.normal(key[2], (5, 6)),
    }
    table = {
        "blocks.w": np.array([[f"blocks.{i}.w.{irrep}" for irrep in ("A1", "A2")] for i in range(3)]),
        "blocks.b": np.array([f"blocks.{i}.b" for i in range(3)]),
        "head": np.asarray("head"),
    }
    gradients = [{k: jax.random.normal(jax.random.key(t), a.shape) for k, a in stacked.items()} for t in range(3)]

    def rule(name, shape):
        group = "head" if name == "head" else "body"
        return Rule(
            lr=0.5 if "blocks.1." in name else 1.0, decay=len(shape) > 1, clip=group, frozen=name == "blocks.2.b"
        )

    def separate(tree):
        return {str(table[k][i]): a[i] for k, a in tree.items() for i in np.ndindex(table[k].shape)}

    options = dict(name=name, weight_decay=0.1, clip=0.5)
    ours = run(make(Problem(table, rule), stacked, **options), stacked, gradients)[-1]
    params = separate(stacked)
    apart = run(make(unstacked(params, rule), params, **options), params, [separate(g) for g in gradients])[-1]
    chex.assert_trees_all_close(separate(ours), apart, rtol=1e-6, atol=1e-7)  # the order of sums differs
    chex.assert_trees_all_equal(ours["blocks.b"][2], stacked["blocks.b"][2])


def test_clip_groups_have_norms_of_their_own():
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    gradients = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.3, 0.4])}
    problem = unstacked(params, lambda name, shape: Rule(decay=False, clip=name))
    updates = run(make(problem, params, lr=1.0, name="sgd", momentum=0.0, clip=1.0), params, [gradients])[-1]
    chex.assert_trees_all_close(updates, {"a": jnp.array([-0.6, -0.8]), "b": jnp.array([-0.3, -0.4])}, rtol=1e-6)


def test_frozen_leaves_have_no_state():
    params = {"a": jnp.ones(3), "b": jnp.ones(4)}
    optimizer = make(unstacked(params, lambda name, shape: Rule(frozen=name == "b")), params)
    assert {leaf.shape for leaf in jax.tree.leaves(optimizer.init(params))} == {(), (3,)}
    after = run(optimizer, params, [{"a": jnp.ones(3), "b": jnp.ones(4)}])[-1]
    chex.assert_trees_all_equal(after["b"], params["b"])


def test_no_decay_patterns():
    params = {"head.w": jnp.ones((2, 2)), "body.w": jnp.ones((2, 2))}
    options = dict(name="adamw", weight_decay=0.1, no_decay=("head.*",), lr=1.0)
    zero = [jax.tree.map(jnp.zeros_like, params)]
    after = run(make(unstacked(params, all_decay), params, **options), params, zero)[-1]
    chex.assert_trees_all_close(after, {"head.w": jnp.ones((2, 2)), "body.w": 0.9 * jnp.ones((2, 2))}, rtol=1e-6)
    with pytest.raises(ValueError, match="'heed.*' matches no parameter"):
        make(unstacked(params, all_decay), params, no_decay=("heed.*",))


def test_the_rate_falls_from_layer_to_layer():
    names = ["patch_embed.kernel", "position.table", "jumbo_token", "blocks.0.mlp.fc1.weight", "blocks.2.norm1.scale",
             "jumbo_mlp.fc1.weight", "norm.scale", "head.weight"]  # fmt: skip
    factor = optimizers.layer_factors(names, 0.5)
    expected = [1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 2, (1 / 2 + 1 / 4 + 1 / 8) / 3, 1, 1]
    assert [factor(name) for name in names] == expected
    with pytest.raises(ValueError, match="layer_decay=0.5: the model has no blocks"):
        optimizers.layer_factors(["head.weight"], 0.5)


def test_layer_decay_multiplies_the_rate_of_each_slice():
    params = {"blocks.w": jnp.zeros((2, 3)), "head": jnp.zeros(3)}
    table = {"blocks.w": np.array(["blocks.0.w", "blocks.1.w"]), "head": np.asarray("head")}
    problem = Problem(table, lambda name, shape: Rule(lr=3.0 if name == "head" else 1.0))
    gradients = [jax.tree.map(jnp.ones_like, params)]
    options = dict(name="sgd", weight_decay=0.0, clip=None, lr=1.0, layer_decay=0.5)
    after = run(make(problem, params, **options), params, gradients)[-1]
    rows = -jnp.array([[0.25], [0.5]]) * jnp.ones(3)
    chex.assert_trees_all_equal(after, {"blocks.w": rows, "head": -3 * jnp.ones(3)})
