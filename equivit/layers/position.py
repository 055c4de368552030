"""Learned positional tables for any grid, and their resizing.

A table is learned for one grid and resized to the grid of the image, in at least float32, by the bicubic rule that the
weights expect.  The default is torch's bicubic without antialiasing (a = -0.75, clamped borders), which commutes with
flips and quarter turns up to rounding.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers.isotypic import channels, line_names
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, TokensT
from equivit.symmetry.groups import FLIP, OCTIC, Group


def add_positions(tokens: TokensT, position: TokensT) -> TokensT:
    """Tokens [*B, N, C], or a field, and positions of the same kind without batch axes, in the dtype of the tokens."""

    def add(leaf, p):  # [4, N, C] -> [4, 1, ..., N, C]: the axes of irreps align and the batch axes broadcast
        return leaf + jnp.expand_dims(p, range(p.ndim - 2, leaf.ndim - 2)).astype(leaf.dtype)

    return jax.tree.map(add, tokens, position)


class Position(nnx.Module):
    """An unconstrained table for a plain transformer.

    Shapes: (h, w) -> [h w, width], in row-major order.

    Args:
      grid: (rows, columns) of the learned table.
      antialias: low-pass filter when shrinking (a = -0.5), as in timm and DINOv2 with registers.
      offset: added to the target size when the scale is computed, 0.1 in DINOv2 without registers.  It breaks mirror
        symmetry, so it is for plain models only.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        *,
        std: float = 0.02,
        antialias: bool = False,
        offset: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.table = nnx.Param(std * jax.random.normal(rngs.params(), (*grid, width)), decay=False)
        self.grid, self.antialias, self.offset = grid, antialias, offset

    def __call__(self, grid: tuple[int, int]) -> jax.Array:
        table = resize(self.table[...], grid, antialias=self.antialias, offset=self.offset)
        return table.reshape(-1, table.shape[-1])

    def tables(self, grid: tuple[int, int], offset: float = 0.0, *, antialias: bool = False) -> dict[str, jax.Array]:
        """The parameters, by name, of this table resized to another grid with the given offset.

        It is antialiased if either this table or the argument says so.
        """
        return {"table": resize(self.table[...], grid, antialias=self.antialias or antialias, offset=offset)}

    def taken(self, position: "IsotypicPosition") -> dict[str, jax.Array]:
        """The parameters, by name, that give the dense tokens after a dropped symmetry the positions of a field."""
        table = position(self.grid)
        dense = fields.to_dense(table) if table.group is OCTIC else jnp.concatenate(list(fields.to_regular(table)), -1)
        return {"table": dense.reshape(*self.grid, -1)}


class IsotypicPosition(nnx.Module):
    """A table that is invariant under the group: a fundamental domain is learned and unfolded (Eq. 11).

    OCTIC learns a quarter of an even square, so an odd or non-square `grid` uses the next even square, resized.
    FLIP learns the left half of a grid of even width.

    Shapes: (h, w) -> field of h w tokens without batch axes, [4, h w, C] and [2, h w, 2C].
    """

    def __init__(self, grid: tuple[int, int], width: int, *, group: Group, std: float, rngs: nnx.Rngs):
        c, domain = channels("IsotypicPosition", width, group), _domain(grid, group)
        lines = std * jax.random.normal(rngs.params(), (len(group.lines), *domain, c))
        self.lines = nnx.Param(lines, tensors=line_names(group), decay=False)
        planes = std * jax.random.normal(rngs.params(), (2, *domain, c)) if group.planes else None
        self.planes = nnx.Param(planes, tensors=("E1", "E2"), decay=False) if group.planes else None
        self.grid = grid[0], grid[1]

    def __call__(self, grid: tuple[int, int]) -> Isotypic:
        planes = None if self.planes is None else jnp.concatenate(list(self.planes[...]), axis=-1)[None]
        table = fields.unfold(Isotypic(self.lines[...], planes))
        return jax.tree.map(lambda leaf: resize(leaf, grid).reshape(len(leaf), -1, leaf.shape[-1]), table)

    def tables(self, grid: tuple[int, int]) -> dict[str, jax.Array]:
        """The parameters, by name, of this table resized to another grid: a part of the resized table."""
        return _learned(self(_whole(grid, self.group)), grid)

    def taken(self, position: Position) -> dict[str, jax.Array]:
        """The parameters, by name, of the table nearest to an unconstrained one: its mean over the group.

        Channels are read as the dense tokens of `Position.taken`, the other direction.
        """
        group, whole = self.group, _whole(self.grid, self.group)
        table = position(whole)
        if group is OCTIC:
            field = fields.from_dense(table, group)
        else:
            field = fields.from_regular(jnp.stack(jnp.split(table, group.order, axis=-1)))
        mean: Any = sum((fields.act(g, field, whole) for g in group.elements[1:]), field) / group.order
        return _learned(mean, self.grid)

    @property
    def group(self) -> Group:
        """The group of the fields."""
        return FLIP if self.planes is None else OCTIC


def _domain(grid: tuple[int, int], group: Group) -> tuple[int, int]:
    """The fundamental domain of the grid of a learned table."""
    h, w = grid
    if group is FLIP:
        return h, math.ceil(w / 2)
    half = math.ceil(max(h, w) / 2)
    return half, half


def _whole(grid: tuple[int, int], group: Group) -> tuple[int, int]:
    """The grid of the unfolded table."""
    h, w = _domain(grid, group)
    return (2 * h if group is OCTIC else h), 2 * w


def _learned(whole: Isotypic, grid: tuple[int, int]) -> dict[str, jax.Array]:
    """The parameters, by name, that unfold to a symmetric table over the `_whole` grid."""
    h, w = _domain(grid, whole.group)

    def part(leaf):
        return leaf.reshape(len(leaf), -1, 2 * w, leaf.shape[-1])[:, :h, :w]

    if whole.planes is None:
        return {"lines": part(whole.lines)}
    # The diagonal mirror maps the quarter to itself.  Unfolding adds a line to its equal mirror image, so it is halved
    # here; it also adds the rows of E to each other.  The two copies of E are concatenated.
    return {"lines": part(whole.lines) / 2, "planes": jnp.stack(jnp.split(part(whole.planes)[0], 2, axis=-1))}


@dataclasses.dataclass(frozen=True)  # equality lets equal models share compiled functions
class FixedPosition:
    """Base of a fixed table, computed for the requested grid and never resized.

    Shapes: (h, w) -> [h w, width], in row-major order.

    Raises:
      ValueError: 4 does not divide the width.
    """

    width: int

    def __post_init__(self):
        if self.width % 4:
            name, near = type(self).__name__, errors.multiples(self.width, 4)
            raise ValueError(f"{name}: width={self.width} must be divisible by 4; {near}.")

    def __call__(self, grid: tuple[int, int]) -> jax.Array:
        return jnp.asarray(self.table(grid))

    def table(self, grid: tuple[int, int]) -> np.ndarray:
        """The table in float32, computed in float64 as in the originals."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SinCos(FixedPosition):
    """The table of MAE: [sin x, cos x, sin y, cos y], x the column, y the row, width / 4 frequencies each.

    Frequency i is 10000^(-i / (width / 4)), or with `inclusive` 10000^(-i / (width / 4 - 1)), as in the JAX version
    of MAE.
    """

    inclusive: bool = False

    def table(self, grid: tuple[int, int]) -> np.ndarray:
        number = self.width // 4
        frequencies = 10000.0 ** (-np.arange(number) / max(1, number - self.inclusive))
        y, x = (axis.reshape(-1, 1) * frequencies for axis in np.indices(grid))
        return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class FourierCode(FixedPosition):
    """The code of DETR and BiXT: [y, x], with sin and cos interleaved over width / 4 frequencies per axis.

    Row i of h has the angle 2 pi (i + 1) / h, columns likewise, and frequency j is 10000^(-j / (width / 4)).  A code
    thus depends on the relative position in the image, not on pixels.
    """

    def table(self, grid: tuple[int, int]) -> np.ndarray:
        number = self.width // 4
        frequencies = 10000.0 ** (-np.arange(number) / number)
        parts = []
        for place, size in zip(np.indices(grid), grid, strict=True):
            angles = (2 * np.pi * (place + 1) / (size + 1e-6)).reshape(-1, 1) * frequencies
            parts.append(np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), -1))
        return np.concatenate(parts, axis=1).astype(np.float32)


def resize(table: jax.Array, grid: tuple[int, int], *, antialias: bool = False, offset: float = 0.0) -> jax.Array:
    """Bicubic resize of [*, rows, columns, C] to `grid`; a table of that size is returned unchanged."""
    rows, columns = table.shape[-3:-1]
    if (rows, columns) == tuple(grid):
        return table
    dtype = jnp.promote_types(table.dtype, jnp.float32)
    by_row = bicubic(rows, grid[0], antialias, offset).astype(dtype)
    by_column = bicubic(columns, grid[1], antialias, offset).astype(dtype)
    return jnp.einsum("hr,wc,...rcd->...hwd", by_row, by_column, table.astype(dtype)).astype(table.dtype)


@functools.lru_cache
def bicubic(size: int, target: int, antialias: bool = False, offset: float = 0.0) -> np.ndarray:
    """The matrix [target, size] of torch's bicubic interpolation along one axis, with pixel centres at half integers.

    Without antialiasing, a = -0.75 and taps beyond a border read the border; the scale is (target + offset) / size.
    With it, a = -0.5, the kernel widens by size / target when shrinking, and taps beyond a border are dropped.
    """
    scale = (target + offset) / size
    centres = (np.arange(target) + 0.5) / scale - 0.5
    matrix = np.zeros((target, size))
    if antialias:
        width = max(1.0, 1 / scale)
        matrix = _cubic((np.arange(size)[None] - centres[:, None]) / width, a=-0.5)
        return matrix / matrix.sum(1, keepdims=True)
    for row, centre in enumerate(centres):
        for tap in range(math.floor(centre) - 1, math.floor(centre) + 3):
            matrix[row, min(max(tap, 0), size - 1)] += _cubic(np.float64(tap - centre), a=-0.75)
    return matrix


def _cubic(x, a: float):
    """The cubic convolution kernel (Keys 1981), zero beyond distance 2."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
