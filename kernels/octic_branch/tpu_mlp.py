"""The branch with the MLP on a TPU (Pallas, Mosaic), in one pass.

The kernel computes the reference token by token, so that the field is read once and written once:

  - A block is an image (of at most MOST_ROWS tokens; larger ones are divided).  All weights stay in VMEM.  A matrix
    unit holds 128 x 128 weights at a time, and multiplies all rows of the image by them before it loads the next.
  - `normed`: the norm of the image, by strips of STRIP rows, which fit in registers.
  - For every 128 of the F hidden channels: their eight components, from the first map (`hidden`); their GELU, by strips
    (`active`); and their contribution to the second map (`sums`), partly transposed (`tpu/products.py`).
  - The result: x + scale * (sums + bias).

Every loop is unrolled: in straight-line code the compiler overlaps the GELU, on the vector units, with some of the
products before and after it.  (Double buffers for `hidden` and `active`, or another order of the operations, overlap
hardly more.)  Most vector operations are in the GELU and its transforms; this saves some:

  - The transforms to the group and back multiply by SCALE.  The first factor is folded into the constants of the GELU
    (`pointwise.double_gelu`), and both into the layer scale at the end.  Since SCALE^2 / 2 = 1/16, this is exact.
  - If the hidden field is rounded to bfloat16, the GELU has an error below 2.6e-5 and takes one tanh and 9 vector
    operations; the float32 GELU, `pointwise.gelu`, takes 17 and an exponential.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch.reference import Weights
from equivit.kernels.octic_branch.tpu import (
    STRIP,
    VMEM_BYTES,
    add_strip,
    by_strips,
    norm_strip,
    prepared,
    product_dtype,
)
from equivit.kernels.pointwise import SCALE, double_gelu, gelu, isotypic_sums, regular_sums
from equivit.kernels.tpu import blocks, products
from equivit.kernels.tpu.blocks import LANES, up

NAME = "octic_mlp"
# Most rows of a block: 257 tokens in whole strips.  Code size and compile time grow with it.
MOST_ROWS = 272
MOST_TILES = 8  # of 128 hidden channels, for the same reason
SPILLED_BYTES = 3 * 2**20  # of VMEM, reserved for spilled registers


def supported(lines: jax.Array, weights: Weights, norm: Norm) -> bool:
    """Whether there is a kernel for these dtypes and widths."""
    return most_rows(lines, weights) >= products.FEWEST_ROWS


def most_rows(lines: jax.Array, weights: Weights) -> int:
    """Most rows of a block that fit in VMEM; 0 for dtypes and widths that the kernel does not support."""
    c, f = weights.first_lines.shape[1:]
    product = product_dtype(lines, weights)
    if product is None or f % LANES or f > MOST_TILES * LANES:
        return 0
    field = 4 * up(c, LANES) + 2 * up(2 * c, LANES)  # lanes of a row
    held = 2 * (4 * up(c, STRIP) * f + up(2 * c, STRIP) * 2 * f)
    row = field * (4 * lines.dtype.itemsize + product.itemsize + 4) + 8 * LANES * (4 + product.itemsize)
    left = VMEM_BYTES - SPILLED_BYTES - held * product.itemsize
    return min(max(left // row, 0), MOST_ROWS) // STRIP * STRIP


def forward(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, norm: Norm, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The branch; arrays as in `octic_mlp`."""
    w = Weights(*weights)
    (_, *batch, tokens, c), product = lines.shape, w.first_lines.dtype
    split = blocks.plan(batch, tokens, most_rows(lines, w), STRIP)
    rows = split[-1]
    # The second map's factor, SCALE^2 / 2, in the layer scale.
    placed = prepared(w, SCALE**2 / 2)
    placed = placed._replace(second_lines=jnp.swapaxes(w.second_lines, 1, 2), second_planes=w.second_planes.T)
    # For each 128 hidden channels, the second map has four products of lines, and four of rows and copies of E.
    parts = products.parts(rows, [(c, 4), (2 * c, 4)])
    sizes = (4, rows, c), (2, rows, 2 * c)
    sums = [(k, width, p.size) if p.turned else (k, p.size, width) for p in parts for k, _, width in sizes]
    return blocks.by_blocks(
        functools.partial(_block, parts=parts, norm=norm, unroll=not interpret),
        (lines, planes),
        placed,
        widths=(c, 2 * c),
        split=split,
        scratch=[
            *(pltpu.VMEM(size, product) for size in sizes),  # normed
            pltpu.VMEM((8, rows, LANES), jnp.float32),  # hidden
            pltpu.VMEM((8, rows, LANES), product),  # active
            *(pltpu.VMEM(size, jnp.float32) for size in sums),
        ],
        name=NAME,
        interpret=interpret,
    )


def _block(x_lines, x_planes, *refs, parts, norm, unroll):
    """One block; `sums` are 16 times the results of the second map: lines and planes for each part of the rows."""
    w, refs = Weights(*refs[: len(Weights._fields)]), refs[len(Weights._fields) :]
    y_lines, y_planes, normed_lines, normed_planes, hidden, active, *sums = refs
    x, y, sums = (x_lines, x_planes), (y_lines, y_planes), list(zip(sums[::2], sums[1::2], strict=True))
    rows, f = hidden.shape[1], w.first_lines.shape[-1]

    by_strips(rows, unroll, functools.partial(norm_strip, x, (normed_lines, normed_planes), w, norm))
    for start in range(0, f, LANES):
        columns = [slice(first, first + LANES) for first in (start, start + f)]  # of the two copies of E
        _first_map(normed_lines, normed_planes, w, columns, hidden)
        for part, results in zip(parts, sums, strict=True):
            before, after = (a.at[:, part.rows] for a in (hidden, active))
            by_strips(part.size, unroll, functools.partial(_gelu_strip, before, after))
            _second_map(after, w, columns, *results, part.turned)
    for part, results in zip(parts, sums, strict=True):
        before, after = ([a.at[:, part.rows] for a in field] for field in (x, y))
        _add(before, after, w, results, part.turned, unroll)


def _first_map(lines, planes, w, columns, hidden):
    for i in range(4):
        h = blocks.dot(lines[i], w.first_lines[i, :, columns[0]])
        hidden[i] = h + w.first_bias[:, columns[0]] if i == 0 else h
    for i, (copy, row) in enumerate(np.ndindex(2, 2)):
        hidden[4 + i] = blocks.dot(planes[row], w.first_planes[:, columns[copy]])


def _gelu_strip(hidden, active, strip):
    values = regular_sums([hidden[i, strip] for i in range(8)])
    if active.dtype == jnp.bfloat16:
        values = [double_gelu(v, SCALE) for v in values]
    else:
        values = [(2 / SCALE) * gelu(SCALE * v) for v in values]
    for i, y in enumerate(isotypic_sums(values)):
        active[i, strip] = y.astype(active.dtype)


def _second_map(active, w, columns, sum_lines, sum_planes, turned):
    def add(ref, i, y):
        ref[i] = y if columns[0].start == 0 else ref[i] + y

    for i in range(4):
        add(sum_lines, i, products.dot(active[i], w.second_lines[i, :, columns[0]], turned))
    for row in range(2):
        copies = [(active[4 + 2 * copy + row], w.second_planes[:, columns[copy]]) for copy in range(2)]
        first, second = (products.dot(*copy, turned) for copy in copies)
        add(sum_planes, row, first + second)


def _add(x, y, w, sums, turned, unroll):
    """Write x + scale * (sums + bias) into y."""
    if turned:
        add_strip(lambda kind, i: sums[kind][i].T, x, y, w, slice(None))
        return

    def write(strip):
        add_strip(lambda kind, i: sums[kind][i, strip], x, y, w, strip)

    by_strips(y[0].shape[1], unroll, write)
