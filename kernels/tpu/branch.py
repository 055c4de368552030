"""Shared code of the two branches of an octic block: the norm before and the layer scale after.

Both are scale * f(norm(x)); f is attention in `octic_attention`, and the MLP in `octic_mlp`.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2 and Appendix A.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kernels import dispatch
from kernels.norm import Norm

STRIP = 16  # rows the norm processes at once, to stay in registers: the height of a bfloat16 register
Arrays = tuple[jax.Array, jax.Array]


def check(name: str, lines: jax.Array, planes: jax.Array, weights: Any, first: int, second: int, sizes: str) -> None:
    """ValueError unless the arrays are a field and the parameters of a branch.

    Args:
      first, second: channels per component after the first map and before the second.
      sizes: the numbers of channels, for the message.
    """
    dispatch.check_field(name, lines, planes)
    c = lines.shape[-1]
    maps = (4, c, first), (2 * c, 2 * first), (first,), (4, second, c), (2 * second, 2 * c), (c,)
    shapes = (4, c), (2 * c,), (c,), *maps, (4, c), (2 * c,)
    for field, array, shape in zip(weights._fields, weights, shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"{name}: {field} {array.shape} must be {shape}, for a field of {sizes}.")


def product_dtype(lines: jax.Array, weights: Any, maps: tuple[str, ...]) -> np.dtype | None:
    """The common dtype of the `maps` among the weights.

    None if they differ, if kernels do not support it or the field's dtype, or if the weights would widen the field's.
    """
    products = {getattr(weights, name).dtype for name in maps}
    floats = {lines.dtype, *products} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    kept = jnp.result_type(lines, *weights) == lines.dtype
    return products.pop() if floats and kept and len(products) == 1 else None


# ---- In a TPU kernel


def prepared(weights: Any, last_bias: str, factor: float = 1.0) -> Any:
    """Convert the vectors among the weights to float32 rows.

    The bias of the last map is multiplied by the layer scale, and then the layer scale by `factor`.
    """
    names = ("norm_lines", "norm_planes", "norm_bias", "scale_lines", "scale_planes")
    vectors = [*names, *(name for name in weights._fields if name.endswith("_bias") and name not in names)]
    rows = {name: jnp.atleast_2d(getattr(weights, name).astype(jnp.float32)) for name in vectors}
    rows[last_bias] = rows[last_bias] * rows["scale_lines"][:1]
    rows |= {name: rows[name] * factor for name in ("scale_lines", "scale_planes")}
    return weights._replace(**rows)


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


def norm_strip(x: Arrays, y: Arrays, weights: Any, norm: Norm, strip: Any) -> None:
    """Write the norm of a strip of the references x into the references y, in their first lanes.

    Args:
      weights: `prepared`, with norm_lines, norm_planes and norm_bias.
    """
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
