"""The branch with attention on a TPU (Pallas, Mosaic), in one pass.

The kernel computes the reference image by image, so that the field is read once and written once:

  - A block is an image, as in `attention/tpu.py`, which does the middle part.  All weights stay in VMEM.
  - `normed`: the norm of the image, by strips, in memory later reused by `attended`.
  - `qkv`: the first map, 128 results at a time.  It places the heads as attention needs them, in a separate order for
    every row of irreps (`isotypic_attention.tpu.arranged`).
  - `attended`: attention, a register full of heads at a time.
  - The result: x + scale * (attended times the second map + bias), where products may be turned (`tpu/products.py`).

Nearly all of it is straight-line code: the compiler overlaps the norm with the first map's products, and the selects
and softmax of one head with the products of another.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from equivit.kernels.attention import tpu as attention
from equivit.kernels.attention.lanes import LANES, arrange
from equivit.kernels.isotypic_attention.tpu import arranged
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch.reference import Weights
from equivit.kernels.octic_branch.tpu import VMEM_BYTES, add_strip, by_strips, norm_strip, prepared, product_dtype
from equivit.kernels.tpu import blocks, products
from equivit.kernels.tpu.blocks import up

NAME = "octic_attention"
SPILLED_BYTES = 2 * 2**20  # of VMEM, reserved for spilled registers


def _parts(lines: jax.Array, heads: int) -> tuple[int, ...]:
    """The channels of a head in each row of irreps."""
    c = lines.shape[-1] // heads
    return (c,) * 4 + (2 * c,) * 2


def supported(lines: jax.Array, weights: Weights, heads: int, norm: Norm) -> bool:
    """Whether the kernel supports these dtypes and heads, and VMEM holds an image with all weights."""
    *_, tokens, c = lines.shape
    arrangement = None if c % heads else arrange(_parts(lines, heads), heads)
    product = product_dtype(lines, weights)
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
    (qkv, bias), (proj, _) = arranged(w.first, w.second, parts, heads)
    maps = dict(first_lines=qkv[0], first_planes=qkv[1], first_bias=bias)
    maps |= dict(zip(("second_lines", "second_planes"), (jnp.swapaxes(a, 1, 2) for a in proj), strict=True))
    n = lines.shape[-2]
    scratch = [pltpu.VMEM((len(a), n, a.shape[1] * a.shape[3]), a.dtype) for a in qkv]
    scratch += [pltpu.VMEM((len(a), n, a.shape[1]), a.dtype) for a in proj]
    return blocks.by_blocks(
        functools.partial(_image, arrangement=arrangement, scale=sum(parts) ** -0.5, norm=norm, unroll=not interpret),
        (lines, planes),
        prepared(w._replace(**maps)),
        widths=(lines.shape[-1], planes.shape[-1]),
        scratch=scratch,
        name=NAME,
        interpret=interpret,
    )


def _image(x_lines, x_planes, *refs, arrangement: Any, scale: float, norm: Norm, unroll: bool):
    """One image; `arrangement` places q, k, v and the result of attention."""
    w, refs = Weights(*refs[: len(Weights._fields)]), refs[len(Weights._fields) :]
    x, y, qkv, attended = (x_lines, x_planes), refs[:2], refs[2:4], refs[4:6]
    by_strips(x_lines.shape[1], unroll, functools.partial(norm_strip, x, attended, w, norm))
    _first_map(attended, w, qkv)
    attention.attend_image(qkv, attended, arrangement, scale)

    @pl.when(pl.program_id(0) >= 0)  # always true: a conditional is scheduled separately, which is faster here
    def _():
        _second_map(attended, w, x, y)


def _first_map(normed, w, qkv):
    for field, maps, ref in zip(normed, w.first[0], qkv, strict=True):
        channels, width = maps.shape[2:]
        for i in range(ref.shape[0]):
            for start in range(0, ref.shape[-1], LANES):
                which, lane = divmod(start, width)  # index of the map, and the lane in it
                z = blocks.dot(field[i, :, :channels], maps[i, which, :, lane : lane + LANES])
                z = z + w.first_bias[:, start : start + LANES] if maps is w.first_lines and i == 0 else z
                ref[i, :, start : start + LANES] = z.astype(ref.dtype)


def _second_map(attended, w, x, y):
    maps = w.second[0]
    sizes = [(a.shape[1], len(a) * a.shape[2] // LANES) for a in maps]
    for part in products.parts(y[0].shape[1], sizes):

        def results(kind, i, part=part):
            z = products.dot(attended[kind][i, part.rows], maps[kind][i], part.turned)
            return z.T if part.turned else z

        add_strip(results, x, y, w, part.rows)
