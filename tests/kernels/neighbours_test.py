"""Blocks beside blocks, against indices on the torus."""

import jax
import numpy as np
import pytest

from equivit.kernels.neighbours import Neighbour, neighbours

WHICH = [
    Neighbour((0, 0), (0, 4), (0, 2)),
    Neighbour((1, -2), (1, 4), (0, 1)),
    Neighbour((0, 6), (0, 2), (1, 2)),  # beyond the map's end
    Neighbour((4, 1), (3, 4), (0, 2)),
]


@pytest.mark.parametrize("implementation", ["auto", "reference", "tpu"])
def test_each_pixel_comes_from_the_block_at_the_lag(implementation):
    """3 x 5 blocks of 4 x 2 pixels."""
    planes = np.random.default_rng(0).normal(size=(2, 4, 2, 3, 3, 5)).astype(np.float32)
    every = jax.jit(lambda x: neighbours(x, WHICH, implementation=implementation))(planes)
    for found, (lag, rows, columns) in zip(every, WHICH, strict=True):
        for i, j in np.ndindex(3, 5):
            there = planes[:, slice(*rows), slice(*columns), :, (i + lag[0]) % 3, (j + lag[1]) % 5]
            np.testing.assert_array_equal(np.asarray(found)[..., i, j], there)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="neighbours: implementation='cuda' is not one of"):
        neighbours(np.zeros((1, 2, 2, 1, 2, 2), np.float32), WHICH[:1], implementation="cuda")
