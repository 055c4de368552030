"""Fitted taps: least squares is the least, what is a convolution is found, and blocks are ranked by their damage."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import logical
from equivit.depthwise import equations, fit
from equivit.layers.depthwise import replace_attention
from equivit.layers.grid import Layout
from equivit.models import zoo
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from tests.depthwise import attending

X = attending.images()
BATCHES = [X[:4], X[4:]]
WHERE = {0: None, 2: (1,)}
fitted = functools.cache(lambda **options: fit.fit(attending.model(**attending.SMALL), WHERE, BATCHES, **options))


@pytest.mark.slow
def test_each_start_is_nearer_than_the_one_before():
    """For the first block, whose inputs are the same for all; those of the last follow from the first."""
    ways = [dict(start=start) for start in ("normal", "projection", "least_squares")] + [dict(refit=True)]
    errors = [fitted(**way)[1] for way in ways]
    assert all(one.keys() == {0, 2} for one in errors)
    normal, projected, least, refit = (one[0] for one in errors)
    assert 1.2 > normal > 0.9 and normal > projected > least > refit > 0.02
    assert errors[0][2] > errors[2][2]
    assert fitted(form="printed")[1][0] > least  # without a bias
    assert fitted(start="blur")[1] == fitted(start=None)[1]


def test_the_model_has_the_fitted_taps_and_its_error():
    model, errors = fitted(refit=True)
    before = attending.model(**attending.SMALL)
    assert [(one.block, one.heads) for one in model.config.replaced] == [(0, None), (2, (1,))]

    @jax.jit
    def outputs(model, x):
        x, layout = model.embed(x)
        return model.blocks[0].attention(model.blocks[0].norm1(x), layout)

    theirs, ours = (np.asarray(outputs(m, X)) for m in (before, model))
    np.testing.assert_allclose(np.square(ours - theirs).sum() / np.square(theirs).sum(), errors[0], rtol=1e-4)
    kept = logical.to_logical(before)
    new = logical.to_logical(model)
    changed = {name for name in new if name not in kept or not np.array_equal(new[name], kept[name])}
    parts = ("taps", "value", "proj", "query_key")
    assert changed == {
        name for name in new if name.split(".")[-2] in parts or name.endswith(("taps", "attention.bias"))
    } - {name for name in new if ".1." in name}


def test_what_is_a_convolution_is_found():
    """Every token attends to itself alone: queries and keys are equal and long, and the tokens differ."""
    tensors = {n: np.array(t) for n, t in logical.to_logical(attending.model(num_heads=1, **ALONE)).items()}
    for i in range(2):
        tensors[f"blocks.{i}.norm1.scale"][:], tensors[f"blocks.{i}.norm1.bias"][:] = 1, 0
        tensors[f"blocks.{i}.attention.qkv.weight"][:, :32] = 30 * np.tile(np.eye(16), 2)
        tensors[f"blocks.{i}.attention.qkv.bias"][:32] = 0
    model = logical.from_logical(zoo.abstract("vit_b16", num_heads=1, **ALONE), tensors)
    for kind in ("dw", "conv"):
        after, errors = fit.fit(model, {1: None}, BATCHES, kind=kind, ridge=1e-7)
        taps = np.asarray(after.blocks[1].attention.taps[...])
        expected = np.zeros((3, 3))
        expected[1, 1] = 1
        expected = expected[..., None] if kind == "dw" else expected
        np.testing.assert_allclose(taps, np.broadcast_to(expected, taps.shape), atol=1e-4)
        assert errors[1] < 1e-8
    assert fit.damage(model, BATCHES).max() < 1e-6
    assert fit.fit(model, {1: None}, BATCHES, start="projection")[1][1] < 1e-8


ALONE = {key: value for key, value in attending.SMALL.items() if key != "num_heads"} | dict(depth=2)


CASES = ("dw", "conv", "scattered", "scattered conv", "ens_dw", "octic")


@pytest.mark.parametrize(("case", "form"), [*((case, "released") for case in CASES), ("conv", "printed")])
def test_the_gradient_by_the_taps_is_zero(case, form):
    """At the solution, of the squared distance of what is fitted; of octic blocks, of all group elements together."""
    octic, scattered = case == "octic", case.startswith("scattered")
    attention = attending.model(**(attending.OCTIC if octic else attending.SMALL)).blocks[1].attention
    kind = case.split()[-1] if case.split()[-1] in ("conv", "ens_dw") else "dw"
    new = replace_attention(attention, kind, form=form, heads=(1,) if scattered else None)
    layout, one = Layout((3, 5)), jnp.ones(4)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 15, 32 if octic else 16)), jnp.float32)
    x = fields.from_dense(x, OCTIC) if octic else x

    def distance(tensors, new, attention, x):
        new = logical.put(new, tensors)
        if case == "ens_dw":
            return equations.distances(attention, new, x, layout, one)[0]
        ours, theirs = (equations.bare(module)(x, layout) for module in (new, attention))
        if scattered:
            ours, theirs = ours[..., 8:], theirs[..., 8:]
        return equations.squares(jax.tree.map(jnp.subtract, ours, theirs), one)

    system = equations.ensemble if case == "ens_dw" else equations.channels
    found = jax.jit(lambda *given: system(*given, layout, one))(attention, new, x)
    solutions = found.solved(1e-9)
    solutions = solutions.reshape(-1, new.taps.shape[-1]).T if case == "ens_dw" else solutions
    tensors = {name: tensor.astype(np.float32) for name, tensor in fit._tensors(new, solutions).items()}
    assert ("bias" in tensors) == (kind != "conv")
    slope = jax.jit(jax.value_and_grad(distance))
    least, at = slope(tensors, new, attention, x)
    most, beside = slope(jax.tree.map(np.zeros_like, tensors), new, attention, x)
    assert least < 0.95 * most
    for name, tensor in at.items():
        chex.assert_trees_all_close(tensor, 0 * tensor, atol=2e-4 * float(np.abs(beside[name]).max()))


def test_octic_blocks():
    model = attending.model(**attending.OCTIC)
    assert fit.fit(model, {1: None}, BATCHES, start="projection")[1][1] < 1  # random taps have 1
    with pytest.raises(ValueError, match="refit=True is for the kinds 'dw' and 'conv' of dense blocks"):
        fit.fit(model, {1: None}, BATCHES, refit=True)
    assert fit.damage(model, BATCHES).shape == (2,)


def test_damage_is_that_of_each_block_alone():
    """The relative error of a block fitted alone, times the squares of what it adds, over those of the stream."""
    model = attending.model(**attending.SMALL)
    found = fit.damage(model, BATCHES)
    after, errors = fit.fit(model, {1: None}, BATCHES)

    @jax.jit
    def shares(before, after, x):
        x, layout = before.embed(x)
        x, _ = before.trunk(x, layout, stop=1)
        block, other = before.blocks[1], after.blocks[1]
        change = block.scale1(block.attention(block.norm1(x), layout) - other.attention(block.norm1(x), layout))
        return jnp.square(change).sum() / jnp.square(x).sum()

    np.testing.assert_allclose(found[1], shares(model, after, X), rtol=1e-4)
    assert found.min() > 0 and errors[1] > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kind="spvit"), "whose outputs are not linear in its taps; take start=None"),
        (dict(kind="spvit", start="projection"), "not linear in its taps; take start=None"),
        (dict(kind="identity"), "start='least_squares' is not for kind='identity', which has no taps; take start=None"),
        (dict(kind="ens_dw", start="projection"), "which has no taps for each head; take start='least_squares'"),
        (dict(kernel_size=3.0), r"fit: replaced has \(0, 'dw', 3.0, None, 'released'\)"),
        (dict(kind="ens_dw", refit=True), "take refit=False"),
        (dict(start="guess"), "start='guess' is not one of"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit.fit(attending.model(**attending.SMALL), {0: None}, BATCHES, **options)


def test_the_first_batch_is_the_largest_and_all_images_are_of_one_size():
    model, after = attending.model(**attending.SMALL), r"fit: a batch is .* after one of \(4, 12, 20, 3\)"
    for batches, fix in (([X[:4], X], "give the largest batch first"), ([X[:4], X[:4, :8]], "give images of one size")):
        for measure in (lambda batches: fit.fit(model, {0: None}, batches), lambda batches: fit.damage(model, batches)):
            with pytest.raises(ValueError, match=f"{after}; {fix}"):
                measure(batches)


def test_an_ensemble_begins_with_its_best_head():
    model = attending.model(**attending.SMALL)
    after, errors = fit.fit(model, {0: None}, BATCHES, kind="ens_dw")
    share = np.asarray(jax.nn.softmax(after.blocks[0].attention.gamma[...] / 0.01))
    np.testing.assert_allclose(sorted(share), [0.1, 0.9], rtol=1e-5)
    assert errors[0] < fit.fit(model, {0: None}, BATCHES, kind="ens_dw", start="normal")[1][0]
    with pytest.raises(ValueError, match="a list rather than an iterator"):
        fit.fit(model, {0: None}, iter(BATCHES), refit=True)
