"""Relative positions and max-pools, against loops over pairs of tokens and over neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.layers.decomposed_position import DecomposedPosition, distances
from equivit.layers.pooling_attention import max_pool

# Queries, keys, and the distances by hand; of the last two no map has whole numbers of places for each of the other.
AXES = [
    (3, 3, [[2, 1, 0], [3, 2, 1], [4, 3, 2]]),
    (4, 2, [[2, 0], [3, 1], [4, 2], [5, 3]]),
    (2, 4, [[3, 2, 1, 0], [5, 4, 3, 2]]),
    (1, 1, [[0]]),
    (3, 2, [[1, 0], [2, 1], [3, 2]]),
    (2, 3, [[2, 1, 0], [3, 2, 1]]),
]


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("queries", "keys", "expected"), AXES)
def test_distances(queries, keys, expected):
    np.testing.assert_array_equal(distances(queries, keys), expected)


def original(queries, keys):
    """As the official code has it, in float32."""
    steps = max(keys / queries, 1.0), max(queries / keys, 1.0)
    i, j = np.arange(queries, dtype=np.float32)[:, None], np.arange(keys, dtype=np.float32)
    return (i * steps[0] - j * steps[1] + (keys - 1) * steps[1]).astype(int)


def test_distances_are_the_original_ones():
    """Where strides divide.  Elsewhere rounding may make them one less there, as of 39 places and 10."""
    for size, stride in np.ndindex(60, 4):
        fine, coarse = (size + 1) * (stride + 1), size + 1
        for pair in ((fine, coarse), (coarse, fine)):
            np.testing.assert_array_equal(distances(*pair), original(*pair))
    assert set((distances(39, 10) - original(39, 10)).flat) == {0, 1}


@pytest.mark.parametrize("learned", [(4, 6), (3, 6)], ids=["same size", "resized"])
def test_each_pair_reads_its_two_distances(learned):
    """Of 4 x 3 queries and 2 x 6 keys, from tables for 4 x 6 places."""
    abstract = jax.eval_shape(lambda: DecomposedPosition(learned, 5, rngs=nnx.Rngs(0)))
    arrays = {name: random(*a.shape) for name, a in logical.take(abstract).items()}
    position, q = logical.put(abstract, jax.tree.map(jnp.asarray, arrays)), random(2, 1, 12, 5)
    found = jax.jit(lambda m, q: m(q, (4, 3), (2, 6)))(position, q)
    rows, columns = arrays["rows"], arrays["columns"]
    if learned == (3, 6):  # 5 distances become 7, by linear interpolation between centres
        at = (np.arange(7) + 0.5) * 5 / 7 - 0.5
        rows = np.stack([np.interp(at, np.arange(5), channel) for channel in rows.T], axis=1)
    for y, x, v, u in np.ndindex(4, 3, 2, 6):
        vector = rows[y - 2 * v + 2] + columns[2 * x - u + 5]
        np.testing.assert_allclose(found[..., 3 * y + x, 6 * v + u], q[..., 3 * y + x, :] @ vector, atol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("stride", [(2, 2), (1, 2)], ids=str)
def test_max_pool(mode, stride):
    """On 5 x 4 places, all negative: zeros beyond the ends would be the largest."""
    x = -np.abs(random(2, 5, 4, 3))
    expected = np.zeros((2, -(-5 // stride[0]), 2, 3), np.float32)
    for i, j in np.ndindex(*expected.shape[1:3]):
        rows, columns = (np.arange(step * n - 1, step * n + 2) for step, n in zip(stride, (i, j), strict=True))
        if mode == "zeros":
            rows, columns = (places[(places >= 0) & (places < n)] for places, n in ((rows, 5), (columns, 4)))
        expected[:, i, j] = x[:, rows[:, None] % 5, columns % 4].max((1, 2))
    np.testing.assert_array_equal(jax.jit(lambda x: max_pool(x, stride, mode))(x), expected)
