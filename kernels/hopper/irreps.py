"""Head vectors irrep by irrep on a Hopper GPU (Pallas, Mosaic GPU), in one pass.

This undoes what `hopper.heads` stores, for the result of attention and for the gradients of queries, keys and values.
The kernel is memory-bound: a block has a tile of 64 rows of a few heads in shared memory, and moves groups of eight
columns.  So the channels of those heads are in the order of `arranged`.  Products do not depend on it, if their weights
have the same order.  TMA clips the last tile, so any number of rows works.
"""

import functools
import inspect

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from equivit.kernels.hopper.heads import GROUP, heads_of_tile, put
from equivit.kernels.isotypic_linear import Field

MULTIPROCESSORS = 132  # of an H200; other GPUs balance the load less evenly, with the same result
BLOCKS = 2  # per multiprocessor, of 128 threads and 80 KB of shared memory at 10 channels
ROWS = 64
NAME = "octic_irreps"
WHOLE = (...,) if "idx" in inspect.signature(plgpu.load).parameters else ()  # the index that JAX 0.10 wants


def arranged(field: Field, c: int, axis: int = -1) -> Field:
    """Lines and planes, or lines alone, with an axis of heads x c and heads x 2c channels, in the order of `forward`.

    The heads of a tile have their whole groups of channels first, then the channels left.
    """
    return _reordered(field, c, axis, lambda order: order)


def natural(field: Field, c: int, axis: int = -1) -> Field:
    """The inverse of `arranged`."""
    return _reordered(field, c, axis, np.argsort)


def _reordered(field, c, axis, places):
    return tuple(_taken(a, places(_order(copies * c, heads_of_tile(c))), axis) for copies, a in enumerate(field, 1))


def _order(width, together):
    """The channels of a tile's heads, of `width` channels each, in the order of `forward`."""
    channels, whole = np.arange(together * width).reshape(together, width), width // GROUP * GROUP
    return np.concatenate([channels[:, :whole].ravel(), channels[:, whole:].ravel()])


def _taken(array, places, axis):
    x = jnp.moveaxis(array, axis, -1)
    tiles = x.reshape(*x.shape[:-1], -1, len(places))
    return jnp.moveaxis(tiles[..., places].reshape(x.shape), -1, axis)


@jax.jit
def forward(*vectors: jax.Array) -> Field:
    """The field of P arrays of head vectors, side by side in each irrep, with channels in the order of `arranged`.

    Shapes: P times [M, H, 8c] -> lines [4, M, P H c], planes [2, M, 2P H c].
    """
    (m, heads, width), dtype = vectors[0].shape, vectors[0].dtype
    c, channels = width // 8, len(vectors) * heads * width // 8
    together = heads_of_tile(c)
    tiles = -(-m // ROWS), len(vectors), heads // together
    return plgpu.kernel(
        functools.partial(_body, tiles),
        out_type=(
            jax.ShapeDtypeStruct((4, m, channels), dtype),
            jax.ShapeDtypeStruct((2, m, 2 * channels), dtype),
        ),
        scratch_types=[
            plgpu.SMEM((together, ROWS, width), dtype),
            plgpu.SMEM((4, ROWS, together * c), dtype),
            plgpu.SMEM((2, ROWS, 2 * together * c), dtype),
            plgpu.Barrier(num_arrivals=together),
        ],
        grid=(min(tiles[0] * tiles[1] * tiles[2], MULTIPROCESSORS * BLOCKS),),
        grid_names=("block",),
        kernel_name=NAME,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # safe: `commit_smem` orders all accesses of threads and of TMA
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*vectors)


def _body(tiles, *refs):
    vectors, results, (tile, lines, planes, loaded) = refs[:-6], refs[-6:-4], refs[-4:]
    rows, parts, columns = tiles
    block, blocks = jax.lax.axis_index("block"), jax.lax.axis_size("block")
    steps = (rows * parts * columns - block + blocks - 1) // blocks
    together = tile.shape[0]

    def place(step):
        """First row, number of the array and of the tile of columns among its own."""
        number = block + step * blocks
        return number // (parts * columns) * ROWS, number // columns % parts, number % columns

    def load(step):
        row, part, column = place(step)
        for i, source in enumerate(vectors):
            pl.when(part == i)(functools.partial(load_heads, source, row, column * together))

    def load_heads(source, row, first):
        for head in range(together):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(row, ROWS), first + head], tile.at[head], loaded)

    pl.when(steps > 0)(lambda: load(jnp.int32(0)))

    @pl.loop(0, steps)
    def _(step):
        row, part, column = place(step)
        plgpu.barrier_wait(loaded)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile is stored
        _move(tile, lines, planes)
        plgpu.commit_smem()
        pl.when(step + 1 < steps)(lambda: load(step + 1))
        for source, target in zip((lines, planes), results, strict=True):
            width = source.shape[-1]
            window = pl.ds(row, ROWS), pl.ds((part * columns + column) * width, width)
            plgpu.copy_smem_to_gmem(source, target.at[:, *window], commit_group=source is planes)

    plgpu.wait_smem_to_gmem(0)


def _move(tile, lines, planes):
    """Move the heads of a tile, [heads, ROWS, 8c] in the order of `hopper.heads`, to lines and planes."""
    together, _, width = tile.shape
    main = width // 8 // GROUP * GROUP
    first_of_rows = 4 * main + (2 * GROUP if width // 8 % GROUP else 0)
    for head in range(together):
        for i in range(4):
            lines[i, :, pl.ds(head * main, main)] = _vectors(tile, head, i * main, main)
        for row in range(2):
            start = first_of_rows + row * 2 * main
            planes[row, :, pl.ds(head * 2 * main, 2 * main)] = _vectors(tile, head, start, 2 * main)
    if width // 8 % GROUP:
        _move_rest(tile, lines, planes, main)


def _move_rest(tile, lines, planes, main):
    """Move the two and four channels that are left of the lines and planes of four heads.

    A thread has the same two columns of any group.  So it reads where its columns of the result lie in each head.
    """
    column = plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, (ROWS, GROUP), 1), plgpu.Layout.WGMMA)
    for i in range(4):
        starts = [4 * main + 2 * ((i + head) % 4 - head) for head in range(4)]
        rest = _pairs(tile, 3, starts[3])
        for head in range(3):
            rest = jnp.where(column // 2 == head, _pairs(tile, head, starts[head]), rest)
        put(lines.at[i, :, pl.ds(4 * main, GROUP)], rest)
    for row in range(2):
        for pair in range(2):
            left = _pairs(tile, 2 * pair, 4 * main + GROUP + 4 * row)
            right = _pairs(tile, 2 * pair + 1, 4 * main + GROUP - 4 * row)
            put(planes.at[row, :, pl.ds(8 * main + pair * GROUP, GROUP)], jnp.where(column < 4, left, right))


def _vectors(tile, head, start, width):
    """Columns of a head in registers, neighbours in the same thread."""
    layout = plgpu.Layout.WG_STRIDED((ROWS, width), vec_size=min(ROWS * width // 128, 8))
    return plgpu.layout_cast(tile[head, :, pl.ds(start, width)], layout)


def _pairs(tile, head, start):
    """A group of columns of a head in the layout of the tensor cores' registers, which may begin anywhere."""
    group = tile.at[head, :, pl.ds(start, GROUP)]
    # Rows 0 and 4 of a warp are in the same bank, which `optimized` refuses.
    return plgpu.layout_cast(plgpu.load(group, *WHOLE, optimized=False), plgpu.Layout.WGMMA)
