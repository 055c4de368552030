"""The layer norm of an octic field on a Hopper GPU (Pallas, Mosaic GPU), in one pass over the field.

The kernel is memory-bound.  A fixed number of blocks, one warpgroup each, iterates over tiles of whole rows: the tensor
memory accelerator (TMA) loads a tile into shared memory while the one before is in registers, 8C float32 values of each
row.  A warp holds whole rows, so that sums over channels take shuffles only.  TMA sees `planes` as [2, M, 2, C], since
a box has at most 256 channels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.hopper.vectors import OF_FIELD, Vectors
from equivit.kernels.norm import Norm

MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
BLOCKS = 2  # per multiprocessor, of 128 threads with up to 168 registers and 101 KB of shared memory at 160 channels
ROWS = 8  # of a tile: two for each warp
SLOTS = 2  # tiles of a block that are loaded, being loaded, or in the backward pass being stored
WIDEST = 160  # most channels: 80 registers of a thread hold a tile
Ref = Any  # an array in memory, as Pallas passes it to a kernel
# Each of the four warps holds rows of its own, 32 channels at a time, so that reading them meets no bank conflict.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 32), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def supported(c: int, dtype: DTypeLike) -> bool:
    """Whether the kernel supports a field of C channels: a warp takes 32 of them at a time."""
    return jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16) and c % 32 == 0 and c <= WIDEST


@functools.partial(jax.jit, static_argnames=("norm", "dtype"))
def forward(
    lines: jax.Array,
    planes: jax.Array,
    vectors: Vectors,
    *,
    norm: Norm,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """`norm.normalise` with a result of the given dtype; `vectors` are `of_field` of scales and bias.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs a copy.

    Shapes: lines [4, M, C], planes [2, M, 2C] -> the same.
    """
    (_, rows, c), padding = lines.shape, ((0, 0), (0, -lines.shape[1] % ROWS), (0, 0))
    lines, planes = jnp.pad(lines, padding), jnp.pad(planes, padding)
    m = lines.shape[1]
    count = m // ROWS
    blocks = min(count, MULTIPROCESSORS * BLOCKS)
    y_lines, y_planes = plgpu.kernel(
        functools.partial(_body, norm, count, blocks, vectors.first),
        out_type=(jax.ShapeDtypeStruct((4, m, c), dtype), jax.ShapeDtypeStruct((2, m, 2, c), dtype)),
        scratch_types=[
            plgpu.SMEM((SLOTS, 4, ROWS, c), lines.dtype),
            plgpu.SMEM((SLOTS, 2, ROWS, 2, c), lines.dtype),
            plgpu.SMEM((4, ROWS, c), dtype),
            plgpu.SMEM((2, ROWS, 2, c), dtype),
            plgpu.SMEM((OF_FIELD, c), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=1),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="octic_norm",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # the hardware's reciprocal square root, with relative error below 2^-22
            unsafe_no_auto_barriers=True,  # safe: only TMA's threads and `commit_smem` order accesses to shared memory
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(lines, planes.reshape(2, m, 2, c), vectors.array)
    return y_lines[:, :rows], y_planes.reshape(2, m, 2 * c)[:, :rows]


class Tiles(NamedTuple):
    """The tiles of a block: whole rows of some arrays, of which shared memory has one while the next ones load.

    Attributes:
      rows: of a tile.
      count: tiles of all blocks.
      blocks: in the grid.
      sources: arrays [k, M, ...].
      slots: shared memory [SLOTS, k, rows, ...] for each of them.
      loaded: a barrier for each slot.
    """

    rows: int
    count: int
    blocks: int
    sources: Sequence[Ref]
    slots: Sequence[Ref]
    loaded: Ref

    def start(self) -> None:
        """Begin to load the first tiles."""
        for step in range(SLOTS - 1):
            pl.when(step < self._steps())(functools.partial(self._load, jnp.int32(step)))

    def visit(self, function: Callable[..., None], before_load: Callable[[], None] = lambda: None) -> None:
        """Call function(tile, rows) for every tile, which is a list of arrays in shared memory, and its rows."""

        @pl.loop(0, self._steps())
        def _(step):
            before_load()
            pl.when(step + SLOTS - 1 < self._steps())(lambda: self._load(step + SLOTS - 1))
            plgpu.barrier_wait(self.loaded.at[step % SLOTS])
            function([slot.at[step % SLOTS] for slot in self.slots], self._window(step))

        plgpu.wait_smem_to_gmem(0)

    def _steps(self):
        return (self.count - jax.lax.axis_index("block") + self.blocks - 1) // self.blocks

    def _window(self, step):
        return pl.ds((jax.lax.axis_index("block") + step * self.blocks) * self.rows, self.rows)

    def _load(self, step):
        for source, slot in zip(self.sources, self.slots, strict=True):
            plgpu.copy_gmem_to_smem(
                source.at[:, self._window(step)], slot.at[step % SLOTS], self.loaded.at[step % SLOTS]
            )


def _body(norm, count, blocks, first, *refs):
    sources, parameters, (y_lines, y_planes), scratch = refs[:2], refs[2], refs[3:5], refs[5:]
    *slots, out_lines, out_planes, vectors, loaded, ready = scratch
    tiles = Tiles(ROWS, count, blocks, sources, slots, loaded)

    def normalise(tile, rows):
        lines, planes = tile
        values = _normalised(norm, lines, planes, vectors)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile is stored
        for ref, value in zip(components(out_lines, out_planes), values, strict=True):
            ref[...] = value.astype(ref.dtype)
        store((out_lines, out_planes), (y_lines, y_planes), rows)

    plgpu.copy_gmem_to_smem(parameters.at[pl.ds(first, OF_FIELD)], vectors, ready)
    tiles.start()
    plgpu.barrier_wait(ready)
    tiles.visit(normalise)


def components(lines: Ref, planes: Ref) -> list[Ref]:
    """The eight components of a tile [4, rows, C] and [2, rows, 2, C]: lines, then both copies of each row of E."""
    return [lines.at[i] for i in range(4)] + [planes.at[i // 2, :, i % 2] for i in range(4)]


def store(tile: Sequence[Ref], results: Sequence[Ref], rows: Any) -> None:
    """Begin to store a tile of lines and planes."""
    plgpu.commit_smem()
    for source, target in zip(tile, results, strict=True):
        plgpu.copy_smem_to_gmem(source, target.at[:, rows], commit_group=source is tile[-1])


def _normalised(norm, lines, planes, vectors):
    """The `components` of a tile, normalised, [rows, C] each."""
    values = centred(lines, planes)
    inverse = inverse_deviation(values, norm)
    *scales, bias = (jax.lax.broadcast_in_dim(vectors[i], lines.shape[1:], (1,)) for i in range(OF_FIELD))
    scales += scales[4:]  # both rows of E have the same
    results = [x * inverse * scale for x, scale in zip(values, scales, strict=True)]
    return results[0] + bias, *results[1:]


def centred(lines: Ref, planes: Ref) -> list[jax.Array]:
    """The eight components of a tile in shared memory, minus the mean of their irrep: [rows, C] each, in registers.

    Args:
      lines: [4, rows, C].
      planes: [2, rows, 2, C].
    """
    values = [read(lines.at[i]) for i in range(4)]
    values = [x - mean(x) for x in values]
    for row in range(2):
        copies = [read(planes.at[row, :, copy]) for copy in range(2)]
        of_both = 0.5 * mean(copies[0] + copies[1])
        values += [x - of_both for x in copies]
    return values


def inverse_deviation(values: list[jax.Array], norm: Norm) -> jax.Array:
    """1 / sigma of each row of a centred tile, repeated over channels."""
    squares = [x * x for x in values]
    total = sum(squares[1:4], squares[0]) + (norm.row_weight / 2) * sum(squares[5:], squares[4])
    return jax.lax.rsqrt((mean(total) + norm.eps) * (1 / 8))


def read(ref: Ref) -> jax.Array:
    """An array [rows, C] of shared memory, in float32."""
    return plgpu.layout_cast(ref[...], LAYOUT).astype(jnp.float32)


def mean(x: jax.Array) -> jax.Array:
    """The mean of each row, repeated over channels."""
    return jax.lax.broadcast_in_dim(x.sum(1) * (1 / x.shape[1]), x.shape, (0,))
