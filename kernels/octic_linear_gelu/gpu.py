"""The first linear map of an octic MLP and its GELU in one Hopper kernel (Pallas, Mosaic GPU), in bfloat16.

A block holds the eight components of a tile of rows by channels in the registers of two warpgroups, so that the GELU
works on the float32 accumulators of the tensor cores and the hidden field is written once.  A third warpgroup only
issues loads: the tensor memory accelerator (TMA) fills a ring buffer in shared memory with the operands, a few channels
of the contraction at a time.  Blocks of a cluster work on neighbouring rows and load the weights together (multicast).
Reads past an edge give zero, and writes past it are dropped.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.pointwise import octic_gelu

MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
CLUSTER = 2  # blocks
ROWS = 64  # per block, as in one tensor core instruction
COMPUTE = 2  # compute warpgroups per block
WIDTH = 32  # channels per warpgroup: eight accumulators [64, 32] take half of its registers
RING = 64  # channels of the contraction in the ring buffer, 2 KB each; the staged results take another 64 KB


def supported(c: int, f: int, dtype: DTypeLike) -> bool:
    """Whether the kernel supports a map from C to F channels: whole tiles, in bfloat16."""
    return jnp.dtype(dtype) == jnp.bfloat16 and c % 16 == 0 and f % (COMPUTE * WIDTH) == 0


@jax.jit
def forward(
    lines: jax.Array, planes: jax.Array, w_lines: jax.Array, w_planes: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """GELU in the regular basis of the linear map.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs a copy.

    Shapes: lines [4, M, C], planes [2, M, 2C], w_lines [4, C, F], w_planes [2C, 2F], bias [F]
      -> lines [4, M, F], planes [2, M, 2F].
    Source: octic ViTs, Sections 3.2.1 and 3.2.3.
    """
    m = lines.shape[1]
    padding = ((0, 0), (0, -m % 8), (0, 0))
    y_lines, y_planes = _whole_tiles(jnp.pad(lines, padding), jnp.pad(planes, padding), w_lines, w_planes, bias)
    return y_lines[:, :m], y_planes[:, :m]


def _whole_tiles(lines, planes, w_lines, w_planes, bias):
    (_, m, c), f, dtype = lines.shape, w_lines.shape[-1], lines.dtype
    block = COMPUTE * WIDTH
    depth = 32 if c % 32 == 0 else 16
    slots = RING // depth
    tiles = _Tiles(-(-m // (ROWS * CLUSTER)), f // block, c // depth)

    def smem(*shape, width):
        """Shared memory in the tensor cores' layout: tiles of 8 x width, with 16-byte units swizzled."""
        return plgpu.SMEM(
            shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
        )

    return plgpu.kernel(
        functools.partial(_body, tiles),
        out_type=(jax.ShapeDtypeStruct((4, m, f), dtype), jax.ShapeDtypeStruct((2, m, 2 * f), dtype)),
        scratch_types=[
            smem(slots, 4, ROWS, depth, width=depth),
            smem(slots, 2, 2, ROWS, depth, width=depth),
            smem(slots, 4, depth, block, width=depth),
            smem(slots, 2, depth, 2 * block, width=depth),
            smem(COMPUTE, 4, ROWS, WIDTH, width=WIDTH),
            smem(COMPUTE, 2, 2, ROWS, WIDTH, width=WIDTH),
            plgpu.SMEM((COMPUTE, WIDTH), jnp.float32),
            plgpu.Barrier(num_barriers=COMPUTE),
            plgpu.Barrier(num_arrivals=5, num_barriers=slots),
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=slots),
        ],
        grid=(min(tiles.count, MULTIPROCESSORS // CLUSTER),),
        grid_names=("grid",),
        cluster=(CLUSTER,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name="octic_linear_gelu",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # the hardware's exp2, with relative error below 2^-22
            unsafe_no_auto_barriers=True,  # safe: threads only read what TMA writes, and only write what it reads
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(lines, planes, w_lines, _side_by_side(w_planes, f), bias.astype(jnp.float32))


class _Tiles(NamedTuple):
    """The tiling of the result: rows of a cluster x channels of a block, and the contraction steps of a tile."""

    rows: int
    columns: int
    depth: int

    @property
    def count(self) -> int:
        return self.rows * self.columns

    def at(self, tile) -> tuple[jax.Array, jax.Array]:
        """First row and first channel of this block's part of a tile."""
        row = (tile // self.columns * CLUSTER + jax.lax.axis_index("cluster")) * ROWS
        return row, tile % self.columns * (COMPUTE * WIDTH)


def _body(tiles, lines, planes, w_lines, w_planes, bias, y_lines, y_planes, *scratch):
    *operands, y_lines_smem, y_planes_smem, bias_smem, bias_loaded, loaded, consumed = scratch
    slots = operands[0].shape[0]
    warpgroup = jax.lax.axis_index("warpgroup")
    first, stride = jax.lax.axis_index("grid"), jax.lax.axis_size("grid")
    steps = (tiles.count - first + stride - 1) // stride
    total = steps * tiles.depth

    @pl.when(warpgroup == COMPUTE)
    def _():
        @pl.loop(0, total)
        def _(step):
            slot = step % slots
            pl.when(step >= slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            row, channel = tiles.at(first + step // tiles.depth * stride)
            sources, targets = (lines, planes, w_lines, w_planes), [ref.at[slot] for ref in operands]
            _load(sources, targets, loaded.at[slot], row, channel, step % tiles.depth)

        # The other block of the cluster also signals these barriers: wait for it before exiting.
        pl.loop(jnp.maximum(total - slots, 0), total)(lambda step: plgpu.barrier_wait(consumed.at[step % slots]))

    @pl.when(warpgroup < COMPUTE)
    def _():
        @pl.loop(0, steps)
        def _(step):
            row, channel = tiles.at(first + step * stride)
            channel += warpgroup * WIDTH
            plgpu.copy_gmem_to_smem(bias.at[pl.ds(channel, WIDTH)], bias_smem.at[warpgroup], bias_loaded.at[warpgroup])
            h = _contract(tiles.depth, step * tiles.depth, operands, loaded, consumed, warpgroup)
            plgpu.barrier_wait(bias_loaded.at[warpgroup])
            h[0] += jax.lax.broadcast_in_dim(bias_smem[warpgroup], (ROWS, WIDTH), (1,))
            y = octic_gelu(h)
            _store(y, y_lines_smem.at[warpgroup], y_planes_smem.at[warpgroup], y_lines, y_planes, row, channel)

        plgpu.wait_smem_to_gmem(0)


def _side_by_side(w_planes, f):
    """w_planes [2C, 2F] as [2, C, 2F], with the channels of both copies that one warpgroup computes adjacent."""
    w_planes = w_planes.reshape(2, -1, 2, f // WIDTH, WIDTH)
    return w_planes.swapaxes(2, 3).reshape(2, -1, 2 * f)


def _load(sources, slots, barrier, row, channel, step):
    """Load one step's operands: [4, rows, depth], [copy, 2, rows, depth], [4, depth, F], [copy, depth, 2F]."""
    lines, planes, w_lines, w_planes = sources
    lines_smem, planes_smem, w_lines_smem, w_planes_smem = slots
    depth = lines_smem.shape[-1]
    rows, inner = pl.ds(row, ROWS), pl.ds(step * depth, depth)
    load = functools.partial(plgpu.copy_gmem_to_smem, barrier=barrier)
    load(lines.at[:, rows, inner], lines_smem)
    for copy in range(2):
        load(planes.at[:, rows, pl.ds(copy * lines.shape[-1] + step * depth, depth)], planes_smem.at[copy])
    share = functools.partial(load, collective_axes="cluster")
    share(w_lines.at[:, inner, pl.ds(channel, COMPUTE * WIDTH)], w_lines_smem)
    share(w_planes.at[:, inner, pl.ds(2 * channel, 2 * COMPUTE * WIDTH)], w_planes_smem)


def _contract(depth, first, operands, loaded, consumed, warpgroup):
    """The eight components of a warpgroup's tile, float32 [ROWS, WIDTH] each."""

    def contract(*accumulators):
        @pl.loop(0, depth)
        def _(k):
            slot = (first + k) % operands[0].shape[0]
            lines, planes, w_lines, w_planes = (ref.at[slot] for ref in operands)
            plgpu.barrier_wait(loaded.at[slot])
            for i in range(4):
                plgpu.wgmma(accumulators[i], lines.at[i], w_lines.at[i, :, pl.ds(warpgroup * WIDTH, WIDTH)])
            for row in range(2):
                for copy in range(2):
                    columns = pl.ds(warpgroup * 2 * WIDTH, 2 * WIDTH)
                    plgpu.wgmma(accumulators[4 + row], planes.at[copy, row], w_planes.at[copy, :, columns])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(consumed.at[slot])

        return [accumulator[...] for accumulator in accumulators]

    acc = plgpu.ACC  # public, but not exported explicitly  # pyright: ignore[reportPrivateImportUsage]
    narrow, wide = acc((ROWS, WIDTH), jnp.float32), acc((ROWS, 2 * WIDTH), jnp.float32)
    *lines, row_1, row_2 = pl.run_scoped(contract, *[narrow] * 4, wide, wide)
    return [*lines, row_1[:, :WIDTH], row_2[:, :WIDTH], row_1[:, WIDTH:], row_2[:, WIDTH:]]


def _store(y, lines_smem, planes_smem, lines, planes, row, channel):
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile is stored
    for i in range(4):
        lines_smem[i] = y[i].astype(lines_smem.dtype)
        planes_smem[i // 2, i % 2] = y[4 + i].astype(planes_smem.dtype)
    plgpu.commit_smem()
    rows, channels = pl.ds(row, ROWS), pl.ds(channel, WIDTH)
    plgpu.copy_smem_to_gmem(lines_smem, lines.at[:, rows, channels], commit_group=False)
    for copy in range(2):
        channels = pl.ds(copy * lines.shape[-1] + channel, WIDTH)
        plgpu.copy_smem_to_gmem(planes_smem.at[copy], planes.at[:, rows, channels], commit_group=copy == 1)
