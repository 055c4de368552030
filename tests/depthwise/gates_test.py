"""Gated attention between attention and convolution.

The choice of a subset is tested in tests/parity/gates_test.py, training in tests/objectives/gated_test.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.depthwise import gates
from equivit.depthwise.gates import GatedAttention
from equivit.layers.depthwise import replace_attention
from equivit.layers.grid import Layout
from tests.depthwise import attending

call = jax.jit(lambda module, x, layout: module(x, layout), static_argnums=2)


CASES = [("dw", "released"), ("conv", "released"), ("dw", "printed"), ("spvit", "released"), ("spvit", "printed")]


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_the_ends_of_a_gate(kind, form):
    """0 is the attention, 1 the replacement, and with 0 and 1 the scattered heads with the same taps."""
    attention = attending.model(**attending.SMALL).blocks[0].attention
    mixed = GatedAttention(attention, kind, form=form, kernel_size=3, rngs=nnx.Rngs(0))
    x, layout = np.random.default_rng(0).normal(size=(2, 15, 16)).astype(np.float32), Layout((3, 5))
    random = np.random.default_rng(1)
    shapes = {name: getattr(mixed, name).shape for name in ("taps", "bias") if getattr(mixed, name) is not None}
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    ends = [((0, 0), None), ((1, 1), None), *([((0, 1), (1,))] if kind != "spvit" else [])]
    for gate, heads in ends:
        module, other = logical.put(mixed, {**tensors, "gate": np.float32(gate)}), attention
        if any(gate):
            chosen = {name: gates._of_heads(tensor, heads, kind, 2) for name, tensor in tensors.items()}
            other = logical.put(replace_attention(attention, kind, form=form, heads=heads), chosen)
        ours, theirs = call(module, x, layout), call(other, x, layout)
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert np.abs(call(attention, x, layout) - theirs).max() > 0.1 * np.abs(theirs).max()
    halves = [call(logical.put(mixed, {**tensors, "gate": np.full(2, g, np.float32)}), x, layout) for g in (0, 0.5, 1)]
    np.testing.assert_allclose(halves[1], (halves[0] + halves[2]) / 2, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize(("kind", "form"), [*CASES, ("conv", "printed")])
def test_a_gated_block_is_the_same_function_under_differentiation(kind, form, qkv_bias):
    """Norms with biases, gates between 0 and 1, and border tokens, which are most of the tokens of these grids."""
    plain = attending.model(**attending.SMALL, qkv_bias=qkv_bias)
    gated = gates.with_gates(plain, kind, form=form, kernel_size=3, rngs=nnx.Rngs(0))
    gates.set_gates(gated, jnp.full((3, 2), 0.5))
    block, random = gated.blocks[0], np.random.default_rng(0)
    if block.attention.bias is not None:
        block.attention.bias.set_value(random.normal(size=block.attention.bias.shape).astype(np.float32))
    for grid in ((3, 5), (2, 4)):
        x = random.normal(size=(2, math.prod(grid), 16)).astype(np.float32)
        value, differentiated = evaluations(block, x, Layout(grid))
        np.testing.assert_allclose(differentiated, value, atol=1e-5 * np.abs(value).max())


@functools.partial(jax.jit, static_argnums=2)
def evaluations(block, x, layout):
    """The block's value, alone and beside its derivative."""

    def apply(block):
        return block(x, layout)

    return apply(block), jax.vjp(apply, block)[0]


def test_weights_start_between_0_and_1():
    """In Differentiable Subset Pruning they have both signs."""
    key, shape = jax.random.key(0), (24, 16)
    uniform, xavier = (np.asarray(gates.start_weights(start, key, shape)) for start in gates.STARTS)
    assert 0 <= uniform.min() < 0.1 and 0.9 < uniform.max() < 1
    bound = np.sqrt(6 / sum(shape))
    assert -bound <= xavier.min() < -0.9 * bound and 0.9 * bound < xavier.max() <= bound
