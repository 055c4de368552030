"""All phases of a convolution of stride 2 by minimal filtering, whose few products suit a CPU."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Minimal filtering (Winograd 1980): two outputs of a filter of 2 or 3 taps are A ((G g) * (B d)) of taps g, inputs d.
FILTERING = {
    2: (
        [[1, 1, 0], [0, 1, -1]],
        [[1, 0], [1, 1], [0, 1]],
        [[1, -1, 0], [0, 1, 0], [0, 1, -1]],
    ),
    3: (
        [[1, 1, 1, 0], [0, 1, -1, -1]],
        [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    ),
}


@functools.partial(jax.jit, static_argnames="padding")  # traced once for all maps of a shape
def at_largest(
    x: jax.Array, kernel: jax.Array, bias: Any, moments: Any, padding: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """The phase with the largest norm, [B, h/2, w/2, D], and the norms [B, 4]."""
    x = jnp.roll(x.astype(kernel.dtype), padding, (1, 2))
    maps = [y for row in convolved(x, filters(kernel)) for y in row]
    if moments is not None:
        means, scales = (by_phase(a)[..., None].reshape(4, *maps[0].shape[:3], 1) for a in moments[:2])
        maps = [(y - mean * moments.total) * scale for y, mean, scale in zip(maps, means, scales, strict=True)]
    maps = maps if bias is None else [y + bias for y in maps]
    norms = jnp.sqrt(jnp.stack([jnp.square(y).sum((1, 2, 3)) for y in maps], 1))
    index = norms.argmax(1)[:, None, None, None]
    return functools.reduce(lambda y, k: jnp.where(index == k, maps[k], y), range(1, 4), maps[0]), norms


def filters(kernel: jax.Array) -> list[list[jax.Array]]:
    """The factors of `convolved`, in at least float32: [k, k, C, D] -> (k + 1)^2 of [C, D], k 2 or 3."""
    _, taps, _ = FILTERING[len(kernel)]
    wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    return [_combined(taps, list(row)) for row in _combined(taps, list(wide))]


def convolved(x: jax.Array, filters: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """A convolution on a torus at the four phases of stride 2, in the dtype of the filters.

    Minimal filtering along both axes needs 9/16 of the products for 2 x 2 taps and 4/9 for 3 x 3.  Its factors are sums
    of inputs and of taps: rounded to bfloat16, they would give each phase an error of its own.

    Shapes: [B, h, w, C] -> [B, h/2, w/2, D] for each phase (p, q), whose entry (i, j) has its first tap at row 2 i + p
    and column 2 j + q.

    Args:
      filters: from `filters(kernel)`.
    """
    outputs, _, inputs = FILTERING[len(filters) - 1]
    wide = x.astype(filters[0][0].dtype)
    lines = [_combined(inputs, _tiles(row, 2)) for row in _combined(inputs, _tiles(wide, 1))]
    products = [[x @ f for x, f in zip(line, row, strict=True)] for line, row in zip(lines, filters, strict=True)]
    columns = [_combined(outputs, column) for column in zip(*products, strict=True)]  # [inputs][p]
    return [_combined(outputs, row) for row in zip(*columns, strict=True)]


def _tiles(x: jax.Array, axis: int) -> list[jax.Array]:
    """Entries 2 i, 2 i + 1, 2 i + 2 and 2 i + 3 of an axis, for each i."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    even, odd = (jax.lax.index_in_dim(x, k, axis + 1, keepdims=False) for k in range(2))
    return [even, odd, jnp.roll(even, -1, axis), jnp.roll(odd, -1, axis)]


def _combined(matrix: list[list[float]], terms: Sequence[jax.Array]) -> list[jax.Array]:
    """The matrix times the terms, skipping factors of 0 and 1."""
    sums = []
    for row in matrix:
        signed = [term if factor == 1 else factor * term for factor, term in zip(row, terms, strict=False) if factor]
        sums.append(functools.reduce(operator.add, signed))
    return sums


def by_phase(x: jax.Array) -> jax.Array:
    """A map split into its phases of stride 2: [B, h, w, ...] -> [2, 2, B, h/2, w/2, ...]."""
    b, h, w, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, h // 2, 2, w // 2, 2, *rest), (2, 4), (0, 1))
