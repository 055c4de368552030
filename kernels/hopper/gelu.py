"""The first linear map of an octic MLP, its GELU, and their gradient on a Hopper GPU: `rows.multiply` of whole fields.

A GELU in the regular basis takes about 19 instructions for each value, so 2,400 cycles for a tile of 64 rows and 32
channels.  Its products take 1,920 cycles at the tensor cores' peak, for the 160 channels of ViT-H.  One after the other
would halve the speed, so the warpgroups take turns.

Backward, the same product with the transposed second map gives the gradient of the GELU's result.  The epilogue
multiplies it with the GELU's derivative at the hidden field, which shared memory holds for half of a tile's channels.
The first half loads during the products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.hopper import best, rows
from equivit.kernels.hopper.rows import COMPUTE, ROWS, Columns, Epilogue, Ring
from equivit.kernels.hopper.vectors import Vectors
from equivit.kernels.pointwise import octic_gelu, octic_gelu_gradient

NAME = "octic_mlp_gelu"
WITH_HIDDEN = "octic_mlp_hidden_and_gelu"
BACKWARD = "octic_mlp_gelu_gradient"
WIDTH = 32  # channels of a tile: its eight components take half of a thread's registers
HALF = WIDTH // 2
COLUMNS = Columns(WIDTH, 2 * WIDTH, (2 * WIDTH, 0, 0), WIDTH)
# Of a warpgroup: the lines of a tile, and after them its planes; backward, all components of half of the channels.
STAGE_BYTES = 2 * 4 * ROWS * WIDTH
Field = tuple[jax.Array, jax.Array]
PLACES = pl.ds(0, 4), pl.ds(4, 2), pl.ds(6, 2)  # of the lines and both copies of E among the components


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


def of_bias(bias: jax.Array) -> jax.Array:
    """A bias [F] as a row for each tile."""
    return bias.reshape(-1, WIDTH)


@functools.partial(jax.jit, static_argnames=("hidden", "ring"))
def forward(
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    vectors: Vectors,
    *,
    hidden: bool = False,
    ring: Ring | None = None,
) -> tuple[jax.Array, ...]:
    """GELU in the regular basis of the linear map; with `hidden`, the result of the linear map before it.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs a copy.

    Shapes: lines [4, M, C], planes [2, M, 2C], w_lines [4, C, F], w_planes [2C, 2F], and `of_bias` as vectors
      -> lines [4, M, F] and planes [2, M, 2F], once or twice.
    """
    stage = rows.swizzled(COMPUTE, 4, ROWS, WIDTH, unit=WIDTH)
    own, load = (stage, *rows.bias_types(COLUMNS)), functools.partial(rows.load_bias, vectors.first)
    name, store = (WITH_HIDDEN, _store_with_hidden) if hidden else (NAME, _store)
    multiplied = _Multiplied(name, own, load, store, ring)
    return multiplied((lines, planes), (w_lines, w_planes), vectors.array, fields=1 + hidden)


@functools.partial(jax.jit, static_argnames=("ring",))
def backward(
    lines: jax.Array,
    planes: jax.Array,
    d_lines: jax.Array,
    d_planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    *,
    ring: Ring | None = None,
) -> Field:
    """The hidden field's gradient, from the hidden field and the gradient of the second map's result.

    Shapes: lines [4, M, F], planes [2, M, 2F], d_lines [4, M, C], d_planes [2, M, 2C], weights of the second map
      w_lines [4, F, C], w_planes [2F, 2C] -> the hidden field's.
    """
    own = rows.swizzled(COMPUTE, 8, ROWS, HALF, unit=HALF), plgpu.Barrier(num_arrivals=3, num_barriers=COMPUTE)
    multiplied = _Multiplied(BACKWARD, own, _load_first_half, _store_gradient, ring)
    transposed = w_lines.swapaxes(1, 2), w_planes.T
    return multiplied((d_lines, d_planes), transposed, *_padded(lines, planes))


class _Multiplied(NamedTuple):
    """`rows.multiply` with an epilogue of fields of F channels."""

    name: str
    own: tuple[Any, ...]
    load: Callable
    store: Callable
    ring: Ring | None

    def __call__(self, field: Field, weights: Field, *beside: jax.Array, fields: int = 1) -> Any:
        (_, m, c), f, dtype = field[0].shape, weights[0].shape[-1], field[0].dtype
        shapes = (4, m + -m % 8, f), (2, m + -m % 8, 2 * f)
        out = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes * fields]
        epilogue = Epilogue(self.name, COLUMNS, out, self.own, self.load, self.store)
        weights = weights[0], _side_by_side(weights[1], f)
        results = rows.multiply(epilogue, self.ring or default_ring(c), *_padded(*field), *weights, *beside)
        return tuple(a[:, :m] for a in results)


def _padded(*field):
    return [jnp.pad(a, ((0, 0), (0, -a.shape[1] % 8), (0, 0))) for a in field]


def _side_by_side(w_planes, f):
    """w_planes [2C, 2F] as [2, C, 2F], with the channels of both copies in a tile adjacent."""
    w_planes = w_planes.reshape(2, -1, 2, f // WIDTH, WIDTH)
    return w_planes.swapaxes(2, 3).reshape(2, -1, 2 * f)


def _components(sums):
    """The eight components of a tile: lines, both rows of the first copy of E, both of the second."""
    *h, row_1, row_2 = sums
    return [*h, row_1[:, :WIDTH], row_2[:, :WIDTH], row_1[:, WIDTH:], row_2[:, WIDTH:]]


def _windows(field, row, channel, width):
    """The parts of a field in memory with the lines, and with each copy of E."""
    lines, planes = field
    at_rows = pl.ds(row, ROWS)
    copies = [planes.at[:, at_rows, pl.ds(copy * lines.shape[-1] + channel, width)] for copy in range(2)]
    return lines.at[:, at_rows, pl.ds(channel, width)], *copies


def _store(sums, own, beside, results, row, column):
    _store_field(octic_gelu(_components(rows.add_bias(sums, own))), own[0], results, row, column)


def _store_with_hidden(sums, own, beside, results, row, column):
    h = _components(rows.add_bias(sums, own))
    _store_field(h, own[0], results[:2], row, column)
    _store_field(octic_gelu(h), own[0], results[2:], row, column)


def _store_field(values, stage, results, row, column):
    lines, *copies = _windows(results, row, column * WIDTH, WIDTH)
    _stage(values[:4], stage)
    plgpu.copy_smem_to_gmem(stage, lines)
    _stage(values[4:], stage)
    for copy, target in enumerate(copies):
        plgpu.copy_smem_to_gmem(stage.at[pl.ds(2 * copy, 2)], target, commit_group=copy == 1)


def _stage(values, stage):
    """Stage four components."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is stored
    for i in range(4):
        stage[i] = values[i].astype(stage.dtype)
    plgpu.commit_smem()


def _load_first_half(own, beside, row, column):
    _load_half(own, beside, row, column * WIDTH)


def _load_half(own, hidden, row, channel):
    """Begin to load the hidden field's tile, half of its channels."""
    stage, loaded = own
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was staged before is stored
    for source, place in zip(_windows(hidden, row, channel, HALF), PLACES, strict=True):
        plgpu.copy_gmem_to_smem(source, stage.at[place], loaded)


def _store_gradient(sums, own, hidden, results, row, column):
    stage, loaded = own
    for half in range(2):
        channel = column * WIDTH + half * HALF
        if half:
            _load_half(own, hidden, row, channel)
        plgpu.barrier_wait(loaded)
        gradients = [x[:, half * HALF : (half + 1) * HALF] for x in _components(sums)]
        values = [plgpu.layout_cast(stage[i], plgpu.Layout.WGMMA).astype(jnp.float32) for i in range(8)]
        for i, value in enumerate(octic_gelu_gradient(values, gradients)):
            stage[i] = value.astype(stage.dtype)
        plgpu.commit_smem()
        for target, place in zip(_windows(results, row, channel, HALF), PLACES, strict=True):
            plgpu.copy_smem_to_gmem(stage.at[place], target, commit_group=place is PLACES[-1])
