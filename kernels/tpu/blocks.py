"""Iteration of the TPU kernels over an octic field: blocks of rows in VMEM, tiles of a block in registers.

A block holds some tokens of one image with all channels; the pipeline of `pallas_call` clips it at the edges, so a tile
may hold rows that are never written.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

LANES = 128  # lanes of a register
# Rows of a tile: enough to hide the latency of a loop iteration, and the fewest that fill registers in both dtypes.
ROWS, FEWEST_ROWS = 32, 16
# VMEM for one call.  TPUs v2 to v4 have 16 MiB, which is also the default limit of later ones; the rest is for the
# compiler's temporaries.
VMEM_BYTES = 12 * 2**20


def supported(dtype: DTypeLike, channels: Sequence[int], weight_bytes: int = 0) -> bool:
    """Whether blocks of fields with these numbers of channels fit in VMEM along with the weights."""
    return dtype in (jnp.float32, jnp.bfloat16) and _most_rows(dtype, channels, weight_bytes) >= FEWEST_ROWS


def by_tiles(
    tile: Callable,
    fields: Sequence[jax.Array],
    weights: Sequence[jax.Array] = (),
    *,
    channels: int,
    name: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run `tile(rows, lanes, *fields, *weights, lines, planes)` for slices that cover every block of the result.

    Args:
      tile: takes references to blocks, [4, rows, C] and [2, rows, 2C] of each field, and writes its part of the last
        two.
      fields: arrays [4, *B, N, C] and [2, *B, N, 2C] in turn.
      weights: arrays passed whole to every block.
      channels: of the result.
      name, interpret: as for `by_blocks`.

    Returns:
      lines [4, *B, N, channels] and planes [2, *B, N, 2 channels], in the dtype of the fields.
    """
    (_, *batch, tokens, _), dtype = fields[0].shape, fields[0].dtype
    most = _most_rows(dtype, [*(a.shape[-1] for a in fields[::2]), channels], sum(a.nbytes for a in weights))
    step = ROWS if most >= ROWS else FEWEST_ROWS
    images, n, rows = plan(batch, tokens, most, step)

    def body(*refs):
        left = jnp.minimum(n - pl.program_id(1) * rows, rows)  # the last block may be mostly empty
        strips = jax.lax.div(left + (step - 1), jnp.int32(step))  # int32 even if 64-bit types are enabled
        jax.lax.fori_loop(jnp.int32(0), strips, functools.partial(strip, refs), None)

    def strip(refs, i, _):
        for start in range(0, channels, LANES):
            lanes = slice(start, min(start + LANES, channels))
            tile(pl.ds(pl.multiple_of(i * step, step), step), lanes, *refs)

    widths = channels, 2 * channels
    split = images, n, rows
    lines, planes = by_blocks(body, fields, weights, widths=widths, split=split, name=name, interpret=interpret)
    return lines, planes


def by_blocks(
    body: Callable,
    fields: Sequence[jax.Array],
    weights: Sequence[jax.Array] = (),
    *,
    widths: Sequence[int],
    split: tuple[int, int, int] | None = None,
    single: bool = False,
    scratch: Sequence[Any] = (),
    name: str,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Run a kernel on every block of a field.

    Args:
      body: takes references to a block [k, rows, width] of each field, to the weights, to a block of each result, and
        to the scratch memory.
      fields: arrays [k, *B, N, width].
      weights: arrays passed whole to every block.
      widths: of the results, which are otherwise like the first fields.
      split: images, rows per image and rows per block, as from `plan`; None: a block is an image.
      single: whether the results, and the fields without a result, have one buffer instead of two.
      scratch: memory of the kernel.
      name: of the kernel in the compiled program.
      interpret: whether to run as a JAX program, on any platform.
    """
    (_, *batch, tokens, _), kind = fields[0].shape, jax.typeof(fields[0])
    images, n, rows = split or (math.prod(batch), tokens, tokens)
    grid = (images, pl.cdiv(n, rows)) if split else (images,)
    results = [(len(a), images, n, width) for a, width in zip(fields, widths, strict=False)]

    def block(k, width, **mode):
        return pl.BlockSpec((k, None, rows, width), lambda image, i=0: (0, image, i, 0), **mode)

    def whole(a):
        return pl.BlockSpec(a.shape, lambda *_: (0,) * a.ndim, pipeline_mode=pl.Buffered(1))

    others = functools.partial(block, pipeline_mode=pl.Buffered(1)) if single else block
    of_fields = [(block if i < len(widths) else others)(len(a), a.shape[-1]) for i, a in enumerate(fields)]
    arrays = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[*of_fields, *map(whole, weights)],
        out_specs=[others(k, width) for k, *_, width in results],
        out_shape=[
            jax.ShapeDtypeStruct(shape, kind.dtype, manual_axis_type=kind.manual_axis_type) for shape in results
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * len(grid)),
        interpret=interpret,
        name=name,
    )(*(a.reshape(len(a), images, n, a.shape[-1]) for a in fields), *weights)
    return tuple(y.reshape(len(y), *batch, tokens, y.shape[-1]) for y in arrays)


def read(lines: jax.Ref, planes: jax.Ref, rows: pl.Slice, lanes: slice) -> list[jax.Array]:
    """The eight components of a tile, A1 A2 B1 B2 E11 E12 E21 E22, in float32."""
    places = _places(lines, planes, lanes)
    return [ref[i, rows, columns].astype(jnp.float32) for ref, i, columns in places]


def write(lines: jax.Ref, planes: jax.Ref, rows: pl.Slice, lanes: slice, components: Sequence[jax.Array]) -> None:
    """The inverse of `read`."""
    for (ref, i, columns), component in zip(_places(lines, planes, lanes), components, strict=True):
        ref[i, rows, columns] = component.astype(ref.dtype)


def second_copy(lanes: slice, channels: int) -> slice:
    """The slice with the same channels in the second copy of E."""
    return slice(lanes.start + channels, lanes.stop + channels)


def _places(lines, planes, lanes):
    second = second_copy(lanes, lines.shape[-1])
    return [
        *((lines, i, lanes) for i in range(4)),
        *((planes, row, columns) for columns in (lanes, second) for row in (0, 1)),
    ]


def plan(batch: Sequence[int], tokens: int, most: int, step: int) -> tuple[int, int, int]:
    """Divide a field into blocks of at most `most` rows, in steps: images, rows per image, rows per block."""
    images, n = math.prod(batch), tokens
    # Merge images if that moves no data (registers are 8 rows high) or little.
    if tokens % 8 == 0 or tokens < ROWS:
        images, n = 1, images * tokens
    return images, n, up(pl.cdiv(n, pl.cdiv(n, most // step * step)), step)


def _most_rows(dtype: DTypeLike, channels: Sequence[int], weight_bytes: int) -> int:
    """Most rows of a block; each array is padded to whole registers and double-buffered."""
    lanes = sum(4 * up(c, LANES) + 2 * up(2 * c, LANES) for c in channels)
    return (VMEM_BYTES - weight_bytes) // (2 * lanes * jnp.dtype(dtype).itemsize)


def up(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


def _precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Mosaic has two precisions; float32 products use the higher one unless the default was requested."""
    asked = jax.config.jax_default_matmul_precision  # set at run time  # pyright: ignore[reportAttributeAccessIssue]
    exact = dtype == jnp.float32 and asked not in (None, "default", "fastest", "bfloat16")
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices over these axes, summed in float32."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=_precision(a.dtype), preferred_element_type=jnp.float32)
