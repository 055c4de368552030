"""The first linear map of an octic MLP and its GELU on a Hopper GPU: `rows.multiply` with a GELU of whole fields.

A GELU in the regular basis takes about 19 instructions for each value, so 2,400 cycles for a tile of 64 rows and 32
channels.  Its products take 1,920 cycles at the tensor cores' peak, for the 160 channels of ViT-H.  One after the other
would halve the speed, so the warpgroups take turns.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels.hopper import best, rows
from kernels.hopper.rows import COMPUTE, ROWS, Columns, Epilogue, Ring
from kernels.pointwise import octic_gelu

NAME = "octic_mlp_gelu"
WITH_HIDDEN = "octic_mlp_hidden_and_gelu"
WIDTH = 32  # channels of a tile: its eight components take half of a thread's registers
COLUMNS = Columns(WIDTH, 2 * WIDTH, (2 * WIDTH, 0, 0), WIDTH)
STAGE_BYTES = 2 * 4 * ROWS * WIDTH  # of a warpgroup: the lines of a tile, and after them its planes


def rings(c: int) -> list[Ring]:
    """The ring buffers that fit in shared memory for C channels."""
    return rows.rings(c, COLUMNS, STAGE_BYTES)


def default_ring(c: int) -> Ring | None:
    """The ring buffer that was fastest on a card, or else `rows.default_ring`."""
    measured = best.tile(NAME, c)
    return Ring(*measured) if measured else rows.default_ring(c, COLUMNS, STAGE_BYTES)


def supported(c: int, f: int, dtype: DTypeLike) -> bool:
    """Whether the kernel supports a map from C to F channels."""
    whole = f % WIDTH == 0 and f >= COMPUTE * WIDTH
    return jnp.dtype(dtype) == jnp.bfloat16 and whole and default_ring(c) is not None


def forward(
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    bias: jax.Array,
    *,
    ring: Ring | None = None,
) -> jax.Array:
    """GELU in the regular basis of the linear map, by components, as `residual.forward` takes them.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs a copy.

    Shapes: lines [4, M, C], planes [2, M, 2C], w_lines [4, C, F], w_planes [2C, 2F], bias [F] -> [8, M, F].
    """
    m, f = lines.shape[1], w_lines.shape[-1]
    out = jax.ShapeDtypeStruct((8, m + -m % 8, f), lines.dtype)
    return _multiplied(NAME, _store, out, ring, lines, planes, w_lines, w_planes, bias)[:, :m]


def forward_with_hidden(
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    bias: jax.Array,
    *,
    ring: Ring | None = None,
) -> tuple[jax.Array, ...]:
    """The linear map, which the derivative needs, and its GELU: lines and planes of both.

    Arguments as in `forward`; results [4, M, F], [2, M, 2F], and the same again.
    """
    m, f, dtype = lines.shape[1], w_lines.shape[-1], lines.dtype
    padded = m + -m % 8
    out = (jax.ShapeDtypeStruct((4, padded, f), dtype), jax.ShapeDtypeStruct((2, padded, 2 * f), dtype)) * 2
    results = _multiplied(WITH_HIDDEN, _store_with_hidden, out, ring, lines, planes, w_lines, w_planes, bias)
    return tuple(a[:, :m] for a in results)


def _multiplied(name, store, out, ring, lines, planes, w_lines, w_planes, bias):
    """`rows.multiply` with an epilogue."""
    c, f, padding = lines.shape[-1], w_lines.shape[-1], ((0, 0), (0, -lines.shape[1] % 8), (0, 0))
    stage = rows.swizzled(COMPUTE, 4, ROWS, WIDTH, unit=WIDTH)
    epilogue = Epilogue(name, COLUMNS, out, stage, STAGE_BYTES, store)
    weights = w_lines, _side_by_side(w_planes, f), bias.reshape(-1, WIDTH)
    fields = jnp.pad(lines, padding), jnp.pad(planes, padding)
    return rows.multiply(epilogue, ring or default_ring(c), *fields, *weights)


def _side_by_side(w_planes, f):
    """w_planes [2C, 2F] as [2, C, 2F], with the channels of both copies in a tile adjacent."""
    w_planes = w_planes.reshape(2, -1, 2, f // WIDTH, WIDTH)
    return w_planes.swapaxes(2, 3).reshape(2, -1, 2 * f)


def _components(sums):
    """The eight components of a tile: lines, both rows of the first copy of E, both of the second."""
    *h, row_1, row_2 = sums
    return [*h, row_1[:, :WIDTH], row_2[:, :WIDTH], row_1[:, WIDTH:], row_2[:, WIDTH:]]


def _stage(values, stage):
    """Stage four components."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is stored
    for i in range(4):
        stage[i] = values[i].astype(stage.dtype)
    plgpu.commit_smem()


def _store(sums, stage, results, row, column):
    y = octic_gelu(_components(sums))
    for half in range(2):
        _stage(y[4 * half :][:4], stage)
        target = results[0].at[pl.ds(4 * half, 4), pl.ds(row, ROWS), pl.ds(column * WIDTH, WIDTH)]
        plgpu.copy_smem_to_gmem(stage, target)


def _store_with_hidden(sums, stage, results, row, column):
    h = _components(sums)
    _store_field(h, stage, results[0], results[1], row, column)
    _store_field(octic_gelu(h), stage, results[2], results[3], row, column)


def _store_field(values, stage, lines, planes, row, column):
    at_rows, first = pl.ds(row, ROWS), column * WIDTH
    _stage(values[:4], stage)
    plgpu.copy_smem_to_gmem(stage, lines.at[:, at_rows, pl.ds(first, WIDTH)])
    _stage(values[4:], stage)
    for copy in range(2):
        target = planes.at[:, at_rows, pl.ds(copy * lines.shape[-1] + first, WIDTH)]
        plgpu.copy_smem_to_gmem(stage.at[pl.ds(2 * copy, 2)], target, commit_group=copy == 1)
