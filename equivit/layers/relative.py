"""Attention over a whole torus, by content and relative position.

A table has a vector for each distance (rows, columns) modulo the grid, which is added to the keys: the logit of query i
and key j is q_i (k_j + R[i - j]) / sqrt(d).  Positions carry direction, and a shift of all tokens changes nothing.
Distances are defined as in A-RPE ("Making Vision Transformers Truly Shift-Equivariant", Eq. 24), and queries read them
as in MViTv2 (arXiv 2112.01526, Eq. 4).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.derivatives import linear
from equivit.kernels.attention import reference
from equivit.layers import dense, isotypic
from equivit.layers.grid import Layout, grid_of
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC, Group

Pair = tuple[int, int]


class Distances(nnx.Module):
    """A vector for each distance.

    Shapes: (h, w) -> [h w, channels], row by row.

    Args:
      grid: (h, w) of the learned table, which is resized around the torus for other grids.
      channels: of a head; the heads share the table.
    """

    def __init__(self, grid: Pair, channels: int, *, rngs: nnx.Rngs):
        self.table = nnx.Param(dense.WEIGHT_INIT(rngs.params(), (*grid, channels)), decay=False)
        self.grid = grid

    def __call__(self, grid: Pair) -> jax.Array:
        table = resize_torus(self.table[...], grid)
        return table.reshape(-1, table.shape[-1])

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of this table resized to another grid."""
        return {"table": resize_torus(self.table[...], grid)}


class IsotypicDistances(nnx.Module):
    """An equivariant table of distances: R[g d] = g R[d], so its products with queries are invariant.

    It is the group average of an unconstrained table; for OCTIC a square one with the longer side of `grid`.

    Shapes: (h, w) -> [h w, channels], a head's vector as `isotypic.Attention` orders it.

    Args:
      grid: (h, w) of the learned table, which is resized around the torus for other grids.
      channels: of a head, a multiple of the order of the group; the heads share the table.
    """

    def __init__(self, grid: Pair, channels: int, *, group: Group, rngs: nnx.Rngs):
        c, size = channels // group.order, _domain(grid, group)
        init = dense.WEIGHT_INIT
        lines = init(rngs.params(), (len(group.lines), *size, c))
        self.lines = nnx.Param(lines, tensors=isotypic.line_names(group), decay=False)
        planes = init(rngs.params(), (*size, 2 * c)) if group.planes else None
        self.planes = None if planes is None else nnx.Param(planes, tensors="E", decay=False)
        self.grid = grid

    def __call__(self, grid: Pair) -> jax.Array:
        planes = None if self.planes is None else self.planes[...][None]
        field = fields.symmetric(Isotypic(self.lines[...], planes))
        leaves = (jnp.moveaxis(resize_torus(leaf, grid), 0, -2) for leaf in jax.tree.leaves(field))
        return jnp.concatenate([leaf.reshape(math.prod(grid), -1) for leaf in leaves], axis=-1)

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of this table resized to another grid."""
        size = _domain(grid, OCTIC) if self.planes is not None else grid
        named = {"lines": self.lines, "planes": self.planes}
        return {name: resize_torus(table[...], size) for name, table in named.items() if table is not None}


def _domain(grid: Pair, group: Group) -> Pair:
    return (max(grid), max(grid)) if group is OCTIC else grid


def resize_torus(table: jax.Array, grid: Pair) -> jax.Array:
    """Linear resize of a table [*, rows, columns, C] of distances on a torus to `grid`; distance 0 stays 0."""
    if table.shape[-3:-1] == tuple(grid):
        return table
    rows, columns = (_linear(*sizes).astype(table.dtype) for sizes in zip(table.shape[-3:-1], grid, strict=True))
    return jnp.einsum("hr,wc,...rcd->...hwd", rows, columns, table)


@functools.lru_cache
def _linear(size: int, target: int) -> np.ndarray:
    """The matrix [target, size] of linear interpolation around a circle, symmetric in direction."""
    place = np.arange(target) * size / target
    apart = np.abs(place[:, None] - np.arange(size))
    return np.maximum(1 - np.minimum(apart, size - apart), 0)


@functools.lru_cache
def pairs(grid: Pair) -> np.ndarray:
    """The distance from each key to each query, modulo the grid, as an index into [h w]: [h w, h w]."""
    h, w = grid
    rows, columns = np.divmod(np.arange(h * w, dtype=np.int32), w)
    return (rows[:, None] - rows) % h * w + (columns[:, None] - columns) % w


def attend(q: jax.Array, k: jax.Array, v: jax.Array, vectors: jax.Array, pairs: np.ndarray) -> jax.Array:
    """softmax(q (k + r)^T / sqrt(d)) v for each head, where r is the vector of the distance from key to query.

    For the P prefix tokens, which have no position, r is 0.

    Shapes: q, k and v [*B, H, P + n, d], vectors [m, d] -> [*B, H, P + n, d].

    Args:
      pairs: [n, n], the distance of each query from each key among the n tokens of the grid, as an index into
        `vectors`; each row is a permutation.
    """
    with jax.named_scope("attention"):
        return reference.weighted_sum(_logits(q, k, vectors, pairs), v)


def weights(q: jax.Array, k: jax.Array, vectors: jax.Array, pairs: np.ndarray) -> jax.Array:
    """The weights in `attend`, [*B, H, P + n, P + n], in at least float32."""
    with jax.named_scope("attention"):
        return jax.nn.softmax(_logits(q, k, vectors, pairs))


def _logits(q: jax.Array, k: jax.Array, vectors: jax.Array, pairs: np.ndarray) -> jax.Array:
    prefix = q.shape[-2] - len(pairs)
    near = _by_pair(reference.logits(q[..., prefix:, :], vectors), pairs)
    return reference.logits(q, k) + jnp.pad(near, [(0, 0)] * (near.ndim - 2) + [(prefix, 0)] * 2)


def _by_pair(x: jax.Array, pairs: np.ndarray) -> jax.Array:
    """x[..., i, pairs[i, j]] for each i and j; rows of pairs are permutations, so the gradient is a gather too."""

    def reader(pairs):
        return lambda _, x: jnp.take_along_axis(x, pairs.reshape(*(1,) * (x.ndim - 2), *pairs.shape), -1)

    read, transpose = reader(pairs), reader(pairs.argsort(1))
    function = jax.custom_jvp(functools.partial(read, ()))
    function.defjvp(lambda primals, slopes: (function(*primals), linear(read, transpose, (), *slopes)))
    return function(x)


class _ByDistance:
    """The methods of an attention with a vector for each distance, `distances`."""

    def __call__(self: Any, x: Any, layout: Layout | None = None) -> Any:
        grid = grid_of(layout, "relative positions")
        q, k, v = self.heads(x)
        return self.projected(attend(q, k, v, self.distances(grid), pairs(grid)))

    def weights(self: Any, x: Any, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        grid = grid_of(layout, "relative positions")
        q, k, _ = self.heads(x)
        return weights(q, k, self.distances(grid), pairs(grid))[..., :rows, :]


class Attention(_ByDistance, dense.Attention):
    """`dense.Attention` with a vector for each distance, learned for `grid`."""

    def __init__(self, width: int, num_heads: int, grid: Pair, *, rngs: nnx.Rngs, **options):
        super().__init__(width, num_heads, rngs=rngs, **options)
        self.distances = Distances(grid, width // num_heads, rngs=rngs)


class IsotypicAttention(_ByDistance, isotypic.Attention):
    """`isotypic.Attention` with a field of distances, learned for `grid`."""

    def __init__(self, width: int, num_heads: int, grid: Pair, *, group: Group, rngs: nnx.Rngs, **options):
        super().__init__(width, num_heads, group=group, rngs=rngs, **options)
        self.distances = IsotypicDistances(grid, width // num_heads, group=group, rngs=rngs)
