"""Where windows may begin on a torus: how much their energies vary, against brute force."""

import jax
import numpy as np
import pytest

from equivit.models.swin import window

spread = jax.jit(window.spread, static_argnums=1)


def varied(x, size):
    """The variance of the mean norms of all windows, for each place where the first may begin: [p, q, B]."""
    norms = np.linalg.norm(x, axis=-1)
    found = np.zeros((*size, len(x)))
    for p, q in np.ndindex(*size):
        rows = [np.take(norms, range(i, i + size[0]), 1, mode="wrap") for i in range(p, p + x.shape[1], size[0])]
        cut = [
            np.take(r, range(j, j + size[1]), 2, mode="wrap") for r in rows for j in range(q, q + x.shape[2], size[1])
        ]
        found[p, q] = np.var([part.mean((1, 2)) for part in cut], axis=0)
    return found


@pytest.mark.parametrize(
    ("grid", "size", "places"),
    [
        ((4, 6), (2, 3), (2, 3)),
        ((9, 8), (3, 2), (3, 2)),
        ((6, 3), (3, 3), (3, 1)),  # one window spans the columns: the same windows for each
        ((2, 6), (2, 3), (1, 3)),
        ((5, 4), (1, 2), (1, 2)),
        ((3, 4), (3, 4), (1, 1)),  # one window in all
    ],
    ids=str,
)
def test_spread_of_windows(grid, size, places):
    x = np.random.default_rng(0).normal(size=(2, *grid, 3))
    with jax.enable_x64(True):
        found, at = jax.device_get(spread(x, size))
    assert at == places and found.shape == (2, places[0] * places[1])
    expected = varied(x, size)
    assert np.ptp(expected, (0, 1)).min() > 1e-3 or places == (1, 1)
    one_each = expected[: places[0], : places[1]]
    np.testing.assert_allclose(found, one_each.reshape(-1, 2).T, rtol=0, atol=1e-14)
    again = np.tile(one_each, (size[0] // places[0], size[1] // places[1], 1))  # what is left out is a repetition
    np.testing.assert_allclose(expected, again, rtol=0, atol=1e-14)


def test_spread_is_in_float32():
    """The variance of energies that are nearly alike is not that of what bfloat16 makes of them."""
    x = np.random.default_rng(1).normal(1, 0.01, size=(1, 8, 8, 64)).astype("bfloat16")
    found, _ = spread(x, (2, 2))
    assert found.dtype == np.float32
    expected = varied(x.astype(np.float64), (2, 2)).reshape(4)
    assert np.ptp(expected) > 1e-3 * expected.max()
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)  # of norms near 8, whose rounding is 5e-7
