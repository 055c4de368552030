"""Grids of tokens against the pixels of their images: where a token lies, and what turns and shifts make of that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import testing
from equivit.models.features import Grid
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

SIZE, STRIDE = (12, 10), (4, 2)
OFFSETS = np.array([[[0, 0], [3, 1]], [[11, 9], [5, 8]]], np.int32)  # of two batch axes, more than a stride too
both = pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])


def places(kind=np.asarray):
    """Tokens whose values are the pixel (row, column) at which they begin."""
    i, j = np.meshgrid(np.arange(3), np.arange(5), indexing="ij")
    begins = OFFSETS[:, :, None, None] + np.stack([i * STRIDE[0], j * STRIDE[1]], axis=-1)
    return Grid(kind(begins % SIZE), STRIDE, kind(OFFSETS))


@both
def test_each_pixel_gets_the_token_that_covers_it(kind):
    seen = np.asarray(places(kind).pixels())
    assert seen.shape == (2, 2, *SIZE, 2)
    pixels = np.stack(np.meshgrid(*map(np.arange, SIZE), indexing="ij"), axis=-1)
    into = (pixels - seen) % SIZE  # how far into its token each pixel lies
    assert (into < STRIDE).all() and (into == (pixels - OFFSETS[:, :, None, None]) % STRIDE).all()


@both
def test_maps_are_moved_there_and_back(kind):
    maps = np.random.default_rng(0).integers(0, 9, (2, 2, *SIZE))
    grid = places(kind)
    framed = np.asarray(grid.to_grid(kind(maps)))
    for at in np.ndindex(2, 2):
        np.testing.assert_array_equal(framed[at], np.roll(maps[at], tuple(-OFFSETS[at]), (0, 1)))
    np.testing.assert_array_equal(grid.to_image(kind(framed)), maps)


@pytest.mark.parametrize("element", OCTIC.elements)
def test_tokens_turn_with_the_image(element):
    """With a label in each pixel, the tokens keep theirs; strides and offsets swap with the axes."""
    grid = places(jnp.asarray)
    turned = grid.turned(element)
    np.testing.assert_array_equal(turned.pixels(), fields.act_on_image(element, grid.pixels()))
    back = turned.turned(OCTIC.inverse(element))
    assert back.stride == grid.stride and (back.offset == grid.offset).all() and (back.values == grid.values).all()


@pytest.mark.slow
def test_pixels_move_with_the_image():
    def pixels(x):  # one pixel decides where the grid begins
        first = jnp.stack(jnp.divmod(x[..., 0].reshape(len(x), -1).argmax(1), x.shape[2]), axis=-1)
        values = Grid(x, (1, 1), first).to_grid(x)[:, ::4, ::2]
        return Grid(values, STRIDE, first).pixels()

    x = jax.random.normal(jax.random.key(0), (2, *SIZE, 3))
    testing.assert_shift_equivariant(pixels, x, output="image", tol=0)
