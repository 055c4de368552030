"""Rotary positions: attention depends on distances alone, registers have no place, odd and non-square grids."""

import jax
import numpy as np
import pytest

from equivit.layers import rotary
from equivit.layers.grid import Layout
from equivit.layers.rngs import Keys
from equivit.models import zoo
from tests.drawing import normal

WIDTH, HEADS, PREFIX = 24, 2, 2


def turned(x, grid):
    """`rotated` of vectors [N, d], as complex numbers in NumPy."""
    h, w = grid
    y, x_ = np.divmod(np.arange(h * w), w)
    turns = np.stack([(y + 0.5) / h, (x_ + 0.5) / w], -1) * 2 - 1
    n = x.shape[-1] // 4
    angle = 2 * np.pi * (turns[:, :, None] * 100.0 ** (-np.arange(n) / n)).reshape(h * w, -1)
    z = (x[:, : 2 * n] + 1j * x[:, 2 * n :]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("grid", [(3, 4), (1, 5)], ids=str)
def test_the_rotation_is_a_product_of_complex_numbers(grid):
    x = np.asarray(normal(PREFIX + grid[0] * grid[1], 12))
    y = jax.jit(rotary.rotated, static_argnums=1)(x, grid)
    np.testing.assert_array_equal(y[:PREFIX], x[:PREFIX])
    np.testing.assert_allclose(y[PREFIX:], turned(x[PREFIX:], grid), atol=2e-6)  # float32 of entries up to 4


def test_attention_depends_on_distances_alone():
    """With equal tokens, logits are a function of the distance; without the rotation all would be equal."""
    grid, layer = (3, 5), rotary.Attention(WIDTH, HEADS, rngs=Keys(0))
    layer.qkv.weight.set_value(normal(*layer.qkv.weight.shape))
    layer.q_bias.set_value(normal(WIDTH))
    x = np.broadcast_to(np.asarray(normal(1, WIDTH)), (PREFIX + 15, WIDTH)).astype(np.float32)
    weights = jax.jit(lambda layer, x: layer.weights(x, layout=Layout(grid, PREFIX)))(layer, x)
    logits = np.log(np.asarray(weights, np.float64))[:, PREFIX:, PREFIX:].reshape(HEADS, *grid, *grid)
    rows = logits - np.einsum("hijij->hij", logits)[..., None, None]  # without the sum of a row
    np.testing.assert_allclose(rows[:, 1:, 1:, 1:, 1:], rows[:, :-1, :-1, :-1, :-1], atol=1e-4)  # logits up to 20
    assert np.abs(rows).max() > 0.1


def test_keys_have_no_bias():
    layer = rotary.Attention(WIDTH, HEADS, rngs=Keys(0))
    assert layer.qkv.bias is None and layer.q_bias.shape == layer.v_bias.shape == (WIDTH,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(family="H8"), "position='rotary' is for plain models; family H8 takes 'learned'"),
        (dict(adaptive=True), r"position='rotary' needs attention without relative positions; take adaptive"),
        (dict(qk_norm=True), "position='rotary' is for attention without norms; take qk_norm=False"),
        (dict(replaced=((0,),), class_token=False, registers=0), "position='rotary' has no replacement"),
        (dict(num_heads=4, width=24), "give 6 channels a head, which 4 must divide for .*; the nearest are 4 and 8"),
    ],
    ids=str,
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("dinov3_vit_s16", **dict(depth=1, width=32, num_heads=2) | options)


def test_removed_patches_are_refused():
    model, x = zoo.abstract("dinov3_vit_s16", depth=1, width=32, num_heads=2, patch_size=8), np.zeros((1, 16, 24, 3))
    with pytest.raises(ValueError, match="rotary positions: patches were removed"):
        jax.eval_shape(lambda m, x: m.tokens(x, keep=np.zeros((1, 1), int)), model, x)
