"""Attention maps: the weights that a block has in fact, on any grid, moving with the image where the block does."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.evaluation.attention_maps import attention_maps
from equivit.models import zoo
from equivit.symmetry import fields
from tests.models.jumbo_vit_test import SMALL, images, model, octic

maps = functools.partial(jax.jit, static_argnames="block")(attention_maps)


def test_the_weights_are_those_of_the_block():
    """Worked out by hand from the tokens that block 0 gives to block 1."""
    m, x = model(), images((12, 20))
    features = jax.jit(lambda m, x: m.features(x, blocks=(0,), norm=False))(m, x).blocks[0]
    tokens = jnp.concatenate([features.cls.reshape(2, 2, 48), features.patches.values.reshape(2, 15, 48)], axis=1)
    block = m.blocks[1]
    qkv = np.asarray(block.attention.qkv(block.norm1(tokens))).reshape(2, 17, 3, 2, 24)
    logits = np.einsum("bnhd,bmhd->bhnm", qkv[:, :, 0], qkv[:, :, 1]) / math.sqrt(24)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = maps(m, x)
    np.testing.assert_allclose(found, weights[:, :, :2, 2:].reshape(2, 2, 2, 3, 5), rtol=1e-4)
    np.testing.assert_array_equal(found, maps(m, x, block=1))
    assert float(jnp.abs(found - maps(m, x, block=0)).max()) > 1e-2


@pytest.mark.parametrize("block", [0, 1])
def test_maps_move_with_the_image(block):
    """Block 0 is octic; block 1 is dense, on tokens made invariant."""
    m, x = octic("I8", "steerable"), np.asarray(images((12, 20)))
    upright = np.asarray(maps(m, x, block=block))
    for g in m.config.group.elements:
        moved = fields.act_on_grid(g, upright, (3, 4))
        np.testing.assert_allclose(maps(m, fields.act_on_image(g, x), block=block), moved, atol=1e-5)
    assert float(upright.std()) > 1e-3


def test_every_token_before_the_patches_has_a_map():
    options = {name: value for name, value in SMALL.items() if name != "jumbo"}
    m = zoo.abstract("octic_vit_s16", family="H8", registers=3, **options)
    assert jax.eval_shape(maps, m, images((12, 20))).shape == (2, 2, 1 + 3, 3, 5)


def test_no_such_map():
    m = zoo.abstract("octic_vit_s16", family="D8")
    with pytest.raises(ValueError, match="the model has only patch tokens"):
        jax.eval_shape(maps, m, jnp.zeros((1, 32, 32, 3)))
    adaptive = zoo.abstract("vit_s16", adaptive=True)
    with pytest.raises(ValueError, match="this adaptive model have an offset that depends on the image; place"):
        jax.eval_shape(maps, adaptive, jnp.zeros((1, 32, 32, 3)))
    for block in (2, -3):
        with pytest.raises(IndexError, match=f"there is no block {block}; the blocks are 0 to 1"):
            attention_maps(model(), images((16, 16)), block=block)
