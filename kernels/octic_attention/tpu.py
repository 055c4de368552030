"""The branch with attention on a TPU (Pallas, Mosaic), in one pass.

The kernel computes the reference image by image, so that the field is read once and written once:

  - A block is an image, as in `attention/tpu.py`, which does the middle part.  All weights stay in VMEM.
  - `normed`: the norm of the image, by strips, in memory later reused by `attended`.
  - `qkv`: the first map, 128 results at a time.  It places the heads as attention needs them, in a separate order for
    every row of irreps (`isotypic_attention.tpu.arranged`).
  - `attended`: attention, a register full of heads at a time.
  - The result: scale * (attended times the second map + bias), where products may be turned (`tpu/products.py`).

Nearly all of it is straight-line code: the compiler overlaps the norm with the first map's products, and the selects
and softmax of one head with the products of another.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import tpu as attention
from kernels.attention.lanes import LANES, arrange
from kernels.isotypic_attention.tpu import arranged
from kernels.norm import Norm
from kernels.octic_attention.reference import Weights
from kernels.tpu import blocks, products
from kernels.tpu.blocks import up
from kernels.tpu.branch import by_strips, norm_strip, prepared, product_dtype

NAME = "octic_attention"
MAPS = ("qkv_lines", "qkv_planes", "proj_lines", "proj_planes")  # among the weights
# Default VMEM limit of a kernel, and the part reserved for spilled registers.
VMEM_BYTES, SPILLED_BYTES = 16 * 2**20, 2 * 2**20


def _parts(lines: jax.Array, heads: int) -> tuple[int, ...]:
    """The channels of a head in each row of irreps."""
    c = lines.shape[-1] // heads
    return (c,) * 4 + (2 * c,) * 2


def supported(lines: jax.Array, weights: Weights, heads: int) -> bool:
    """Whether the kernel supports these dtypes and heads, and VMEM holds an image with all weights."""
    *_, tokens, c = lines.shape
    arrangement = None if c % heads else arrange(_parts(lines, heads), heads)
    product = product_dtype(lines, weights, MAPS)
    if arrangement is None or product is None or not isinstance(tokens, int):
        return False
    field, placed = 4 * up(c, LANES) + 2 * up(2 * c, LANES), sum(arrangement.token_widths)
    qkv_widths, widths = arrangement.qkv_widths, arrangement.widths
    held = 4 * (up(c, 16) * qkv_widths[0] + widths[0] * up(c, LANES))
    held += 2 * (up(2 * c, 16) * qkv_widths[-1] + widths[-1] * up(2 * c, LANES))
    rows = up(tokens, 16)
    used = (held + rows * placed) * product.itemsize + rows * 4 * field * lines.dtype.itemsize
    return used + attention.matrix_bytes(tokens) <= VMEM_BYTES - SPILLED_BYTES


def forward(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, heads: int, norm: Norm, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The branch; arrays as in `octic_attention`."""
    w, parts = Weights(*weights), _parts(lines, heads)
    arrangement = arrange(parts, heads)
    (qkv, bias), (proj, _) = arranged(w.qkv, w.proj, parts, heads)
    placed: dict[str, Any] = dict(qkv_lines=qkv[0], qkv_planes=qkv[1], qkv_bias=bias)
    placed |= dict(zip(("proj_lines", "proj_planes"), (jnp.swapaxes(a, 1, 2) for a in proj), strict=True))
    w = prepared(w._replace(**placed), "proj_bias")
    _, *batch, n, _ = lines.shape
    arrays = [a.reshape(len(a), math.prod(batch), n, a.shape[-1]) for a in (lines, planes)]

    def block(a):
        return pl.BlockSpec((len(a), None, n, a.shape[-1]), lambda image: (0, image, 0, 0))

    def whole(a):
        return pl.BlockSpec(a.shape, lambda image: (0,) * a.ndim, pipeline_mode=pl.Buffered(1))

    scratch = [pltpu.VMEM((len(a), n, a.shape[1] * a.shape[3]), a.dtype) for a in qkv]
    scratch += [pltpu.VMEM((len(a), n, a.shape[1]), a.dtype) for a in proj]
    results = pl.pallas_call(
        functools.partial(_image, arrangement=arrangement, scale=sum(parts) ** -0.5, norm=norm, unroll=not interpret),
        grid=(math.prod(batch),),
        in_specs=[*map(block, arrays), *map(whole, w)],
        out_specs=[block(a) for a in arrays],
        out_shape=[
            jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=jax.typeof(lines).manual_axis_type) for a in arrays
        ],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=NAME,
    )(*arrays, *w)
    return tuple(y.reshape(len(y), *batch, n, y.shape[-1]) for y in results)


def _image(x_lines, x_planes, *refs, arrangement: Any, scale: float, norm: Norm, unroll: bool):
    """One image; `arrangement` places q, k, v and the result of attention."""
    w, refs = Weights(*refs[: len(Weights._fields)]), refs[len(Weights._fields) :]
    x, y, qkv, attended = (x_lines, x_planes), refs[:2], refs[2:4], refs[4:6]
    by_strips(x_lines.shape[1], unroll, functools.partial(norm_strip, x, attended, w, norm))
    _first_map(attended, w, qkv)
    attention.attend_image(qkv, attended, arrangement, scale)

    @pl.when(pl.program_id(0) >= 0)  # always true: a conditional is scheduled separately, which is faster here
    def _():
        _second_map(attended, w, y)


def _first_map(normed, w, qkv):
    for field, maps, ref in zip(normed, (w.qkv_lines, w.qkv_planes), qkv, strict=True):
        channels, width = maps.shape[2:]
        for i, lanes in _tiles(ref):
            which, start = divmod(lanes.start, width)  # index of the map, and the lane in it
            z = _dot(field[i, :, :channels], maps[i, which, :, start : start + LANES])
            z = z + w.qkv_bias[:, lanes] if maps is w.qkv_lines and i == 0 else z
            ref[i, :, lanes] = z.astype(ref.dtype)


def _second_map(attended, w, y):
    kinds = list(zip(attended, (w.proj_lines, w.proj_planes), (w.scale_lines, w.scale_planes), y, strict=True))
    sizes = [(maps.shape[1], len(maps) * maps.shape[2] // LANES) for _, maps, *_ in kinds]
    for part in products.parts(y[0].shape[1], sizes):
        for field, maps, scale, after in kinds:
            for i in range(after.shape[0]):
                row = i % len(scale)  # the rows of E share one
                z = products.dot(field[i, part.rows], maps[i], part.turned)
                z = (z.T if part.turned else z) * scale[row : row + 1]
                z = z + w.proj_bias[...] if maps is w.proj_lines and i == 0 else z
                after[i, part.rows] = z.astype(after.dtype)


def _tiles(ref: Any):
    """Row of irreps and lanes of each register of a token."""
    for i in range(ref.shape[0]):
        for start in range(0, ref.shape[-1], LANES):
            yield i, slice(start, min(start + LANES, ref.shape[-1]))


def _dot(a, b):
    return jnp.dot(a, b, precision=blocks.precision(a.dtype), preferred_element_type=jnp.float32)
