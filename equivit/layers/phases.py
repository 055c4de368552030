"""All phases of a strided convolution on a torus: the norm of each, and the convolution at each, for less arithmetic.

An adaptive layer chooses, for each map, the phase (row, column) of the lattice at which a strided convolution is taken
("Making Vision Transformers Truly Shift-Equivariant", Eq. 13 to 23).  By its definition that needs the convolution at
stride 1, stride squared times the arithmetic.  The functions here compute what is needed of it otherwise, equal up to
rounding.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from equivit.layers.by_image import by_image
from equivit.layers.dense import patchify

Pair = tuple[int, int]
# On accelerators too: two phases often differ by less than TF32 or bfloat16 can tell.
EXACT = jax.lax.Precision.HIGHEST


def lattice_norms(x: jax.Array, stride: Pair) -> jax.Array:
    """The l2 norm of each polyphase component, in at least float32.

    Shapes: [B, H, W, C] -> [B, sh sw], phases in row-major order.
    """
    (sh, sw), (b, h, w, _) = stride, x.shape
    squares = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).sum(-1)
    return jnp.sqrt(squares.reshape(b, h // sh, sh, w // sw, sw).sum((1, 3))).reshape(b, sh * sw)


def embedding_norms(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, stride: Pair, padding: Pair = (0, 0)
) -> jax.Array:
    """The l2 norm of all tokens of a strided convolution, at each phase, in at least float32.

    With the patches of a phase as rows of Z, the squared norm is the sum of |E z + b|^2 over its n rows z, that is
    <E E^T, Z^T Z> + 2 <E b, sum of z> + n |b|^2.  The second moments Z^T Z of all phases are made of products of pixels
    whose distance is less than a patch.  On a torus it does not matter which block of stride x stride pixels the first
    one lies in, so that one product of all blocks with each of their neighbours within reach is enough: 36 M
    multiply-adds for patches of 4 x 4 in 224 x 224 pixels, where the convolution at stride 1 takes 231 M.

    Shapes: [B, H, W, C] -> [B, sh sw], phases in row-major order.

    Args:
      kernel: [kh, kw, C, D].
      bias: [D].
      padding: so far before a phase lies the first tap of its first token.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, kernel, bias = (a.astype(dtype) for a in (x, kernel, bias))
    (sh, sw), size = stride, kernel.shape[:3]
    lags, places, moments = _moments(size, stride)
    matrix, entries = kernel.reshape(-1, kernel.shape[-1]), sh * sw * size[-1]
    square = jnp.matmul(matrix, matrix.T, precision=EXACT).reshape(-1)
    linear = 2 * jnp.matmul(matrix, bias, precision=EXACT)
    phases = np.arange(sh * sw, dtype=np.int32)[:, None]
    second = jnp.zeros((sh * sw, len(lags) * entries**2), dtype).at[phases, moments].add(square)
    first = jnp.zeros((sh * sw, entries), dtype).at[phases, places].add(linear)
    grid = x.shape[1] // sh, x.shape[2] // sw

    def scores(blocks):
        blocks = blocks.reshape(-1, *grid, entries)
        neighbours = (jnp.roll(blocks, (-i, -j), (1, 2)) for i, j in lags)
        products = [jnp.einsum("bhwi,bhwj->bij", blocks, other, precision=EXACT) for other in neighbours]
        total = jnp.einsum("bhwi,hw->bi", blocks, jnp.ones(grid, dtype), precision=EXACT)  # faster than a sum
        found = jnp.matmul(jax.lax.collapse(jnp.stack(products, 1), 1), second.T, precision=EXACT)
        return (found + jnp.matmul(total, first.T, precision=EXACT))[:, None]

    blocks = patchify(jnp.roll(x, padding, (1, 2)), stride)
    found = by_image(scores, blocks)[:, 0] + grid[0] * grid[1] * jnp.square(bias).sum()
    return jnp.sqrt(jnp.maximum(found, 0))


@functools.lru_cache
def _moments(size: tuple[int, int, int], stride: Pair) -> tuple[list[Pair], np.ndarray, np.ndarray]:
    """What of the products of blocks makes the second moments of each phase.

    Returns:
      The distances of two blocks that are needed; those of the opposite sign are transposes.
      For each phase and tap its place in a block, [sh sw, taps].
      For each phase and pair of taps its place among the products [distances, place, place], [sh sw, taps^2].
    """
    (kh, kw, channels), (sh, sw) = size, stride
    rows, columns, c = np.indices(size).reshape(3, -1)
    p, q = np.divmod(np.arange(sh * sw), sw)
    (block_row, row), (block_column, column) = np.divmod(p[:, None] + rows, sh), np.divmod(q[:, None] + columns, sw)
    places = (row * sw + column) * channels + c
    reach = [-(-(k + s - 1) // s) for k, s in zip((kh, kw), stride, strict=True)]
    lags = [(i, j) for i in range(reach[0]) for j in range(1 - reach[1], reach[1]) if (i, j) >= (0, 0)]
    down, right = (block[:, None, :] - block[:, :, None] for block in (block_row, block_column))
    back = (down < 0) | ((down == 0) & (right < 0))
    down, right = np.where(back, -down, down), np.where(back, -right, right)
    number = np.zeros((reach[0], 2 * reach[1] - 1), int)
    number[tuple(np.transpose(lags))] = np.arange(len(lags))
    one, other = places[:, :, None], places[:, None, :]
    one, other = np.where(back, other, one), np.where(back, one, other)
    pairs = (number[down, right] * sh * sw * channels + one) * sh * sw * channels + other
    return lags, places.astype(np.int32), pairs.reshape(sh * sw, -1).astype(np.int32)


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


def filters(kernel: jax.Array) -> jax.Array:
    """What `convolved` multiplies with, in the dtype of the kernel: [k, k, C, D] -> [k + 1, k + 1, C, D], k 2 or 3."""
    _, taps, _ = FILTERING[len(kernel)]
    dtype, taps = jnp.promote_types(kernel.dtype, jnp.float32), np.array(taps)
    return jnp.einsum("au,bv,uvcd->abcd", taps, taps, kernel.astype(dtype), precision=EXACT).astype(kernel.dtype)


def convolved(x: jax.Array, filters: jax.Array) -> list[list[jax.Array]]:
    """A convolution on a torus at the four phases of stride 2, in at least float32.

    Minimal filtering along both axes needs 9/16 of the products for 2 x 2 taps, and 4/9 of them for 3 x 3.

    Shapes: [B, h, w, C] -> [B, h/2, w/2, D] for each phase (p, q), whose entry (i, j) has its first tap at row 2 i + p
    and column 2 j + q.

    Args:
      filters: of the kernel, as `filters` makes them; products are of their dtype.
    """
    outputs, _, inputs = FILTERING[len(filters) - 1]
    dtype = jnp.promote_types(filters.dtype, jnp.float32)
    lines = [_combined(inputs, _tiles(row, 2)) for row in _combined(inputs, _tiles(x, 1))]
    products = [
        [jnp.matmul(x.astype(filters.dtype), f, preferred_element_type=dtype) for x, f in zip(line, row, strict=True)]
        for line, row in zip(lines, filters, strict=True)
    ]
    columns = [_combined(outputs, column) for column in zip(*products, strict=True)]  # [inputs][p]
    return [_combined(outputs, row) for row in zip(*columns, strict=True)]


def _tiles(x: jax.Array, axis: int) -> list[jax.Array]:
    """Entries 2 i, 2 i + 1, 2 i + 2 and 2 i + 3 of an axis, for each i."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    even, odd = (jax.lax.index_in_dim(x, k, axis + 1, keepdims=False) for k in range(2))
    return [even, odd, jnp.roll(even, -1, axis), jnp.roll(odd, -1, axis)]


def _combined(matrix: list[list[float]], terms: Sequence[jax.Array]) -> list[jax.Array]:
    """The matrix times the terms; few of its entries are neither 0 nor 1 nor -1."""
    sums = []
    for row in matrix:
        signed = [term if factor == 1 else factor * term for factor, term in zip(row, terms, strict=False) if factor]
        sums.append(functools.reduce(operator.add, signed))
    return sums


def by_phase(x: jax.Array) -> jax.Array:
    """A map split into its phases of stride 2: [B, h, w, ...] -> [2, 2, B, h/2, w/2, ...]."""
    b, h, w, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, h // 2, 2, w // 2, 2, *rest), (2, 4), (0, 1))
