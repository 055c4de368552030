"""The GELU of an octic field and its derivative on a Hopper GPU (Pallas, Mosaic GPU).

Both are memory-bound.  A fixed number of blocks iterates over tiles of rows by channels.  A block has a ring buffer of
tiles in shared memory: the tensor memory accelerator (TMA) loads one while another is transformed in place and a third
is stored.  TMA clips tiles at the edges, so any number of rows works.  It sees `planes` as [2, M, 2, C], so that each
copy of E is clipped at its own last channel.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.pointwise import octic_gelu, octic_gelu_gradient

THREADS = 128  # per block: one warpgroup
MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
BLOCKS = 4  # per multiprocessor: the registers (at most 128 per thread) and shared memory (51 KB per block) allow four
SLOTS = 3  # slots of a block's ring buffer
SLOT_BYTES = 16 * 1024  # a tile of every field the kernel reads
WIDEST = 128  # most channels in a tile


def supported(channels: int, dtype: DTypeLike) -> bool:
    """Whether the kernels support this number of channels per irrep: TMA needs rows of a multiple of 16 bytes."""
    dtype = jnp.dtype(dtype)
    return dtype in (jnp.float32, jnp.bfloat16) and channels * dtype.itemsize % 16 == 0


@jax.jit
def forward(lines: jax.Array, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """GELU in the regular basis: lines [4, M, C] and planes [2, M, 2C] -> the same."""
    return _everywhere(octic_gelu, [(lines, planes)], "d8_gelu")


@jax.jit
def backward(
    lines: jax.Array, planes: jax.Array, d_lines: jax.Array, d_planes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The input's gradient, from the input and the output's gradient; arrays as in `forward`."""
    return _everywhere(octic_gelu_gradient, [(lines, planes), (d_lines, d_planes)], "d8_gelu_backward")


class _Tiles(NamedTuple):
    """The tiling of a field: tiles of rows x width, channels varying fastest, `blocks` of them at a time."""

    rows: int
    width: int
    columns: int
    count: int
    blocks: int

    @classmethod
    def cut(cls, m: int, c: int, points: int):
        """The widest tiles of `points` points that add at most an eighth of work past the last channel."""
        width = WIDEST
        while -(-c // width) * width * 8 > c * 9:
            width //= 2
        rows, columns = points // width, -(-c // width)
        count = -(-m // rows) * columns
        return cls(rows, width, columns, count, min(count, MULTIPROCESSORS * BLOCKS))

    def window(self, tile):
        """The tile's indices into lines [4, M, C] and planes [2, M, 2, C]."""
        row = pl.ds(tile // self.columns * self.rows, self.rows)
        channel = pl.ds(tile % self.columns * self.width, self.width)
        return (slice(None), row, channel), (slice(None), row, slice(None), channel)


def _everywhere(point, fields, name):
    """Apply `point`, a function of the eight float32 components of every field, at each row and channel."""
    (_, m, c), dtype = fields[0][0].shape, fields[0][0].dtype
    points = SLOT_BYTES // (8 * dtype.itemsize * len(fields))
    tiles = _Tiles.cut(m, c, points)
    lines, planes = plgpu.kernel(
        functools.partial(_body, point, tiles),
        out_type=(jax.ShapeDtypeStruct((4, m, c), dtype), jax.ShapeDtypeStruct((2, m, 2, c), dtype)),
        scratch_types=[
            plgpu.SMEM((SLOTS, len(fields), 4, tiles.rows, tiles.width), dtype),
            plgpu.SMEM((SLOTS, len(fields), 2, tiles.rows, 2, tiles.width), dtype),
            plgpu.Barrier(num_arrivals=2 * len(fields), num_barriers=SLOTS),
        ],
        grid=(tiles.blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # the hardware's exp2, with relative error below 2^-22
            unsafe_no_auto_barriers=True,  # safe: a thread reads and writes only its own points of a tile
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*[x for x_lines, x_planes in fields for x in (x_lines, x_planes.reshape(2, m, 2, c))])
    return lines, planes.reshape(2, m, 2 * c)


def _body(point, tiles, *refs):
    *sources, out_lines, out_planes, lines_smem, planes_smem, loaded = refs
    sources = list(zip(sources[::2], sources[1::2], strict=True))
    last = len(sources) - 1
    block = jax.lax.axis_index("block")
    steps = (tiles.count - block + tiles.blocks - 1) // tiles.blocks

    def load(step):
        slot, (at_lines, at_planes) = step % SLOTS, tiles.window(block + step * tiles.blocks)
        for i, (source_lines, source_planes) in enumerate(sources):
            plgpu.copy_gmem_to_smem(source_lines.at[at_lines], lines_smem.at[slot, i], loaded.at[slot])
            plgpu.copy_gmem_to_smem(source_planes.at[at_planes], planes_smem.at[slot, i], loaded.at[slot])

    for step in range(SLOTS - 1):
        pl.when(step < steps)(functools.partial(load, jnp.int32(step)))

    @pl.loop(0, steps)
    def _(step):
        slot, (at_lines, at_planes) = step % SLOTS, tiles.window(block + step * tiles.blocks)
        plgpu.barrier_wait(loaded.at[slot])
        _transform(point, lines_smem.at[slot], planes_smem.at[slot])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lines_smem.at[slot, last], out_lines.at[at_lines], commit_group=False)
        plgpu.copy_smem_to_gmem(planes_smem.at[slot, last], out_planes.at[at_planes])
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # all but this tile are stored, so the previous slot is free
        pl.when(step + SLOTS - 1 < steps)(lambda: load(step + SLOTS - 1))

    plgpu.wait_smem_to_gmem(0)


def _transform(point, lines, planes):
    """One slot, [fields, 4, rows, width] and [fields, 2, rows, 2, width]; the result replaces the last field."""
    fields, _, rows, width = lines.shape
    layout = plgpu.Layout.WG_STRIDED((rows, width), vec_size=rows * width // THREADS)
    refs = [
        [lines.at[i, k] for k in range(4)] + [planes.at[i, row, :, copy] for copy in range(2) for row in range(2)]
        for i in range(fields)
    ]
    values = [[plgpu.layout_cast(ref[...], layout).astype(jnp.float32) for ref in field] for field in refs]
    for ref, value in zip(refs[-1], point(*values), strict=True):
        ref[...] = value.astype(ref.dtype)
