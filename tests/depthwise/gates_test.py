"""Gated attention between attention and convolution.

The choice of a subset is tested in tests/parity/gates_test.py, training in tests/objectives/gated_test.py.
"""

import jax
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


@pytest.mark.parametrize("kind", ["dw", "conv"])
def test_the_ends_of_a_gate(kind):
    """0 is the attention, 1 the convolution, and with 0 and 1 the scattered heads with the same taps."""
    attention = attending.model(**attending.SMALL).blocks[0].attention
    mixed, layout = GatedAttention(attention, kind, rngs=nnx.Rngs(0)), Layout((3, 5))
    x = np.random.default_rng(0).normal(size=(2, 15, 16)).astype(np.float32)
    taps = np.random.default_rng(1).normal(size=mixed.taps.shape).astype(np.float32)
    for gate, heads, chosen in (
        ((0, 0), None, None),
        ((1, 1), None, taps),
        ((0, 1), (1,), gates._taps_of_heads(taps, (1,), kind, 2)),
    ):
        module, other = logical.put(mixed, {"taps": taps, "gate": np.float32(gate)}), attention
        if chosen is not None:
            other = logical.put(replace_attention(attention, kind, heads=heads), {"taps": chosen})
        ours, theirs = call(module, x, layout), call(other, x, layout)
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    halves = [
        call(logical.put(mixed, {"taps": taps, "gate": np.full(2, g, np.float32)}), x, layout) for g in (0, 0.5, 1)
    ]
    np.testing.assert_allclose(halves[1], (halves[0] + halves[2]) / 2, atol=1e-5 * np.abs(theirs).max())
