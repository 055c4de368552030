"""The second linear map of a branch, its layer scale and the residual sum on a Hopper GPU (Pallas, Mosaic GPU).

y = x + scale * (h W + bias), with products in bfloat16 and the stream x in float32 or bfloat16, read and written once.

Nothing here mixes the components of a field, so a tile belongs to one of them: 128 rows by up to 160 channels, wide
enough that the hidden field h is read once (the planes: twice).  Two warpgroups multiply 64 rows each.  A third only
issues loads: the tensor memory accelerator (TMA) fills a ring buffer in shared memory with the operands, `depth`
channels of the contraction at a time, while the others add the stream to the tile before.  Blocks of a cluster work on
neighbouring rows and load the weights together (multicast).  Tiles of planes, which take twice as long, come first.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.hopper import best
from equivit.kernels.hopper.vectors import OF_FIELD, Vectors

NAME = "octic_residual"
MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
CLUSTER = 2  # blocks
ROWS = 64  # per warpgroup, as in one tensor core instruction
COMPUTE = 2  # compute warpgroups per block
WIDEST = 160  # most channels of a tile: 80 registers of a thread hold its sums
MOST_SLOTS = 8  # steps of the contraction in the ring buffer
SHARED_BYTES = 227 * 1024  # of a block
UNIT = 32  # channels of the tiles in shared memory, whose 16-byte units are swizzled


def supported(f: int, c: int, dtype: DTypeLike, stream: DTypeLike) -> bool:
    """Whether the kernel supports a map from F to C channels of this dtype, and the stream's dtype."""
    floats = jnp.dtype(stream) in (jnp.float32, jnp.bfloat16)
    return jnp.dtype(dtype) == jnp.bfloat16 and floats and f % UNIT == 0 and c % UNIT == 0


class Tile(NamedTuple):
    """Channels of a tile of the result, channels of one step of the contraction, and steps in the ring buffer."""

    width: int
    depth: int
    slots: int


def tiles(f: int, c: int, stream: DTypeLike) -> list[Tile]:
    """Tiles of whole units that divide C, the widest first, with the most slots that fit beside them."""
    found = []
    for width in range(min(c, WIDEST) // UNIT * UNIT, 0, -UNIT):
        held = COMPUTE * width * (ROWS * jnp.dtype(stream).itemsize + 2 * 4) + 1024  # barriers take less than 1024
        for depth in (32, 64):
            slots = min((SHARED_BYTES - held) // (2 * depth * (COMPUTE * ROWS + width)), MOST_SLOTS)
            if c % width == 0 and f % depth == 0 and slots >= 2:
                found.append(Tile(width, depth, slots))
    return found


def default_tile(f: int, c: int, stream: DTypeLike) -> Tile:
    """The tile that was fastest on a card, or else the widest, with the most slots."""
    measured = best.tile(NAME, f, c, jnp.dtype(stream).name)
    return Tile(*measured) if measured else tiles(f, c, stream)[0]


@functools.partial(jax.jit, static_argnames=("tile",))
def forward(
    x_lines: jax.Array,
    x_planes: jax.Array,
    h_lines: jax.Array,
    h_planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    vectors: Vectors,
    *,
    tile: Tile | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x + scale * (h W + bias); `vectors` are `of_field` of scales and bias.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs copies.

    Shapes: x_lines [4, M, C], x_planes [2, M, 2C], h_lines [4, M, F], h_planes [2, M, 2F], w_lines [4, F, C], w_planes
    [2F, 2C] -> the shapes and dtype of x.
    """
    m, (_, f, c) = x_lines.shape[1], w_lines.shape
    padding = (0, 0), (0, -m % 8), (0, 0)
    tile = tile or default_tile(f, c, x_lines.dtype)
    x, h = ([jnp.pad(a, padding) for a in field] for field in ((x_lines, x_planes), (h_lines, h_planes)))
    y_lines, y_planes = _whole_tiles(tile, x, h, (w_lines, w_planes), vectors)
    return y_lines[:, :m], y_planes[:, :m]


def _whole_tiles(tile, x, h, weights, vectors):
    (_, m, c), f, dtype, stream = x[0].shape, h[0].shape[-1], h[0].dtype, x[0].dtype
    grid = _Tiles(-(-m // (ROWS * COMPUTE * CLUSTER)), c // tile.width, f // tile.depth, tile)

    def smem(*shape, dtype=dtype):
        """Shared memory in the tensor cores' layout: tiles of 8 x UNIT, with 16-byte units swizzled."""
        swizzle = plgpu.SwizzleTransform(UNIT * jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, UNIT)), swizzle))

    return plgpu.kernel(
        functools.partial(_body, grid, vectors.first),
        out_type=tuple(jax.ShapeDtypeStruct(a.shape, stream) for a in x),
        scratch_types=[
            smem(tile.slots, COMPUTE, ROWS, tile.depth),
            smem(tile.slots, tile.depth, tile.width),
            smem(COMPUTE, ROWS, tile.width, dtype=stream),
            plgpu.SMEM((COMPUTE, 2, tile.width), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=COMPUTE),
            plgpu.Barrier(num_arrivals=COMPUTE + 1, num_barriers=tile.slots),
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=tile.slots),
        ],
        grid=(min(grid.count, MULTIPROCESSORS // CLUSTER),),
        grid_names=("grid",),
        cluster=(CLUSTER,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # safe: threads only read what TMA writes, and write what they alone read
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*x, *h, *weights, vectors.array)


class _Tiles(NamedTuple):
    """The tiles of a cluster: rows of a component x columns of an irrep, and the contraction steps of lines."""

    rows: int
    columns: int
    steps: int
    tile: Tile

    @property
    def planes(self) -> int:
        """Tiles of planes, which come first."""
        return 2 * self.rows * 2 * self.columns

    @property
    def count(self) -> int:
        return self.planes + 4 * self.rows * self.columns

    def before(self, n):
        """Contraction steps of this block before its n-th tile."""
        first, stride = jax.lax.axis_index("grid"), jax.lax.axis_size("grid")
        of_planes = jnp.maximum((self.planes - first + stride - 1) // stride, 0)
        return self.steps * (n + jnp.minimum(n, of_planes))

    def visit(self, n, function):
        """Call `function(planes, component, row, column)` for the n-th tile of this block.

        `planes` is a constant, `row` the first row of this block, and `column` counts tiles of width `width`.
        """
        number = jax.lax.axis_index("grid") + n * jax.lax.axis_size("grid")

        def call(planes, number):
            columns = (1 + planes) * self.columns
            row = number // columns % self.rows * CLUSTER + jax.lax.axis_index("cluster")
            function(planes, number // (columns * self.rows), row * ROWS * COMPUTE, number % columns)

        pl.when(number < self.planes)(lambda: call(True, number))
        pl.when(number >= self.planes)(lambda: call(False, number - self.planes))


def _body(tiles, first_vector, x_lines, x_planes, h_lines, h_planes, w_lines, w_planes, *refs):
    vectors, (y_lines, y_planes), scratch = refs[0], refs[1:3], refs[3:]
    h_smem, w_smem, x_smem, vectors_smem, x_loaded, loaded, consumed = scratch
    width, depth, slots = tiles.tile
    warpgroup = jax.lax.axis_index("warpgroup")
    count = (tiles.count - jax.lax.axis_index("grid") + jax.lax.axis_size("grid") - 1) // jax.lax.axis_size("grid")

    def load(n, planes, component, row, column):
        first = tiles.before(n)

        @pl.loop(0, tiles.steps * (1 + planes))
        def _(k):
            step = first + k
            slot, inner = step % slots, pl.ds(k * depth, depth)
            pl.when(step >= slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            h, w = (h_planes, w_planes) if planes else (h_lines, w_lines.at[component])
            for i in range(COMPUTE):
                rows = pl.ds(row + i * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(h.at[component, rows, inner], h_smem.at[slot, i], loaded.at[slot])
            window = inner, pl.ds(column * width, width)
            plgpu.copy_gmem_to_smem(w.at[window], w_smem.at[slot], loaded.at[slot], collective_axes="cluster")

    def compute(n, planes, component, row, column):
        x_tile, (scale_tile, bias_tile) = x_smem.at[warpgroup], (vectors_smem.at[warpgroup, i] for i in range(2))
        x, y = (x_planes, y_planes) if planes else (x_lines, y_lines)
        scale, channels = (4 + column // tiles.columns if planes else component), column % tiles.columns * width
        window = component, pl.ds(row + warpgroup * ROWS, ROWS), pl.ds(column * width, width)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile is stored
        load = functools.partial(plgpu.copy_gmem_to_smem, barrier=x_loaded.at[warpgroup])
        load(x.at[window], x_tile)
        for vector, target in ((scale, scale_tile), (OF_FIELD - 1, bias_tile)):
            load(vectors.at[first_vector + vector, pl.ds(channels, width)], target)
        steps = tiles.steps * (1 + planes)
        sums = _contract(steps, tiles.before(n), h_smem, w_smem, loaded, consumed, warpgroup)
        plgpu.barrier_wait(x_loaded.at[warpgroup])
        plain, biased = (functools.partial(_add, x_tile, scale_tile, sums, vector) for vector in (None, bias_tile))
        if planes:
            plain()
        else:
            pl.when(component > 0)(plain)
            pl.when(component == 0)(biased)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_tile, y.at[window])

    @pl.when(warpgroup == COMPUTE)
    def _():
        pl.loop(0, count)(lambda n: tiles.visit(n, functools.partial(load, n)))
        # The other block of the cluster also signals these barriers: wait for it before exiting.
        total = tiles.before(count)
        pl.loop(jnp.maximum(total - slots, 0), total)(lambda step: plgpu.barrier_wait(consumed.at[step % slots]))

    @pl.when(warpgroup < COMPUTE)
    def _():
        pl.loop(0, count)(lambda n: tiles.visit(n, functools.partial(compute, n)))
        plgpu.wait_smem_to_gmem(0)


def _contract(steps, first, h_smem, w_smem, loaded, consumed, warpgroup):
    """The sums of a warpgroup's tile, float32 [ROWS, width]; a step's products run while the next is awaited."""
    slots, width = h_smem.shape[0], w_smem.shape[-1]

    def contract(sums):
        @pl.loop(0, steps)
        def _(k):
            slot = (first + k) % slots
            plgpu.barrier_wait(loaded.at[slot])
            plgpu.wgmma(sums, h_smem.at[slot, warpgroup], w_smem.at[slot])
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(consumed.at[(first + k - 1) % slots]))

        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(consumed.at[(first + steps - 1) % slots])
        return sums[...]

    acc = plgpu.ACC  # public, but not exported explicitly  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(contract, acc((ROWS, width), jnp.float32))


def _add(x, scale, sums, bias):
    """Add scale * (sums + bias) to a tile in shared memory."""
    for start in range(0, x.shape[1], UNIT):
        columns = slice(start, start + UNIT)
        before, z = plgpu.layout_cast(x[:, columns], plgpu.Layout.WGMMA).astype(jnp.float32), sums[:, columns]
        z = z if bias is None else z + _over_rows(bias[columns])
        x[:, columns] = (before + z * _over_rows(scale[columns])).astype(x.dtype)


def _over_rows(vector):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (ROWS, UNIT), (1,)), plgpu.Layout.WGMMA)
