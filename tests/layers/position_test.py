"""Positional tables: fixed by the group at any grid; the bicubic rule commutes with flips and turns."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.layers.position import IsotypicPosition, Position, bicubic, resize
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import normal


@functools.cache
def learned_at(grid, group, seed=0):
    """A table with entries of size one; made by one program, where JAX would compile one for each operation."""
    return jax.jit(lambda: IsotypicPosition(grid, 16, group=group, std=1.0, rngs=nnx.Rngs(seed)))()


@functools.partial(jax.jit, static_argnames="grids")
def tables(position, grids):
    return [position(grid) for grid in grids]


def on_host(position, *grids):
    """The table for each grid as arrays of NumPy, on which the group acts without programs."""
    return jax.device_get(tables(position, grids))


@pytest.mark.parametrize("group", [FLIP, OCTIC], ids=lambda g: g.name)
@pytest.mark.parametrize("learned", [(4, 4), (5, 5), (3, 6)], ids=str)
@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (3, 6), (7, 2)], ids=str)
def test_table_is_fixed_by_the_group(group, learned, grid):
    upright, turned = on_host(learned_at(learned, group), grid, grid[::-1])
    for g in group.elements:
        # Taps of a resize are summed in another order after a turn: 16 products of size one, float32.
        expected = turned if g.count("r") % 2 else upright
        chex.assert_trees_all_close(expected, fields.act(g, upright, grid), atol=1e-5)


@pytest.mark.parametrize("sizes", [((5, 5), (8, 8)), ((5, 7), (6, 4)), ((6, 6), (3, 7))], ids=str)
def test_resizing_a_field_commutes_with_the_group(sizes):
    """Any field, not only one that the group fixes; DINOv2's offset, which breaks the mirrors, is caught."""
    before, after = sizes
    random = np.random.default_rng(0)
    field = Isotypic(
        *(random.normal(size=(n, before[0] * before[1], c)).astype(np.float32) for n, c in ((4, 2), (2, 4)))
    )

    def resized(field, before, after, offset=0.0):
        def leaf(x):
            return resize(x.reshape(len(x), *before, -1), after, offset=offset).reshape(len(x), -1, x.shape[-1])

        return jax.tree.map(leaf, field)

    @functools.partial(jax.jit, static_argnames="offset")
    def deviation(field, offset):
        worst = []
        for g in OCTIC.elements:
            turned = [size[::-1] if g.count("r") % 2 else size for size in sizes]
            first = resized(fields.act(g, field, before), *turned, offset)
            last = fields.act(g, resized(field, before, after, offset), after)
            worst += [jnp.abs(a - b).max() for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)]
        return jnp.stack(worst).max()

    assert deviation(field, 0.0) < 1e-5  # 16 products of size one, in another order
    assert deviation(field, 0.1) > 1e-2


@pytest.mark.parametrize("before", [(5, 5), (3, 6), (8, 8)], ids=str)
@pytest.mark.parametrize("after", [(4, 4), (7, 7), (6, 3)], ids=str)
def test_a_table_made_for_another_grid_is_fixed_by_the_group(before, after):
    old, new = learned_at(before, OCTIC), jax.tree.map(lambda a: a, learned_at(after, OCTIC, seed=1))
    for name, table in jax.jit(lambda old: old.tables(after))(old).items():
        assert getattr(new, name).shape == table.shape
        getattr(new, name).set_value(table)
    upright, turned = on_host(new, after, after[::-1])
    for g in OCTIC.elements:
        chex.assert_trees_all_close(turned if g.count("r") % 2 else upright, fields.act(g, upright, after), atol=1e-5)
    if after == (4, 4):  # on an even square nothing is lost
        chex.assert_trees_all_close([upright], on_host(old, after), atol=1e-5)


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
