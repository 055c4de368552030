"""Shared code of the TPU kernels of both branches: dtypes, the norm before the body, layer scale and sum after it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch.reference import Weights

STRIP = 16  # rows the norm processes at once, to stay in registers: the height of a bfloat16 register
VMEM_BYTES = 16 * 2**20  # default limit of a kernel
MAPS = ("first_lines", "first_planes", "second_lines", "second_planes")  # among the weights
Arrays = tuple[jax.Array, jax.Array]


def product_dtype(lines: jax.Array, weights: Weights) -> np.dtype | None:
    """The common dtype of the linear maps.

    None if they differ, if kernels do not support it or the field's dtype, or if the weights would widen the field's.
    """
    products = {getattr(weights, name).dtype for name in MAPS}
    floats = {lines.dtype, *products} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    kept = jnp.result_type(lines, *weights) == lines.dtype
    return products.pop() if floats and kept and len(products) == 1 else None


def prepared(weights: Weights, factor: float = 1.0) -> Weights:
    """Convert the vectors among the weights to float32 rows.

    The second bias is multiplied by the layer scale, and then the layer scale by `factor`.
    """
    vectors = [name for name in weights._fields if name not in MAPS]
    rows = {name: jnp.atleast_2d(getattr(weights, name).astype(jnp.float32)) for name in vectors}
    rows["second_bias"] = rows["second_bias"] * rows["scale_lines"][:1]
    rows |= {name: rows[name] * factor for name in ("scale_lines", "scale_planes")}
    return weights._replace(**rows)


# ---- In a kernel


def by_strips(rows: int, unroll: bool, function: Callable[[Any], None]) -> None:
    """Call `function(strip)` for strips of all rows; the last strip may be shorter.

    A loop traces faster; on a TPU the compiler unrolls it.
    """

    def step(i, _):
        function(pl.ds(pl.multiple_of(i * STRIP, STRIP), STRIP))

    if rows >= STRIP:
        with jax.enable_x64(False):  # Mosaic counts an unrolled loop in 32 bits, even if 64-bit types are enabled
            jax.lax.fori_loop(0, rows // STRIP, step, None, unroll=unroll)
    if rows % STRIP:
        function(slice(rows // STRIP * STRIP, rows))


def norm_strip(x: Arrays, y: Arrays, weights: Weights, norm: Norm, strip: Any) -> None:
    """Write the norm of a strip of the references x into the references y, in their first lanes."""
    fields = [*((x[0], i) for i in range(4)), *((x[1], i) for i in range(2))]
    values = [ref[i, strip].astype(jnp.float32) for ref, i in fields]
    values = [a - a.mean(-1, keepdims=True) for a in values]
    a1, a2, b1, b2, *rows = map(jnp.square, values)  # sums over lanes are the slowest, so sum over irreps first
    total = (a1 + a2 + b1 + b2).mean(-1, keepdims=True) + norm.row_weight * (rows[0] + rows[1]).mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt((total + norm.eps) / 8)
    for i in range(4):
        z = values[i] * inverse * weights.norm_lines[i : i + 1]
        z = z + weights.norm_bias[...] if i == 0 else z
        y[0][i, strip, : z.shape[-1]] = z.astype(y[0].dtype)
    for i in range(2):
        z = values[4 + i] * inverse * weights.norm_planes[...]
        y[1][i, strip, : z.shape[-1]] = z.astype(y[1].dtype)


def add_strip(results: Callable[[int, int], jax.Array], x: Arrays, y: Arrays, weights: Weights, strip: Any) -> None:
    """Write x + scale * (result + bias) into a strip of y; `results(kind, i)` is row i of lines (0) or planes (1)."""
    for kind, (after, scale) in enumerate(zip(y, (weights.scale_lines, weights.scale_planes), strict=True)):
        for i in range(after.shape[0]):
            row = i % len(scale)  # the rows of E share one
            z = results(kind, i) * scale[row : row + 1]
            z = z + weights.second_bias[...] if kind == i == 0 else z
            after[i, strip] = (x[kind][i, strip].astype(jnp.float32) + z).astype(after.dtype)
