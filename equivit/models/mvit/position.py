"""Relative positions: one table for rows and one for columns, on a plane or a torus.

Sources: MViTv2 (arXiv 2112.01526), Section 4.1; A-RPE, "Making Vision Transformers Truly Shift-Equivariant", Eq. 24.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers.convolution import Pair
from equivit.layers.dense import WEIGHT_INIT
from equivit.layers.relative import resize_torus


class DecomposedPosition(nnx.Module):
    """The logits of relative positions: q . (R_rows[row distance] + R_columns[column distance]).

    Queries and keys are maps of the same image and may have different strides; distances are in steps of the finer
    one.  All heads share the tables.  For other map sizes they are resized linearly, as in the authors' detection code
    (detectron2); their classification code takes one size only.

    Shapes: q [*B, heads, hq wq, channels] -> [*B, heads, hq wq, hk wk].

    Args:
      grid: (h, w) of the finer map; the tables have 2 h - 1 and 2 w - 1 distances.
    """

    def __init__(self, grid: Pair, channels: int, *, rngs: nnx.Rngs):
        rows, columns = (WEIGHT_INIT(rngs.params(), (2 * size - 1, channels)) for size in grid)
        self.rows = nnx.Param(rows, product=True, decay=False)
        self.columns = nnx.Param(columns, product=True, decay=False)
        self.grid = grid

    def __call__(self, q: jax.Array, queries: Pair, keys: Pair, ahead: jax.Array | None = None) -> jax.Array:
        """The bias of all pairs, for maps of queries and keys of (h, w); `ahead` is for a torus, and unused here."""
        tables = (self.rows[...], self.columns[...])
        return bias(q, *map(of_pairs, tables, queries, keys))

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of these tables resized to another grid."""
        return {"rows": resize(self.rows[...], 2 * grid[0] - 1), "columns": resize(self.columns[...], 2 * grid[1] - 1)}

    def taken(self, other: "CircularPosition") -> dict[str, jax.Array]:
        """The parameters, by name, that read at each distance what a torus has there."""
        found = {"rows": other.rows[...], "columns": other.columns[...]}
        for (name, table), *sizes in zip(found.items(), other.stride, other.kv_stride, self.grid, strict=True):
            stride, kv_stride, size = sizes
            table = resize_circular(table, size)
            found[name] = table[..., line(size, kv_stride // min(stride, kv_stride)) % size, :]
        return found


class CircularPosition(nnx.Module):
    """The same on a torus, with one distance for each position of the map before pooling.

    Query i lies at position s_q i + a_q of that map, and key j at s_k j + a_k, modulo its size, with strides s and
    pooling phases a.  Distances therefore depend on a_q - a_k, which differs within a batch.

    Shapes: q [B, heads, hq wq, channels] -> [B, heads, hq wq, hk wk].

    Args:
      grid: (h, w) of the map before pooling; for other sizes the tables are resized around the torus.
      stride, kv_stride: strides of queries and of keys, (rows, columns).
    """

    def __init__(self, grid: Pair, channels: int, *, stride: Pair, kv_stride: Pair, rngs: nnx.Rngs):
        rows, columns = (WEIGHT_INIT(rngs.params(), (size, channels)) for size in grid)
        self.rows = nnx.Param(rows, product=True, decay=False)
        self.columns = nnx.Param(columns, product=True, decay=False)
        self.grid, self.stride, self.kv_stride = grid, stride, kv_stride

    def __call__(self, q: jax.Array, queries: Pair, keys: Pair, ahead: jax.Array | None = None) -> jax.Array:
        """The bias of all pairs, for maps of queries and keys of (h, w); `ahead` [B, 2] is a_q - a_k, or None for 0."""
        return bias(q, *(self._vectors(axis, queries[axis], keys[axis], ahead) for axis in (0, 1)))

    def _vectors(self, axis: int, queries: int, keys: int, ahead: jax.Array | None) -> jax.Array:
        """The vectors of all pairs along one axis, [queries, keys, C], or [B, 1, queries, keys, C] by phases."""
        step, kv_step = self.stride[axis], self.kv_stride[axis]
        size, least = step * queries, 1 - kv_step  # of a_q - a_k
        table = resize_circular((self.rows, self.columns)[axis][...], size)
        apart = step * np.arange(queries)[:, None] - kv_step * np.arange(keys)
        if ahead is None or step == kv_step == 1:
            return table[apart % size]
        each = np.arange(least, step)[:, None, None]  # few phase differences; a gather per pair and map is slow
        return table[(apart + each) % size][ahead[:, axis] - least][:, None]

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of these tables resized to another grid."""
        return {
            "rows": resize_circular(self.rows[...], grid[0]),
            "columns": resize_circular(self.columns[...], grid[1]),
        }

    def taken(self, other: DecomposedPosition) -> dict[str, jax.Array]:
        """The parameters, by name, that approximate positions on a plane; distance 0 is kept."""
        found = {"rows": other.rows[...], "columns": other.columns[...]}
        for (name, table), *sizes in zip(found.items(), self.stride, self.kv_stride, self.grid, strict=True):
            stride, kv_stride, size = sizes
            found[name] = resize_circular(folded(table, kv_stride // min(stride, kv_stride)), size)
        return found


def bias(q: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The products of queries and the vectors of their distances.

    Two small products, whose sum joins the logits.

    Shapes: q [*B, heads, hq wq, C], rows [*D, hq, hk, C], columns [*D, wq, wk, C] -> [*B, heads, hq wq, hk wk]; the
    axes D are absent or broadcast.
    """
    (*_, hq, hk, _), (*_, wq, wk, _) = rows.shape, columns.shape
    with jax.named_scope("attention"):
        maps = q.reshape(*q.shape[:-2], hq, wq, q.shape[-1])
        by_row = jnp.einsum("...yxc,...ykc->...yxk", maps, rows)
        by_column = jnp.einsum("...yxc,...xkc->...yxk", maps, columns)
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        total = by_row[..., :, None].astype(dtype) + by_column[..., None, :].astype(dtype)
        return total.reshape(*q.shape[:-1], hk * wk)


def of_pairs(table: jax.Array, queries: int, keys: int) -> jax.Array:
    """The vectors of all pairs along one axis, [distances, C] -> [queries, keys, C]."""
    return resize(table, 2 * max(queries, keys) - 1)[distances(queries, keys)]


def distances(queries: int, keys: int) -> np.ndarray:
    """The row of the table for each pair along one axis, [queries, keys].

    It is 0 from the first query to the last key.  If one size is not a multiple of the other, it is rounded down.
    """
    i, j = np.arange(queries)[:, None], np.arange(keys)[::-1]
    finer = max(queries, keys)
    return i * finer // queries + j * finer // keys


def line(size: int, step: int) -> np.ndarray:
    """The distance of each row of a table on a line, [2 size - 1].

    If keys are `step` apart, distances begin at step - size, from the last key to the first query.
    """
    return np.arange(2 * size - 1) - max(0, size - step)


def resize(table: jax.Array, size: int) -> jax.Array:
    """Linear resize of [*, distances, C] to `size` distances; a table of that size is returned unchanged."""
    if table.shape[-2] == size:
        return table
    dtype = jnp.promote_types(table.dtype, jnp.float32)
    matrix = linear(table.shape[-2], size).astype(dtype)
    return jnp.einsum("ts,...sc->...tc", matrix, table.astype(dtype)).astype(table.dtype)


@functools.lru_cache
def linear(size: int, target: int) -> np.ndarray:
    """The matrix [target, size] of torch's linear interpolation along one axis, with centres at half integers."""
    centres = np.clip((np.arange(target) + 0.5) * size / target - 0.5, 0, size - 1)
    return np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(size)))


def resize_circular(table: jax.Array, size: int) -> jax.Array:
    """Linear resize of [*, distances, C] around a circle to `size` distances; distance 0 stays 0."""
    return resize_torus(table[..., None, :], (size, 1))[..., 0, :]


def folded(table: jax.Array, step: int) -> jax.Array:
    """Fold a table of distances on a `line`, [*, 2 n - 1, C], to a circle of n positions, [*, n, C].

    Distances d and d - n coincide on a circle, which gets the mean of both if both exist; no pair is n apart.
    """
    size = (table.shape[-2] + 1) // 2
    distance = line(size, step)
    matrix = (distance % size == np.arange(size)[:, None]) & (distance < size)
    matrix = jnp.asarray(matrix / matrix.sum(1, keepdims=True), jnp.promote_types(table.dtype, jnp.float32))
    return jnp.einsum("ts,...sc->...tc", matrix, table.astype(matrix.dtype)).astype(table.dtype)
