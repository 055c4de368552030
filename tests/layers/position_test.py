"""Positional tables: fixed by the group at any grid; the bicubic rule commutes with flips and turns."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.layers.position import IsotypicPosition, Position, bicubic, resize
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import normal


@pytest.mark.parametrize("group", [FLIP, OCTIC], ids=lambda g: g.name)
@pytest.mark.parametrize("learned", [(4, 4), (5, 5), (3, 6)], ids=str)
@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (3, 6), (7, 2)], ids=str)
def test_table_is_fixed_by_the_group(group, learned, grid):
    position = IsotypicPosition(learned, 16, group=group, std=1.0, rngs=nnx.Rngs(0))
    for g in group.elements:
        turned = grid[::-1] if g.count("r") % 2 else grid
        # Taps of a resize are summed in another order after a turn: 16 products of size one, float32.
        chex.assert_trees_all_close(position(turned), fields.act(g, position(grid), grid), atol=1e-5)


def test_a_table_of_its_own_size_is_left_alone():
    table = normal(5, 7, 3)
    assert resize(table, (5, 7)) is table
    position = Position((5, 7), 3, rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(position((5, 7)), position.table[...].reshape(35, 3))


@pytest.mark.parametrize("size,target", [(14, 20), (14, 6), (14, 37), (7, 8)])
@pytest.mark.parametrize("antialias", [False, True])
def test_bicubic_keeps_constants_and_mirrors(size, target, antialias):
    matrix = bicubic(size, target, antialias)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(matrix[::-1, ::-1], matrix, atol=1e-12)


def test_antialiased_bicubic_is_that_of_jax():
    table = normal(37, 37, 4)
    ours = resize(table, (24, 50), antialias=True)
    chex.assert_trees_all_close(ours, jax.image.resize(table, (24, 50, 4), "cubic", antialias=True), rtol=0, atol=1e-5)


def test_offset_breaks_mirror_symmetry():
    """Why DINOv2's offset is for plain models only."""
    matrix = bicubic(37, 16, offset=0.1)
    assert np.abs(matrix[::-1, ::-1] - matrix).max() > 1e-2


def test_resize_works_in_float32_for_bfloat16_tables():
    table = normal(8, 8, 4, dtype="bfloat16")
    exact = resize(table.astype(jnp.float32), (5, 11))
    chex.assert_trees_all_equal(resize(table, (5, 11)), exact.astype(jnp.bfloat16))
