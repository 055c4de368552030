"""The second branch of an octic block in one pass: x + scale * mlp(norm(x)), whose MLP is linear, GELU, linear.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same; F channels per component are hidden.
Source: octic ViTs, Section 3.2 and Appendix A.

The TPU kernel does what `reference` does, token by token, so that the field is read once and written once:

  - A block is an image (of at most MOST_ROWS tokens; larger ones are divided).  All weights stay in VMEM.  A matrix
    unit holds 128 x 128 weights at a time, and multiplies all rows of the image by them before it takes the next.
  - `normed`: the norm of the image, by strips of STRIP rows, which fit in registers.
  - For every 128 of the F hidden channels: their eight components, from the first map (`hidden`); their GELU, by
    strips (`active`); and what they add to the results of the second map (`sums`), of which some may be turned
    (`tpu_products.py`).
  - The result: x + scale * (sums + bias).

Every loop is unrolled: within straight-line code the compiler overlaps the GELU, which occupies the vector units, with
some of the products before and after it.  (Two of `hidden` and `active`, or another order of the operations, overlap
hardly more.)  Most vector operations are those of the GELU and its transforms; this saves some:

  - The transforms to the group and back multiply by SCALE.  The first factor goes into the constants of the GELU
    (`pointwise.double_gelu`), and both into the layer scale at the end.  As SCALE^2 / 2 = 1/16, that rounds nothing.
  - Where the hidden field is rounded to bfloat16, the GELU is within 2.6e-5, by one tanh and 9 vector operations;
    `pointwise.gelu`, which is for float32, takes 17 and an exponential.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import dispatch, octic_linear_gelu, tpu_blocks, tpu_products
from kernels.norm import Norm, normalise
from kernels.octic_branch import STRIP, added, by_strips, check, norm_strip, prepared, product_dtype
from kernels.pointwise import SCALE, double_gelu, gelu, isotypic_sums, regular_sums
from kernels.tpu_blocks import LANES, up

NAME = "octic_mlp"
MAPS = ("in_lines", "in_planes", "out_lines", "out_planes")  # among the weights
# Rows of a block.  The most are 257 tokens in whole strips; the code, and the time to compile it, grow with it.
MOST_ROWS = 272
MOST_TILES = 8  # of 128 hidden channels, for the same reason
# VMEM that a kernel may use unless it asks for more, and what is left of it for registers that are spilled.
VMEM_BYTES, SPILLED_BYTES = 16 * 2**20, 3 * 2**20


class Weights(NamedTuple):
    """The parameters of a branch; `reference` says what is done with them.

    Attributes:
      norm_lines, norm_planes, norm_bias: [4, C], [2C] and [C].
      in_lines, in_planes, in_bias: [4, C, F], [2C, 2F] and [F], of the first map.
      out_lines, out_planes, out_bias: [4, F, C], [2F, 2C] and [C], of the second map.
      scale_lines, scale_planes: [4, C] and [2C], the layer scale.
    """

    norm_lines: jax.Array
    norm_planes: jax.Array
    norm_bias: jax.Array
    in_lines: jax.Array
    in_planes: jax.Array
    in_bias: jax.Array
    out_lines: jax.Array
    out_planes: jax.Array
    out_bias: jax.Array
    scale_lines: jax.Array
    scale_planes: jax.Array


def reference(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, norm: Norm, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """The definition, in plain jnp; `implementation` is that of `octic_linear_gelu`."""
    w = Weights(*weights)
    normed = normalise((lines, planes), (w.norm_lines, w.norm_planes), w.norm_bias, norm)
    arrays = (*normed, w.in_lines, w.in_planes, w.in_bias)
    arrays = tuple(a.astype(w.in_lines.dtype) for a in arrays)
    hidden = octic_linear_gelu.octic_linear_gelu(*arrays, implementation=implementation)
    arrays = tuple(a.astype(w.out_lines.dtype) for a in (*hidden, w.out_lines, w.out_planes, w.out_bias))
    return added((lines, planes), octic_linear_gelu.linear(*arrays), w.scale_lines, w.scale_planes)


def octic_mlp(
    lines: jax.Array, planes: jax.Array, weights: Weights, norm: Norm, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """x + scale * mlp(norm(x)) of an octic field x.

    Under differentiation it is norm, maps and sum in XLA, with the kernels of `octic_linear_gelu` and its gradient: the
    backward pass needs what is between them.

    If the kernel does not support the shapes or dtypes, "auto" is the same without differentiation.  In bfloat16 the
    kernel rounds the factors of its products and the result, the other implementations every step in between too.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      weights: in at most the precision of the field, so that it keeps its dtype.
      norm: constants.
      implementation: as for `d8_gelu`.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    asked, implementation = implementation, dispatch.chosen(NAME, implementation)
    c, f = lines.shape[-1] if lines.ndim else 0, weights.in_bias.size
    check(NAME, lines, planes, weights, f, f, f"C={c} channels and F={f} hidden ones")
    arrays = (lines, planes, *weights)
    if implementation == "xla":
        return reference(*arrays, norm=norm)
    if asked == "auto" and implementation != "auto" and _kernels(norm, lines, weights).get(implementation) is None:
        return reference(*arrays, norm=norm, implementation=implementation)
    return _octic_mlp(implementation, norm, *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _octic_mlp(implementation, norm, *arrays):
    return _forward(*arrays, norm=norm, implementation=implementation)


@_octic_mlp.defjvp
def _derivative(implementation, norm, arrays, slopes):
    return jax.jvp(functools.partial(reference, norm=norm, implementation=implementation), arrays, slopes)


# Jitted here: outside of jit, a choice by platform would be recompiled at every call.
@functools.partial(jax.jit, static_argnames=("norm", "implementation"), inline=True)
def _forward(lines, planes, *weights, norm, implementation):
    plain = functools.partial(reference, norm=norm, implementation=implementation)
    kernels = _kernels(norm, lines, Weights(*weights))
    return dispatch.run(NAME, implementation, plain, kernels, (lines, planes), weights)


def _kernels(norm: Norm, lines: jax.Array, weights: Weights) -> dict[str, Callable | None]:
    """The kernels that support the dtypes and widths."""
    tpu = functools.partial(_forward_tpu, norm=norm) if _most_rows(lines, weights) >= tpu_products.FEWEST_ROWS else None
    return {"tpu": tpu, "interpret": tpu and functools.partial(tpu, interpret=True), "gpu": None}


def _most_rows(lines: jax.Array, weights: Weights) -> int:
    """Most rows of a block that fit in VMEM; 0 for dtypes and widths that the kernel does not support."""
    c, f = weights.in_lines.shape[1:]
    product = product_dtype(lines, weights, MAPS)
    if product is None or f % LANES or f > MOST_TILES * LANES:
        return 0
    field = 4 * up(c, LANES) + 2 * up(2 * c, LANES)  # lanes of a row
    held = 2 * (4 * up(c, STRIP) * f + up(2 * c, STRIP) * 2 * f)
    row = field * (4 * lines.dtype.itemsize + product.itemsize + 4) + 8 * LANES * (4 + product.itemsize)
    left = VMEM_BYTES - SPILLED_BYTES - held * product.itemsize
    return min(max(left // row, 0), MOST_ROWS) // STRIP * STRIP


def _forward_tpu(lines, planes, *weights, norm, interpret=False):
    w = Weights(*weights)
    (_, *batch, tokens, c), dtype, product = lines.shape, lines.dtype, w.in_lines.dtype
    images, n, rows = tpu_blocks.plan(batch, tokens, _most_rows(lines, w), STRIP)
    arrays = [a.reshape(len(a), images, n, a.shape[-1]) for a in (lines, planes)]

    def block(a):
        return pl.BlockSpec((len(a), None, rows, a.shape[-1]), lambda image, i: (0, image, i, 0))

    def whole(a):
        return pl.BlockSpec(a.shape, lambda image, i: (0,) * a.ndim, pipeline_mode=pl.Buffered(1))

    # The second map's factor, SCALE^2 / 2, in the layer scale.
    weights = prepared(w, "out_bias", SCALE**2 / 2)
    weights = weights._replace(out_lines=jnp.swapaxes(w.out_lines, 1, 2), out_planes=w.out_planes.T)
    sizes = (4, rows, c), (2, rows, 2 * c)
    # For each 128 hidden channels, the second map has four products of lines, and four of rows and copies of E.
    parts = tpu_products.parts(rows, [(c, 4), (2 * c, 4)])
    sums = [(k, width, p.size) if p.turned else (k, p.size, width) for p in parts for k, _, width in sizes]
    results = pl.pallas_call(
        functools.partial(_block, parts=parts, norm=norm, unroll=not interpret),
        grid=(images, pl.cdiv(n, rows)),
        in_specs=[*map(block, arrays), *map(whole, weights)],
        out_specs=[block(a) for a in arrays],
        out_shape=[
            jax.ShapeDtypeStruct(a.shape, dtype, manual_axis_type=jax.typeof(lines).manual_axis_type) for a in arrays
        ],
        scratch_shapes=[
            *(pltpu.VMEM(size, product) for size in sizes),  # normed
            pltpu.VMEM((8, rows, LANES), jnp.float32),  # hidden
            pltpu.VMEM((8, rows, LANES), product),  # active
            *(pltpu.VMEM(size, jnp.float32) for size in sums),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=NAME,
    )(*arrays, *weights)
    return tuple(y.reshape(len(y), *batch, tokens, y.shape[-1]) for y in results)


def _block(x_lines, x_planes, *refs, parts, norm, unroll):
    """One block; `sums` are 16 times the results of the second map, lines and planes of each part of the rows."""
    w, refs = Weights(*refs[: len(Weights._fields)]), refs[len(Weights._fields) :]
    y_lines, y_planes, normed_lines, normed_planes, hidden, active, *sums = refs
    x, y, sums = (x_lines, x_planes), (y_lines, y_planes), list(zip(sums[::2], sums[1::2], strict=True))
    rows, f = hidden.shape[1], w.in_lines.shape[-1]

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
        _add(before, after, w, *results, part.turned, unroll)


def _first_map(lines, planes, w, columns, hidden):
    dot = _dot(lines.dtype)
    for i in range(4):
        h = dot(lines[i], w.in_lines[i, :, columns[0]])
        hidden[i] = h + w.in_bias[:, columns[0]] if i == 0 else h
    for i, (copy, row) in enumerate(np.ndindex(2, 2)):
        hidden[4 + i] = dot(planes[row], w.in_planes[:, columns[copy]])


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
        add(sum_lines, i, tpu_products.dot(active[i], w.out_lines[i, :, columns[0]], turned))
    for row in range(2):
        copies = [(active[4 + 2 * copy + row], w.out_planes[:, columns[copy]]) for copy in range(2)]
        first, second = (tpu_products.dot(*copy, turned) for copy in copies)
        add(sum_planes, row, first + second)


def _add(x, y, w, sum_lines, sum_planes, turned, unroll):
    """Write x + scale * (sums + bias) into y."""

    def write(strip):
        for before, after, sums, scale in zip(
            x, y, (sum_lines, sum_planes), (w.scale_lines, w.scale_planes), strict=True
        ):
            for i in range(after.shape[0]):
                row = i % len(scale)  # the rows of E share one
                z = (sums[i].T if turned else sums[i, strip]) * scale[row : row + 1]
                z = z + w.out_bias[...] if sums is sum_lines and i == 0 else z
                after[i, strip] = (before[i, strip].astype(jnp.float32) + z).astype(after.dtype)

    if turned:
        write(slice(None))
    else:
        by_strips(x[0].shape[1], unroll, write)


def _dot(dtype):
    return functools.partial(jnp.dot, precision=tpu_blocks.precision(dtype), preferred_element_type=jnp.float32)
