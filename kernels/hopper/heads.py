"""Queries, keys and values of octic attention on a Hopper GPU, head by head as cuDNN takes them: `rows.multiply`.

The same product, with the transposed map after attention, gives the gradient of the result, which cuDNN takes too.

cuDNN wants q, k and v as [M, H, 8c], with all eight components of a head side by side.  A tile has all columns of a few
heads, so a warpgroup puts their components together in shared memory and stores whole heads.  Attention does not depend
on the order of the channels in a head's vector, if q and k agree; the values keep it.  The order here takes the least
work.  The tensor cores' registers have columns in groups of eight, and a thread holds two neighbours of a group, so
that moving anything but whole groups costs shuffles:

  - If 8 divides c, a head's vector is [A1 | A2 | B1 | B2 | E row 0 | E row 1], and weights keep their order.
  - If c is 2 more than a multiple of 8, as in ViT-H, a tile has four heads.  A head's vector is [A1 | A2 | B1 | B2],
    whole groups alone, then the channels left of them, those left of E, and [E row 0 | E row 1], whole groups alone.
    The two channels left of A1, A2, B1 and B2 together fill a group of each head.  In the weights the four heads'
    remainders form a group, which component i begins with head -i: every pair of columns of a head's group is then in
    place in one of the components, and a select takes it from there.  Likewise for the four channels left of each row
    of E, where the group of row 1 has the two heads the other way round: so there are two copies of these columns, left
    and right of the others.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from equivit.kernels.hopper import best, rows
from equivit.kernels.hopper.rows import COMPUTE, ROWS, Columns, Epilogue, Ring
from equivit.kernels.hopper.vectors import Vectors

NAME = "octic_heads"
GROUP = 8  # columns, of which each thread holds two
WIDTH = 32  # channels of each line in a tile if 8 divides c


def heads_of_tile(c: int) -> int:
    """Heads of c channels per component in a tile; 0 if the kernel does not support them."""
    if c % GROUP == 2 and c > GROUP:  # registers hold whole groups of a component
        return 4
    return WIDTH // c if c % GROUP == 0 and c and WIDTH % c == 0 else 0


def columns(c: int) -> Columns:
    """The weights of a tile of heads with c channels per component."""
    if c % GROUP == 0:
        return Columns(WIDTH, 2 * WIDTH, (2 * WIDTH, 0, 0), 32)
    main = 4 * (c - 2)
    lines = main + GROUP + -(main + GROUP) % 16  # the last ones are empty
    return Columns(lines, 2 * main + 32, (2 * main + 16, 0, 16), 16)


def rings(width: int, c: int) -> list[Ring]:
    """The ring buffers that fit in shared memory for a field of `width` channels per component."""
    return rows.rings(width, columns(c), 2 * ROWS * 8 * c)


def default_ring(width: int, c: int) -> Ring | None:
    """The ring buffer that was fastest on a card, or else `rows.default_ring`."""
    measured = best.tile(NAME, width, c)
    return Ring(*measured) if measured else rows.default_ring(width, columns(c), 2 * ROWS * 8 * c)


def supported(width: int, heads: int, dtype: DTypeLike, parts: int = 3) -> bool:
    """Whether the kernel supports a field of `width` channels per component, and this number of heads in each part."""
    if jnp.dtype(dtype) != jnp.bfloat16 or width % heads:
        return False
    c = width // heads
    together = heads_of_tile(c)
    whole = together > 0 and heads % together == 0 and parts * heads >= COMPUTE * together
    return whole and default_ring(width, c) is not None


def of_bias(bias: jax.Array, c: int) -> jax.Array:
    """A bias [P C] as a row for each tile of heads with c channels per component."""
    if c % GROUP == 0:
        return bias.reshape(-1, WIDTH)
    lines, _ = _sources(c)
    return jnp.pad(bias.reshape(-1, 4 * c)[:, lines[0]], ((0, 0), (0, rows.bias_columns(columns(c)) - 4 * c)))


@functools.partial(jax.jit, static_argnames=("heads", "ring"))
def forward(
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    vectors: Vectors,
    *,
    heads: int,
    ring: Ring | None = None,
) -> tuple[jax.Array, ...]:
    """A linear map to P arrays of all heads, such as q, k and v; `hopper.irreps` is the inverse.

    TMA needs a multiple of 8 rows in tiled memory; other numbers are padded, which costs a copy.

    Shapes: lines [4, M, C], planes [2, M, 2C], w_lines [4, C, P C], w_planes [2C, 2P C], columns ordered
    (q | k | v) x heads x channels, and `of_bias` as vectors -> P times [M, H, 8C / H].
    """
    (_, m, width), dtype = lines.shape, lines.dtype
    c, padded = width // heads, m + -m % 8
    padding = ((0, 0), (0, padded - m), (0, 0))
    out = (jax.ShapeDtypeStruct((padded, heads, 8 * c), dtype),) * (w_lines.shape[-1] // width)
    # Whole rows of a head have no bank conflicts to speak of, unless they are a multiple of 128 bytes.
    transforms = (plgpu.TilingTransform((8, GROUP)),) if c % GROUP == 0 else ()
    own = plgpu.SMEM((COMPUTE, ROWS, 8 * c), dtype, transforms=transforms), *rows.bias_types(columns(c))
    load = functools.partial(rows.load_bias, vectors.first)
    epilogue = Epilogue(NAME, columns(c), out, own, load, functools.partial(_store, c=c))
    weights = *_arranged(w_lines, w_planes, c), vectors.array
    fields = jnp.pad(lines, padding), jnp.pad(planes, padding)
    return tuple(y[:m] for y in rows.multiply(epilogue, ring or default_ring(width, c), *fields, *weights))


def _arranged(w_lines, w_planes, c):
    """The weights [4, C, T l] and [2, C, T p] of `rows.multiply`."""
    width = w_lines.shape[1]
    if c % GROUP == 0:
        return w_lines, w_planes.reshape(2, width, -1)
    lines, planes = _sources(c)
    tiles = w_lines.shape[-1] // (4 * c)
    empty = columns(c).lines - 4 * c  # which repeat a column: nothing reads them
    lines = np.pad(lines, ((0, 0), (0, empty)))[:, None, None]
    w_lines = jnp.take_along_axis(w_lines.reshape(4, width, tiles, 4 * c), lines, axis=-1)
    w_planes = w_planes.reshape(2, width, tiles, 8 * c)[..., planes]
    return w_lines.reshape(4, width, -1), w_planes.reshape(2, width, -1)


def _sources(c):
    """For each line [4, 4c] and the planes [p]: the natural column, among those of four heads, of each column."""
    main = c - 2
    heads = np.arange(4)[:, None]
    body = heads * c + np.arange(main)
    lines = [np.concatenate([body.ravel(), (np.roll(heads, i, 0) * c + main + np.arange(2)).ravel()]) for i in range(4)]
    body = heads * 2 * c + np.arange(2 * main)
    rest = heads * 2 * c + 2 * main + np.arange(4)
    return np.stack(lines), np.concatenate([rest.ravel(), body.ravel(), rest[[1, 0, 3, 2]].ravel()])


def _store(sums, own, beside, results, row, column, *, c):
    """Store the heads of a tile, one after the other, in q, k or v."""
    stage, sums = own[0], rows.add_bias(sums, own)
    together = heads_of_tile(c)
    per_part = results[0].shape[1] // together
    part, first = column // per_part, column % per_part * together
    for head in range(together):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head is stored
        place = 0
        for group in _groups([x.astype(stage.dtype) for x in sums], head, c):
            columns = pl.ds(place, group.shape[1])
            if c % GROUP:
                put(stage.at[:, columns], group)
            else:
                stage[:, columns] = group
            place += group.shape[1]
        plgpu.commit_smem()
        for i, result in enumerate(results):
            target = result.at[pl.ds(row, ROWS), first + head]
            pl.when(part == i)(functools.partial(plgpu.copy_smem_to_gmem, stage, target))


def put(rows: Any, columns: jax.Array) -> None:
    """Write columns of rows, some of which begin in the same bank of shared memory: JAX 0.12 refuses that unasked."""
    if store := getattr(plgpu, "store", None):
        store(rows, columns, optimized=False)
    else:
        rows[...] = columns


def _groups(sums, head, c):
    """The parts of a head's vector, [ROWS, columns]."""
    *lines, row_1, row_2 = sums
    main = c // GROUP * GROUP
    body = [x[:, head * main : (head + 1) * main] for x in lines]
    if c % GROUP == 0:
        return [*body, *(x[:, 2 * head * main : 2 * (head + 1) * main] for x in (row_1, row_2))]
    column = plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, (ROWS, GROUP), 1), plgpu.Layout.WGMMA)
    rests = [x[:, 4 * main : 4 * main + GROUP] for x in lines]
    mixed = rests[(3 - head) % 4]
    for pair in range(3):
        mixed = jnp.where(column // 2 == pair, rests[(pair - head) % 4], mixed)
    rows = [
        row_1[:, 16 + 2 * head * main : 16 + 2 * (head + 1) * main],
        row_2[:, 2 * head * main : 2 * (head + 1) * main],
    ]
    at = head // 2 * GROUP
    rests = row_1[:, at : at + GROUP], row_2[:, 8 * main + at : 8 * main + at + GROUP]
    return [*body, mixed, jnp.where((column < 4) == (head % 2 == 0), *rests), *rows]
