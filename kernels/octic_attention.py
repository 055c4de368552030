"""The first branch of an octic block in one pass: x + scale * attention(norm(x)), with the linear maps of attention.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2 and Appendix A.

The TPU kernel does what `reference` does, image by image, so that the field is read once and written once:

  - A block is an image, as in `attention_tpu.py`, of which the part in the middle is.  All weights stay in VMEM.
  - `normed`: the norm of the image, by strips, in the memory that `attended` takes later.
  - `qkv`: the first map, for 128 of its results at a time.  It makes the heads where attention wants them, in an order
    of their own for every row of irreps (`isotypic_attention.arranged`).
  - `attended`: attention, a register full of heads at a time.
  - The result: x + scale * (attended times the second map + bias), where products may be turned (`tpu_products.py`).

Nearly all of it is straight-line code, in which the compiler overlaps the norm with the first map's products, and the
selects and softmax of a head with the products of another.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import attention_tpu, dispatch, tpu_blocks, tpu_products
from kernels import isotypic_attention as attention
from kernels.attention_lanes import LANES, arrange
from kernels.norm import Norm, normalise
from kernels.octic_branch import added, by_strips, check, norm_strip, prepared, product_dtype
from kernels.tpu_blocks import up

NAME = "octic_attention"
MAPS = ("qkv_lines", "qkv_planes", "proj_lines", "proj_planes")  # among the weights
# VMEM that the kernel may use unless it asks for more, and what is left of it for registers that are spilled.
VMEM_BYTES, SPILLED_BYTES = 16 * 2**20, 2 * 2**20
Attend = Callable[[attention.Field, attention.Linear, attention.Linear, int], attention.Field]


class Weights(NamedTuple):
    """The parameters of a branch; `reference` says what is done with them.

    Attributes:
      norm_lines, norm_planes, norm_bias: [4, C], [2C] and [C].
      qkv_lines, qkv_planes, qkv_bias: [4, C, 3C], [2C, 6C] and [3C], outputs ordered (q | k | v) x heads x channels.
      proj_lines, proj_planes, proj_bias: [4, C, C], [2C, 2C] and [C].
      scale_lines, scale_planes: [4, C] and [2C], the layer scale.
    """

    norm_lines: jax.Array
    norm_planes: jax.Array
    norm_bias: jax.Array
    qkv_lines: jax.Array
    qkv_planes: jax.Array
    qkv_bias: jax.Array
    proj_lines: jax.Array
    proj_planes: jax.Array
    proj_bias: jax.Array
    scale_lines: jax.Array
    scale_planes: jax.Array

    @property
    def qkv(self) -> attention.Linear:
        """The first map."""
        return (self.qkv_lines, self.qkv_planes), self.qkv_bias

    @property
    def proj(self) -> attention.Linear:
        """The second map."""
        return (self.proj_lines, self.proj_planes), self.proj_bias


def reference(
    lines: jax.Array,
    planes: jax.Array,
    *weights: jax.Array,
    heads: int,
    norm: Norm,
    attend: Attend = attention.reference,
) -> tuple[jax.Array, jax.Array]:
    """The definition, in plain jnp; `attend` is attention with its linear maps."""
    w = Weights(*weights)
    normed = normalise((lines, planes), (w.norm_lines, w.norm_planes), w.norm_bias, norm)
    field, qkv, proj = jax.tree.map(lambda a: a.astype(w.qkv_lines.dtype), (normed, w.qkv, w.proj))
    y_lines, y_planes = attend(field, qkv, proj, heads)
    return added((lines, planes), (y_lines, y_planes), w.scale_lines, w.scale_planes)


def octic_attention(
    lines: jax.Array,
    planes: jax.Array,
    weights: Weights,
    heads: int,
    norm: Norm,
    *,
    implementation: str = "auto",
    attend: Attend = attention.reference,
) -> tuple[jax.Array, jax.Array]:
    """x + scale * attention(norm(x)) of an octic field x.

    Under differentiation it is norm, attention and sum apart, with the kernels of `isotypic_attention`: the backward
    pass needs what is between them.

    If the kernel does not support the shapes or dtypes, "auto" is the same without differentiation.  In bfloat16 the
    kernel rounds the factors of its products and the result, the other implementations every step in between too.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      weights: in at most the precision of the field, so that it keeps its dtype.
      heads: their channels, 8 C / heads, are at most 128.
      norm: constants.
      implementation: as for `attention`.
      attend: what does attention and its maps where there is no kernel, as `plain` of `isotypic_attention`.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    asked, implementation = implementation, dispatch.chosen(NAME, implementation)
    c = lines.shape[-1] if lines.ndim else 0
    check(NAME, lines, planes, weights, 3 * c, c, f"C={c} channels")
    arrays = (lines, planes, *weights)
    if implementation == "xla":
        return reference(*arrays, heads=heads, norm=norm, attend=attend)
    options = _Options(implementation, heads, norm, attend)
    if asked == "auto" and implementation != "auto" and options.kernels(lines, weights).get(implementation) is None:
        return options.apart(*arrays)
    return _octic_attention(options, *arrays)


class _Options(NamedTuple):
    """The static options of the program."""

    implementation: str
    heads: int
    norm: Norm
    attend: Attend

    def apart(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The branch in parts, attention with a kernel of its own where there is one."""
        with dispatch.using(self.implementation):
            attend = functools.partial(attention.isotypic_attention, plain=self.attend)
            return reference(*arrays, heads=self.heads, norm=self.norm, attend=attend)

    def kernels(self, lines: jax.Array, weights: Weights) -> dict[str, Callable | None]:
        """The kernels that support the shapes and dtypes."""
        tpu = None
        if _supported(lines, weights, self.heads):
            tpu = functools.partial(_forward_tpu, heads=self.heads, norm=self.norm)
        return {"tpu": tpu, "interpret": tpu and functools.partial(tpu, interpret=True), "gpu": None}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _octic_attention(options, *arrays):
    return _forward(*arrays, options=options)


@_octic_attention.defjvp
def _derivative(options, arrays, slopes):
    return jax.jvp(options.apart, arrays, slopes)


# Jitted here: outside of jit, a choice by platform would be recompiled at every call.
@functools.partial(jax.jit, static_argnames=("options",), inline=True)
def _forward(lines, planes, *weights, options):
    kernels = options.kernels(lines, Weights(*weights))
    return dispatch.run(NAME, options.implementation, options.apart, kernels, (lines, planes), weights)


def _parts(lines: jax.Array, heads: int) -> tuple[int, ...]:
    """The channels of a head in each row of irreps."""
    c = lines.shape[-1] // heads
    return (c,) * 4 + (2 * c,) * 2


def _supported(lines: jax.Array, weights: Weights, heads: int) -> bool:
    """Whether there is a kernel: its types, heads that have places, and an image that fits in VMEM with all weights."""
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
    return used + attention_tpu.matrix_bytes(tokens) <= VMEM_BYTES - SPILLED_BYTES


def _forward_tpu(lines, planes, *weights, heads, norm, interpret=False):
    w, parts = Weights(*weights), _parts(lines, heads)
    arrangement = arrange(parts, heads)
    (qkv, bias), (proj, _) = attention.arranged(w.qkv, w.proj, parts, heads)
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
    """One image; q, k, v and what attention makes of them lie as `arrangement` says."""
    w, refs = Weights(*refs[: len(Weights._fields)]), refs[len(Weights._fields) :]
    x, y, qkv, attended = (x_lines, x_planes), refs[:2], refs[2:4], refs[4:6]
    by_strips(x_lines.shape[1], unroll, functools.partial(norm_strip, x, attended, w, norm))
    _first_map(attended, w, qkv)
    attention_tpu.attend_image(qkv, attended, arrangement, scale)

    @pl.when(pl.program_id(0) >= 0)  # always: what is in a condition is scheduled apart, and here that is faster
    def _():
        _second_map(attended, w, x, y)


def _first_map(normed, w, qkv):
    for field, maps, ref in zip(normed, (w.qkv_lines, w.qkv_planes), qkv, strict=True):
        channels, width = maps.shape[2:]
        for i, lanes in _tiles(ref):
            which, start = divmod(lanes.start, width)  # of the maps side by side, and the lane in it
            z = _dot(field[i, :, :channels], maps[i, which, :, start : start + LANES])
            z = z + w.qkv_bias[:, lanes] if maps is w.qkv_lines and i == 0 else z
            ref[i, :, lanes] = z.astype(ref.dtype)


def _second_map(attended, w, x, y):
    kinds = list(zip(attended, (w.proj_lines, w.proj_planes), (w.scale_lines, w.scale_planes), x, y, strict=True))
    products = [(maps.shape[1], len(maps) * maps.shape[2] // LANES) for _, maps, *_ in kinds]
    for part in tpu_products.parts(x[0].shape[1], products):
        for field, maps, scale, before, after in kinds:
            for i in range(after.shape[0]):
                row = i % len(scale)  # the rows of E share one
                z = tpu_products.dot(field[i, part.rows], maps[i], part.turned)
                z = (z.T if part.turned else z) * scale[row : row + 1]
                z = z + w.proj_bias[...] if maps is w.proj_lines and i == 0 else z
                after[i, part.rows] = (before[i, part.rows].astype(jnp.float32) + z).astype(after.dtype)


def _tiles(ref: Any):
    """Row of irreps and lanes of each register of a token."""
    for i in range(ref.shape[0]):
        for start in range(0, ref.shape[-1], LANES):
            yield i, slice(start, min(start + LANES, ref.shape[-1]))


def _dot(a, b):
    return jnp.dot(a, b, precision=tpu_blocks.precision(a.dtype), preferred_element_type=jnp.float32)
