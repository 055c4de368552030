"""The gradient of an octic field that goes on and is standardised, on a Hopper GPU (Pallas, Mosaic GPU), in one pass.

The kernel is memory-bound: it reads the field and both gradients, and writes their sum at the field.  Its tiles are
loaded as in `hopper.norm`.  The result takes the place of the gradient it is added to, in the tile's slot.  TMA
clips the last tile, so any number of rows works.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.typing import DTypeLike

from equivit.kernels.hopper import norm as forward
from equivit.kernels.hopper.norm import (
    MULTIPROCESSORS,
    SLOTS,
    Ref,
    Tiles,
    centred,
    components,
    inverse_deviation,
    mean,
    read,
    store,
)
from equivit.kernels.norm import Norm

BLOCKS = 2  # per multiprocessor, of 128 threads with up to 108 registers and 100 KB of shared memory at 160 channels
ROWS = 4  # of a tile: one for each warp, since the field and a gradient share the registers


def supported(c: int, field: DTypeLike, gradient: DTypeLike) -> bool:
    """Whether the kernel supports C channels, and the dtypes of the field and of the standardised field's gradient."""
    return forward.supported(c, field) and forward.supported(c, gradient)


@functools.partial(jax.jit, static_argnames=("norm",))
def backward(
    lines: jax.Array,
    planes: jax.Array,
    d_lines: jax.Array,
    d_planes: jax.Array,
    z_lines: jax.Array,
    z_planes: jax.Array,
    *,
    norm: Norm,
) -> tuple[jax.Array, jax.Array]:
    """The gradient of the field in `norm.fork`: both results' gradients, the second pulled back, added.

    Shapes: lines [4, M, C] and planes [2, M, 2C], as all arrays -> the field's, in its dtype.

    Args:
      lines, planes: the field.
      d_lines, d_planes: the gradient of the field itself, in its dtype.
      z_lines, z_planes: the gradient of the standardised field.
    """
    _, m, c = lines.shape
    count = -(-m // ROWS)
    blocks = min(count, MULTIPROCESSORS * BLOCKS)
    dtypes = lines.dtype, lines.dtype, z_lines.dtype
    tiles = [(shape, dtype) for dtype in dtypes for shape in ((4, ROWS, c), (2, ROWS, 2, c))]
    y_lines, y_planes = plgpu.kernel(
        functools.partial(_body, norm, count, blocks),
        out_type=(jax.ShapeDtypeStruct((4, m, c), lines.dtype), jax.ShapeDtypeStruct((2, m, 2, c), lines.dtype)),
        scratch_types=[
            *(plgpu.SMEM((SLOTS, *shape), dtype) for shape, dtype in tiles),
            plgpu.Barrier(num_arrivals=len(tiles), num_barriers=SLOTS),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="octic_norm_gradient",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # as in `hopper.norm`
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )(*(a if len(a) == 4 else a.reshape(2, m, 2, c) for a in (lines, planes, d_lines, d_planes, z_lines, z_planes)))
    return y_lines, y_planes.reshape(2, m, 2 * c)


def _body(norm, count, blocks, *refs):
    sources, results, (*slots, loaded) = refs[:6], refs[6:8], refs[8:]
    tiles = Tiles(ROWS, count, blocks, sources, slots, loaded)

    def add(tile, rows):
        lines, planes, d_lines, d_planes, z_lines, z_planes = tile
        pulled = _pullback(norm, lines, planes, z_lines, z_planes)
        for ref, value in zip(components(d_lines, d_planes), pulled, strict=True):
            ref[...] = (read(ref) + value).astype(ref.dtype)
        store((d_lines, d_planes), results, rows)

    tiles.start()
    # The slot of the next tile is free once the previous one is stored.
    tiles.visit(add, before_load=functools.partial(plgpu.wait_smem_to_gmem, 0, wait_read_only=True))


def _pullback(norm: Norm, lines: Ref, planes: Ref, z_lines: Ref, z_planes: Ref) -> list[jax.Array]:
    """The eight components of a tile, as in `hopper.norm`; the equation is in `kernels.norm`."""
    values, slopes = centred(lines, planes), centred(z_lines, z_planes)
    inverse = inverse_deviation(values, norm)
    values = [x * inverse for x in values]
    products = [y * slope for y, slope in zip(values, slopes, strict=True)]
    total = mean(sum(products[1:], products[0])) * (1 / 8)
    totals = [total] * 4 + [(norm.row_weight / 2) * total] * 4
    return [inverse * (slope - y * total) for slope, y, total in zip(slopes, values, totals, strict=True)]
