"""Relative positions that queries read: one table for rows and one for columns.

Source: MViTv2 (arXiv 2112.01526), Section 4.1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers.convolution import Pair
from equivit.layers.dense import WEIGHT_INIT


class DecomposedPosition(nnx.Module):
    """What positions add to the logits: q . (R_rows[distance of rows] + R_columns[distance of columns]).

    Queries and keys are maps of the same image and may have different strides; distances are in steps of the finer
    one.  All heads share the tables.  For maps of other sizes they are resized linearly, as in the authors' code for
    detection (detectron2); their code for classification takes one size only.

    Shapes: q [*B, heads, hq wq, channels] -> [*B, heads, hq wq, hk wk].

    Args:
      grid: (h, w) of the finer of both maps; the tables have 2 h - 1 and 2 w - 1 distances.
    """

    def __init__(self, grid: Pair, channels: int, *, rngs: nnx.Rngs):
        rows, columns = (WEIGHT_INIT(rngs.params(), (2 * size - 1, channels)) for size in grid)
        self.rows = nnx.Param(rows, product=True, decay=False)
        self.columns = nnx.Param(columns, product=True, decay=False)
        self.grid = grid

    def __call__(self, q: jax.Array, queries: Pair, keys: Pair) -> jax.Array:
        """The bias of all pairs.  It is two small products and their sum, which XLA adds where it reads the logits.

        Args:
          queries, keys: (h, w) of the maps.
        """
        with jax.named_scope("attention"):
            maps = q.reshape(*q.shape[:-2], *queries, q.shape[-1])
            rows, columns = (
                of_pairs(table[...], *sizes)
                for table, *sizes in zip((self.rows, self.columns), queries, keys, strict=True)
            )
            by_row = jnp.einsum("...yxc,ykc->...yxk", maps, rows)
            by_column = jnp.einsum("...yxc,xkc->...yxk", maps, columns)
            dtype = jnp.promote_types(q.dtype, jnp.float32)
            bias = by_row[..., :, None].astype(dtype) + by_column[..., None, :].astype(dtype)
            return bias.reshape(*q.shape[:-1], keys[0] * keys[1])

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of these tables resized to another grid."""
        return {"rows": resize(self.rows[...], 2 * grid[0] - 1), "columns": resize(self.columns[...], 2 * grid[1] - 1)}


def of_pairs(table: jax.Array, queries: int, keys: int) -> jax.Array:
    """The vectors of all pairs along one axis, [distances, C] -> [queries, keys, C]."""
    return resize(table, 2 * max(queries, keys) - 1)[distances(queries, keys)]


def distances(queries: int, keys: int) -> np.ndarray:
    """The row of the table for each pair along one axis, [queries, keys].

    It is 0 from the first query to the last key.  Where one map has not a whole number of places for each of the other,
    it is rounded down.
    """
    i, j = np.arange(queries)[:, None], np.arange(keys)[::-1]
    finer = max(queries, keys)
    return i * finer // queries + j * finer // keys


def resize(table: jax.Array, size: int) -> jax.Array:
    """Linear resize of [*, distances, C] to `size` distances; a table that already has it is returned."""
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
