"""Relative positions and max-pools, against loops over pairs of tokens and over neighbours; blocks on a torus."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.layers import dense
from equivit.layers.grid import Layout
from equivit.models.mvit import pooling as adaptive_pooling
from equivit.models.mvit.attention import PoolingAttention, PoolingBlock, max_pool
from equivit.models.mvit.position import CircularPosition, DecomposedPosition, distances, folded
from equivit.symmetry import shifts

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
    """For 4 x 3 queries and 2 x 6 keys, from tables for 4 x 6 places."""
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


# On a torus


@pytest.mark.parametrize("learned", [(8, 12), (8, 6)], ids=["same size", "resized"])
def test_each_pair_reads_its_two_distances_around_the_torus(learned):
    """For 2 x 6 queries and 4 x 4 keys, at different phases of a map of 8 x 12 places."""
    strides = dict(stride=(4, 2), kv_stride=(2, 3))
    abstract = jax.eval_shape(lambda: CircularPosition(learned, 5, **strides, rngs=nnx.Rngs(0)))
    arrays = {name: random(*a.shape) for name, a in logical.take(abstract).items()}
    position, q = logical.put(abstract, jax.tree.map(jnp.asarray, arrays)), random(3, 2, 12, 5)
    ahead = np.array([(3, -2), (-1, 1), (0, 0)], np.int32)
    found = jax.jit(lambda m, q, ahead: m(q, (2, 6), (4, 4), ahead))(position, q, ahead)
    rows, columns = arrays["rows"], arrays["columns"]
    if learned == (8, 6):  # the new places are between the old ones, the last of which is a neighbour of the first
        columns = np.stack([columns, (columns + np.roll(columns, -1, 0)) / 2], 1).reshape(12, 5)
    for b, y, x, v, u in np.ndindex(3, 2, 6, 4, 4):
        down, right = ahead[b] + (4 * y - 2 * v, 2 * x - 3 * u)
        expected = q[b, :, 6 * y + x] @ (rows[down % 8] + columns[right % 12])
        np.testing.assert_allclose(found[b, :, 6 * y + x, 4 * v + u], expected, atol=1e-5)


def test_tables_on_a_line_are_folded():
    """For 4 places: distances from -3 to 3, or, if keys are two places apart, from -2 to 3 and one that no pair has."""
    table = np.arange(7, dtype=np.float32)[:, None]
    np.testing.assert_allclose(folded(table, 1)[:, 0], [3, (4 + 0) / 2, (5 + 1) / 2, (6 + 2) / 2])
    np.testing.assert_allclose(folded(table, 2)[:, 0], [2, 3, (4 + 0) / 2, (5 + 1) / 2])
    np.testing.assert_allclose(folded(table, 4)[:, 0], [0, 1, 2, 3])  # one key


GRID = (8, 4)
STRIDES = [((1, 1), (4, 4)), ((2, 2), (2, 2)), ((2, 1), (1, 2))]


def block(stride, kv_stride, **options):
    """A block of two heads that widens, in float64; all parameters are random."""
    options = dict(padding="circular", adaptive=True, circular=True) | options
    size = dict(stride=stride, kv_stride=kv_stride, grid=GRID)

    def make():
        rngs = nnx.Rngs(0)
        return PoolingBlock(
            norm1=dense.LayerNorm(4),
            attention=PoolingAttention(4, 8, 2, **size, eps=1e-6, **options, rngs=rngs),
            shortcut=dense.Linear(4, 8, rngs=rngs),
            norm2=dense.LayerNorm(8),
            mlp=dense.Mlp(8, 8, rngs=rngs),
            mlp_shortcut=None,
        )

    abstract, rng = jax.eval_shape(make), np.random.default_rng(0)
    arrays = {name: rng.normal(size=a.shape) for name, a in sorted(logical.take(abstract).items())}
    return logical.put(abstract, {name: jnp.asarray(array) for name, array in arrays.items()})


def deviation(stride, kv_stride, **options):
    """How far a block is from following all shifts of its map, behind a token that is not shifted."""
    with jax.enable_x64(True):
        rng, places = np.random.default_rng(1), list(np.ndindex(*GRID))
        x, first = rng.normal(size=(1, *GRID, 4)), rng.normal(size=(len(places), 1, 4))
        moved = np.concatenate([np.roll(x, shift, (1, 2)) for shift in places]).reshape(len(places), -1, 4)
        run = jax.jit(lambda m, x: m((x, {}), Layout(GRID, 1)))
        y, chosen = run(
            block(stride, kv_stride, **options), np.concatenate([first[:1].repeat(len(first), 0), moved], 1)
        )
        phase = np.zeros((len(places), 2), np.int32)
        if "q" in chosen:
            phase = np.stack(np.divmod(chosen["q"].index, stride[1]), 1)
        maps = y[:, 1:].reshape(-1, GRID[0] // stride[0], GRID[1] // stride[1], 8)
        maps = np.asarray(shifts.polyphase_up(maps, phase, stride))
        back = np.concatenate([np.roll(a[None], (-i, -j), (1, 2)) for a, (i, j) in zip(maps, places, strict=True)])
        return max(np.abs(back - back[0]).max() / np.abs(back).max(), np.abs(y[:, 0] - y[0, 0]).max())


@pytest.mark.parametrize("select", ["output", "input"])
@pytest.mark.parametrize("strides", STRIDES, ids=str)
def test_adaptive_blocks_follow_every_shift(strides, select):
    assert deviation(*strides, select=select) < 1e-12


def each_by_itself(pools, maps, select):
    """Wrong: values at another phase than their keys."""
    parts = [POOLED((pool,), (x,), select) for pool, x in zip(pools, maps, strict=True)]
    return tuple(y for (y,), _ in parts), parts[0][1]


POOLED = adaptive_pooling.pooled


def test_wrong_blocks_are_caught(monkeypatch):
    strides = STRIDES[1]
    assert deviation(*strides, circular=False) > 1e-2
    assert deviation(*strides, padding="zeros") > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(adaptive_pooling, "pooled", each_by_itself)
        assert deviation(*STRIDES[0]) > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(PoolingAttention, "_ahead", lambda self, chosen: None)
        assert deviation(*strides) > 1e-2


def test_gradients_are_those_of_what_was_chosen():
    """Against those of all phases, of which one is kept; on a black map they are finite."""
    with jax.enable_x64(True):
        attention = block(*STRIDES[1], padding="zeros").attention  # where a phase is chosen, there is a torus
        pools = (attention.pool_k, attention.pool_v)
        maps = tuple(np.random.default_rng(k).normal(size=(3, 2, *GRID, 4)) for k in range(2))

        def by_definition(pools, maps):
            every = tuple(pool.everywhere(x) for pool, x in zip(pools, maps, strict=True))
            choice = shifts.strongest(adaptive_pooling.norms(every, (2, 2)))
            phase = shifts.phases(choice.index, (2, 2))
            kept = (shifts.component(jnp.moveaxis(y, 1, 3), phase, 2) for y in every)
            return tuple(jnp.moveaxis(y, 3, 1) for y in kept), choice

        def slopes(function):
            def loss(pools, maps):
                (k, v), choice = function(pools, maps)
                return (jnp.sin(k) + jnp.cos(v)).sum(), (k, v, choice)

            return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

        at_the_lattice, choice = adaptive_pooling.pooled(pools, maps, "input")
        for pool, x, y in zip(pools, maps, at_the_lattice, strict=True):
            whole = jnp.moveaxis(pool.everywhere(x), 1, 3)
            one = jnp.moveaxis(shifts.component(whole, shifts.phases(choice.index, (2, 2)), 2), 3, 1)
            np.testing.assert_allclose(y, one, rtol=0, atol=1e-12)
        ours = slopes(functools.partial(adaptive_pooling.pooled, select="output"))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ours(pools, jax.tree.map(np.zeros_like, maps))))
        found, expected = ours(pools, maps), slopes(by_definition)(pools, maps)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))
