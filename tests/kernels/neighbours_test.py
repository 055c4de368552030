"""Products of blocks with blocks beside them, against sums over indices on the torus."""

import functools

import jax
import numpy as np
import pytest

from equivit.kernels.neighbours import Neighbour, neighbour_products

WHICH = [
    Neighbour((0, 0), (0, 4), (0, 2)),
    Neighbour((1, -2), (1, 4), (0, 1)),
    Neighbour((0, 6), (0, 2), (1, 2)),  # beyond the map's end
    Neighbour((4, 1), (3, 4), (0, 2)),
]
STRIDE, CHANNELS = (4, 2), 3


def by_hand(x, which):
    """One product at a time, block by block: [B, entries, columns]."""
    h, w = x.shape[1] // STRIDE[0], x.shape[2] // STRIDE[1]
    blocks = x.reshape(len(x), h, STRIDE[0], w, STRIDE[1], CHANNELS).swapaxes(2, 3)
    total = 0
    for i, j in np.ndindex(h, w):
        beside = [
            blocks[:, (i + down) % h, (j + right) % w, slice(*rows), slice(*columns)].reshape(len(x), -1)
            for (down, right), rows, columns in which
        ]
        others = np.concatenate([*beside, np.ones((len(x), 1))], 1)
        total = total + blocks[:, i, j].reshape(len(x), -1, 1) * others[:, None]
    return total


@pytest.mark.parametrize("which", [WHICH, WHICH[:1], WHICH[2:3]], ids=["all", "the block itself", "in its row"])
@pytest.mark.parametrize("size", [(3, 5), (1, 1), (2, 7)], ids=str)
@pytest.mark.parametrize("implementation", ["auto", "reference", "tpu"])
def test_products_are_those_of_blocks_at_the_lags(implementation, size, which):
    """Blocks of 4 x 2 pixels; of some neighbours only a few rows and columns count."""
    shape = (2, size[0] * STRIDE[0], size[1] * STRIDE[1], CHANNELS)
    x = np.random.default_rng(0).normal(size=shape)
    form = functools.partial(neighbour_products, stride=STRIDE, which=which, implementation=implementation)
    with jax.enable_x64(True):
        found = jax.jit(form)(x)
    expected = by_hand(x, which)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())  # sums in another order


@pytest.mark.parametrize("implementation", ["reference", "tpu"])
def test_a_wrong_lag_is_caught(implementation):
    x = np.random.default_rng(0).normal(size=(2, 12, 10, CHANNELS)).astype(np.float32)
    moved = [one._replace(lag=(one.lag[0], one.lag[1] + 1)) for one in WHICH]
    found = neighbour_products(x, STRIDE, moved, implementation=implementation)
    assert np.abs(found - by_hand(x, WHICH)).max() > 1


@pytest.mark.parametrize("implementation", ["reference", "tpu"])
def test_devices_exchange_no_images(implementation):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((2 * len(jax.devices()), 12, 10, CHANNELS), np.float32, sharding=split)
    form = functools.partial(neighbour_products, stride=STRIDE, which=WHICH, implementation=implementation)
    text = jax.jit(form, out_shardings=split).lower(x).compile().as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="neighbour_products: implementation='cuda' is not one of"):
        neighbour_products(np.zeros((1, 4, 2, 1), np.float32), STRIDE, WHICH[:1], implementation="cuda")
