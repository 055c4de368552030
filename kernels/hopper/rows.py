"""The product of a field with all weights of a linear map on a Hopper GPU (Pallas, Mosaic GPU), in bfloat16.

A block holds 64 rows of the field, all their channels, in shared memory, and multiplies them with one tile of columns
after the other, so that the field is read once (more often where clusters would otherwise be idle at the end).  Two
warpgroups take turns: one has the eight components of a tile of columns in its registers and multiplies, while the
other applies an epilogue to the float32 sums of its own tile and stores the result.  An epilogue sees whole fields.

A third warpgroup only issues loads: the tensor memory accelerator (TMA) fills a ring buffer in shared memory with the
weights, `depth` channels of the contraction at a time, and replaces the rows, `depth` channels at a time, as soon as
the last tile has used them.  The ring is filled in the order of the tiles, so the warpgroups alternate by themselves.
Blocks of a cluster work on neighbouring rows and load the weights together (multicast).  Reads past the last row give
zero, and writes past it are dropped.

Two warpgroups with 232 registers and one with 40 fill a multiprocessor, as the rows fill its shared memory, so there is
one block on each.  What bounds the products is shared memory, at 128 bytes a cycle: a tile of 32 columns reads 28 KB of
operands for 16 channels of the contraction, and writes 8 KB of weights, in 288 cycles, where the tensor cores need 192.
(With rows that were loaded for every tile it would be 416.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
CLUSTER = 2  # blocks
ROWS = 64  # per block, as in one tensor core instruction
COMPUTE = 2  # compute warpgroups per block
MOST_SLOTS = 8  # steps of the contraction in the ring buffer
FEWEST_SLOTS = 3
SHARED_BYTES = 227 * 1024  # of a block
REGISTERS = 232, 40  # per thread of a compute warpgroup, and of the one that loads: 64,512 of a multiprocessor's 65,536


class Columns(NamedTuple):
    """The columns of weights in one tile.

    Attributes:
      lines: columns of each 1-D irrep.
      planes: columns of each copy of E.
      of_rows: how many of these columns each row of E takes, and where the two rows begin.
      unit: most columns of the tiles in shared memory, whose 16-byte units are swizzled: 16 or 32.
    """

    lines: int
    planes: int
    of_rows: tuple[int, int, int]
    unit: int

    def bytes(self, depth: int) -> int:
        """Shared memory of the weights for `depth` channels of the contraction."""
        return 2 * depth * (4 * self.lines + 2 * self.planes)


class Epilogue(NamedTuple):
    """How a tile of sums becomes results.

    Attributes:
      name: of the kernel.
      columns: the weights of a tile.
      out_type: the results.
      own: shared memory and barriers, [COMPUTE, ...] for one part for each warpgroup.
      load: function(own, beside, row, column) that begins to load what the tile needs beside its sums, before them.
      store: function(sums, own, beside, results, row, column) that stores a tile; `sums` are the lines [ROWS, lines],
        then the rows of E [ROWS, of_rows[0]].
    """

    name: str
    columns: Columns
    out_type: Any
    own: tuple[Any, ...]
    load: Callable
    store: Callable


class Ring(NamedTuple):
    """Channels of one step of the contraction, and steps in the ring buffer."""

    depth: int
    slots: int


def rings(c: int, columns: Columns, stage_bytes: int) -> list[Ring]:
    """For each depth, the ring with most slots that fits in shared memory beside the rows and the staged results."""
    free = (
        SHARED_BYTES - 2 * 8 * c * ROWS - COMPUTE * (stage_bytes + 4 * bias_columns(columns)) - 2048
    )  # for the barriers
    found = [Ring(depth, min(free // columns.bytes(depth), MOST_SLOTS)) for depth in (32, 16) if c % depth == 0]
    return [ring for ring in found if ring.slots >= 2]


def default_ring(c: int, columns: Columns, stage_bytes: int) -> Ring | None:
    """The deepest steps of which enough fit in shared memory; None if there are none."""
    return next((ring for ring in rings(c, columns, stage_bytes) if ring.slots >= FEWEST_SLOTS), None)


def swizzled(*shape: int, unit: int, dtype: Any = jnp.bfloat16) -> Any:
    """Shared memory in the tensor cores' layout: tiles of 8 x unit, with 16-byte units swizzled."""
    swizzle = plgpu.SwizzleTransform(unit * jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, unit)), swizzle))


def multiply(
    epilogue: Epilogue,
    ring: Ring | None,
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    *beside: jax.Array,
) -> Any:
    """The epilogue of x W.

    Shapes: lines [4, M, C], planes [2, M, 2C], M a multiple of 8, w_lines [4, C, T l], w_planes [2, C, T p] for each
    copy of E, for T tiles of l and p columns.

    Args:
      beside: what the epilogue reads.

    Raises:
      ValueError: no ring, because shared memory does not hold the rows, or fewer tiles than warpgroups.
    """
    (_, m, c), columns = lines.shape, epilogue.columns
    if ring is None:
        raise ValueError(f"{epilogue.name}: shared memory does not hold {ROWS} rows of {c=} channels a component.")
    unit = min(columns.unit, ring.depth)
    tiles = _Tiles.cut(-(-m // (ROWS * CLUSTER)), w_lines.shape[-1] // columns.lines, c // ring.depth)
    return plgpu.kernel(
        functools.partial(_body, epilogue, tiles, len(beside)),
        out_type=epilogue.out_type,
        scratch_types=[
            swizzled(tiles.depth, 4, ROWS, ring.depth, unit=unit),
            swizzled(tiles.depth, 2, 2, ROWS, ring.depth, unit=unit),
            swizzled(ring.slots, 4, ring.depth, columns.lines, unit=unit),
            swizzled(ring.slots, 2, ring.depth, columns.planes, unit=unit),
            plgpu.Barrier(num_arrivals=3, num_barriers=tiles.depth),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiles.depth),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE * ring.slots),
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=1, num_barriers=ring.slots),
            *epilogue.own,
        ],
        grid=(min(tiles.count, MULTIPROCESSORS // CLUSTER),),
        grid_names=("grid",),
        cluster=(CLUSTER,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name=epilogue.name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # the hardware's exp2, with relative error below 2^-22
            unsafe_no_auto_barriers=True,  # safe: threads only read what TMA writes, and only write what it reads
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(lines, planes, w_lines, w_planes, *beside)


def bias_columns(columns: Columns) -> int:
    """The entries of a tile's bias, with empty ones at the end: TMA needs multiples of 128 bytes."""
    return columns.lines + -columns.lines % 32


def bias_types(columns: Columns) -> tuple[Any, Any]:
    """An epilogue's own memory for a bias of a tile, and its barrier."""
    return plgpu.SMEM((COMPUTE, bias_columns(columns)), jnp.float32), plgpu.Barrier(num_barriers=COMPUTE)


def load_bias(first: int, own: tuple[Any, ...], beside: tuple[Any, ...], row: jax.Array, column: jax.Array) -> None:
    """Begin to load a tile's bias, for `Epilogue.load`: `own` ends with `bias_types`, and a row per tile is beside."""
    del row
    plgpu.copy_gmem_to_smem(beside[0].at[first + column], *own[-2:])


def add_bias(sums: list[jax.Array], own: tuple[Any, ...]) -> list[jax.Array]:
    """Sums with the tile's bias added to the invariant component."""
    bias, loaded = own[-2:]
    plgpu.barrier_wait(loaded)
    own_columns = bias[pl.ds(0, sums[0].shape[1])]
    return [sums[0] + jax.lax.broadcast_in_dim(own_columns, sums[0].shape, (1,)), *sums[1:]]


class _Tiles(NamedTuple):
    """Parts of the result, of the rows of a cluster; tiles of columns in a part, and steps of the contraction."""

    count: int
    columns: int
    depth: int
    parts: int  # of the same rows

    @classmethod
    def cut(cls, rows: int, columns: int, depth: int):
        """As few parts of the same rows as possible, but so that the clusters finish at nearly the same time."""

        def time(parts):
            return -(-rows * parts // (MULTIPROCESSORS // CLUSTER)) / parts

        most = columns // COMPUTE  # each warpgroup has a tile of every part
        if not most:
            raise ValueError(f"rows.multiply: {columns} tile of columns must be at least {COMPUTE}, one a warpgroup.")
        parts = min((p for p in range(1, min(most, 4) + 1) if columns % p == 0), key=time)
        return cls(rows * parts, columns // parts, depth, parts)

    def at(self, n):
        """First row of this block, and first tile of columns, of its n-th part."""
        number = jax.lax.axis_index("grid") + n * jax.lax.axis_size("grid")
        row = (number // self.parts * CLUSTER + jax.lax.axis_index("cluster")) * ROWS
        return row, number % self.parts * self.columns


class _Scratch(NamedTuple):
    """The memory of a block, and its barriers."""

    lines: Any
    planes: Any
    w_lines: Any
    w_planes: Any
    rows_loaded: Any
    rows_consumed: Any
    loaded: Any  # by warpgroup and slot: a warpgroup waits only for its own tiles
    consumed: Any


def _body(epilogue, tiles, number, *refs):
    sources, beside, others = refs[:4], refs[4 : 4 + number], refs[4 + number :]
    first_own = len(others) - len(epilogue.own)
    first_shared = first_own - len(_Scratch._fields)
    results, scratch, own = others[:first_shared], _Scratch(*others[first_shared:first_own]), others[first_own:]
    warpgroup = jax.lax.axis_index("warpgroup")
    first, stride = jax.lax.axis_index("grid"), jax.lax.axis_size("grid")
    count = (tiles.count - first + stride - 1) // stride

    @pl.when(warpgroup == COMPUTE)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _load_all(epilogue, tiles, count, sources, scratch)

    @pl.when(warpgroup < COMPUTE)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        part = tuple(ref.at[warpgroup] for ref in own)

        @pl.loop(0, count)
        def _(n):
            row, first_column = tiles.at(n)

            @pl.loop(0, (tiles.columns - warpgroup + COMPUTE - 1) // COMPUTE)
            def _(i):
                column = i * COMPUTE + warpgroup
                epilogue.load(part, beside, row, first_column + column)
                sums = _contract(epilogue.columns, tiles, n, column, scratch, warpgroup)
                epilogue.store(sums, part, beside, results, row, first_column + column)

        plgpu.wait_smem_to_gmem(0)


def _load_all(epilogue, tiles, count, sources, scratch):
    """Load the rows and weights of all tiles, in the order of their use."""
    lines, planes, w_lines, w_planes = sources
    slots, depth, columns = scratch.w_lines.shape[0], scratch.w_lines.shape[2], epilogue.columns

    def load_rows(n, row, k):
        pl.when(n > 0)(lambda: plgpu.barrier_wait(scratch.rows_consumed.at[k]))
        load = functools.partial(plgpu.copy_gmem_to_smem, barrier=scratch.rows_loaded.at[k])
        rows = pl.ds(row, ROWS)
        load(lines.at[:, rows, pl.ds(k * depth, depth)], scratch.lines.at[k])
        for copy in range(2):
            inner = pl.ds(copy * lines.shape[-1] + k * depth, depth)
            load(planes.at[:, rows, inner], scratch.planes.at[k, copy])

    @pl.loop(0, count)
    def _(n):
        row, first_column = tiles.at(n)

        @pl.loop(0, tiles.columns * tiles.depth)
        def _(step):
            column, k = step // tiles.depth, step % tiles.depth
            pl.when(column == 0)(lambda: load_rows(n, row, k))
            number = n * tiles.columns * tiles.depth + step
            slot, inner = number % slots, pl.ds(k * depth, depth)
            pl.when(number >= slots)(lambda: plgpu.barrier_wait(scratch.consumed.at[slot]))
            loaded = scratch.loaded.at[column % COMPUTE * slots + slot]
            share = functools.partial(plgpu.copy_gmem_to_smem, barrier=loaded, collective_axes="cluster")
            column += first_column
            share(w_lines.at[:, inner, pl.ds(column * columns.lines, columns.lines)], scratch.w_lines.at[slot])
            share(w_planes.at[:, inner, pl.ds(column * columns.planes, columns.planes)], scratch.w_planes.at[slot])

    # The other block of the cluster also signals these barriers: wait for it before exiting.
    total = count * tiles.columns * tiles.depth
    pl.loop(jnp.maximum(total - slots, 0), total)(lambda step: plgpu.barrier_wait(scratch.consumed.at[step % slots]))


def _contract(columns, tiles, n, column, scratch, warpgroup):
    """The sums of a tile, float32: of the lines [ROWS, lines], and of the rows of E.

    The products of a step run while the warpgroup waits for the operands of the next.
    """
    slots = scratch.w_lines.shape[0]
    taken, *starts = columns.of_rows
    first, last = column < COMPUTE, column >= tiles.columns - COMPUTE  # tiles of the warpgroup with these rows
    start = (n * tiles.columns + column) * tiles.depth

    def release(k):
        plgpu.barrier_arrive(scratch.consumed.at[(start + k) % slots])
        pl.when(last)(lambda: plgpu.barrier_arrive(scratch.rows_consumed.at[k]))

    def contract(*sums):
        @pl.loop(0, tiles.depth)
        def _(k):
            slot = (start + k) % slots
            pl.when(first)(lambda: plgpu.barrier_wait(scratch.rows_loaded.at[k]))
            plgpu.barrier_wait(scratch.loaded.at[warpgroup * slots + slot])
            for i in range(4):
                plgpu.wgmma(sums[i], scratch.lines.at[k, i], scratch.w_lines.at[slot, i])
            for row in range(2):
                for copy in range(2):
                    weights = scratch.w_planes.at[slot, copy, :, pl.ds(starts[row], taken)]
                    plgpu.wgmma(sums[4 + row], scratch.planes.at[k, copy, row], weights)
            plgpu.wgmma_wait(8)  # all but this step's products
            pl.when(k > 0)(lambda: release(k - 1))

        plgpu.wgmma_wait(0)
        release(tiles.depth - 1)
        return [ref[...] for ref in sums]

    acc = plgpu.ACC  # public, but not exported explicitly  # pyright: ignore[reportPrivateImportUsage]
    narrow, wide = acc((ROWS, columns.lines), jnp.float32), acc((ROWS, taken), jnp.float32)
    return list(pl.run_scoped(contract, *[narrow] * 4, wide, wide))
