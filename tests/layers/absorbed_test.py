"""A branch with its vectors inside its matrices is the same function, and so are its gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import testing
from equivit.layers.absorbed import absorbed
from equivit.layers.block import Block, branch_path
from equivit.layers.parts import Parts, identity
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import cast, normal
from tests.symmetry.fields_test import random_field

WIDTH, TOKENS = 32, 7
CASES = [
    (None, dict()),
    (None, dict(qkv_bias=False, activation="swiglu")),
    (None, dict(layer_scale=None)),
    (FLIP, dict()),
    (OCTIC, dict(isotypic_norm="balanced")),
    (OCTIC, dict(qkv_bias=False, layer_scale=None)),
]
# Float64: the rounding of sums over 14 tokens or 64 weights, of entries near 1.
TOLERANCE = dict(rtol=1e-11, atol=1e-11)


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def block_and_tokens(group, options):
    """A block with random parameters, and tokens, in float64."""
    options = dict(layer_scale=0.5) | options
    abstract = jax.eval_shape(lambda: Block(**Parts(group, nnx.Rngs(0), **options).branches(WIDTH, 2, 64)))
    block = testing.randomise(abstract, jax.random.key(1))
    x = normal(2, TOKENS, WIDTH) if group is None else random_field(group, (1, TOKENS), WIDTH // group.order)
    return cast(block, "float64"), cast(x, "float64")


def plain(block, x):
    """The block by its equation."""
    x = x + block.scale1(block.attention(block.norm1(x)))
    return x + block.scale2(block.mlp(block.norm2(x)))


def value_and_gradients(function, block, x):
    def loss(block, x):
        y = function(block, x)
        return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(block, x)


@pytest.mark.parametrize(("group", "options"), CASES)
def test_values_and_gradients_of_a_block_are_those_of_its_equation(group, options):
    block, x = block_and_tokens(group, options)
    found = value_and_gradients(lambda block, x: block(x), block, x)
    chex.assert_trees_all_close(found, value_and_gradients(plain, block, x), **TOLERANCE)


@pytest.mark.parametrize(("group", "options"), CASES[:1] + CASES[4:5])
def test_a_path_is_that_of_the_equation(group, options):
    """Dropout of a quarter of the entries, then of half of the branches; a drop of all is no test."""
    block, x = block_and_tokens(group, options)
    block.dropout, keys = 0.25, jax.random.split(key := jax.random.key(3))

    def dropped(block, x):
        x = x + branch_path(block.scale1(block.attention(block.norm1(x))), 0.25, 0.5, keys[0])
        return x + branch_path(block.scale2(block.mlp(block.norm2(x))), 0.25, 0.5, keys[1])

    found = value_and_gradients(lambda block, x: block(x, rate=0.5, key=key), block, x)
    chex.assert_trees_all_close(found, value_and_gradients(dropped, block, x), **TOLERANCE)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[1][0]))


@pytest.mark.parametrize(("group", "options"), CASES[:1] + CASES[4:5])
def test_other_derivatives_are_derived(group, options):
    block, x = block_and_tokens(group, options)

    def along(function):
        def scaled(scale, x):
            return function(block, jax.tree.map(lambda leaf: scale * leaf, x))

        return jax.jit(lambda x: jax.jvp(lambda x: jax.vmap(scaled, (0, None))(jnp.arange(2.0), x), (x,), (x,)))(x)

    chex.assert_trees_all_close(along(lambda block, x: block(x)), along(plain), **TOLERANCE)


@pytest.mark.parametrize("group", [None, OCTIC])
def test_gradients_of_vectors_need_no_sums_over_tokens_but_those_of_biases(group):
    """A block has four biases, and six vectors of norms and layer scales."""
    block, x = block_and_tokens(group, {})

    def sums(function):
        text = str(jax.make_jaxpr(lambda b, x: value_and_gradients(function, b, x))(block, x))
        return sum("reduce_sum[axes=(0, 1)" in line or "reduce_sum[axes=(1, 2)" in line for line in text.splitlines())

    assert sums(lambda block, x: block(x)) <= sums(plain) / 2


def test_a_bias_that_is_left_out_is_caught():
    block, x = block_and_tokens(OCTIC, {})

    @jax.jit
    def sides(block, x):
        norm, body = absorbed(block.norm1, block.attention, None)
        right = body(norm(x))
        body.qkv.bias = nnx.Param(block.attention.qkv.bias[...])  # without the norm's
        return block.attention(block.norm1(x)), right, body(norm(x))

    expected, right, wrong = sides(block, x)
    chex.assert_trees_all_close(right, expected, **TOLERANCE)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(wrong, expected, **TOLERANCE)


def test_the_original_is_unchanged():
    block, _ = block_and_tokens(None, {})
    before = jax.tree.map(jnp.array, block)
    absorbed(block.norm2, block.mlp, block.scale2)
    chex.assert_trees_all_equal(block, before)


def test_a_body_without_linear_maps_at_its_ends_keeps_its_vectors():
    """Such as a replaced attention, which begins with the projection of values."""
    block, x = block_and_tokens(None, {})
    parts = dataclasses.replace(Parts(None, nnx.Rngs(0)), replace_attention=lambda attention: Halved())
    other = cast(Block(**parts.branches(WIDTH, 2, 64)), "float64")
    assert not hasattr(other.attention, "MAPS") and other.scale1 is identity
    found = value_and_gradients(lambda block, x: block(x), other, x)
    chex.assert_trees_all_close(found, value_and_gradients(plain, other, x), **TOLERANCE)


class Halved(nnx.Module):
    def __call__(self, x, layout=None):
        return x / 2
