"""Convolutions of maps, padded with zeros or around the torus."""

import functools
import math
from typing import Any

import jax

from kernels import dispatch
from kernels.convolution import cpu, reference
from kernels.convolution.reference import around

__all__ = ["around", "convolve"]
Pair = tuple[int, int]


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    *,
    stride: Pair = (1, 1),
    pads: tuple[Pair, Pair] = ((0, 0), (0, 0)),
    mode: str = "zeros",
    groups: int = 1,
    implementation: str = "auto",
) -> jax.Array:
    """Convolve maps, in the dtype of the kernel.

    Shapes: x [*B, H, W, groups C], kernel [kh, kw, C, D] -> [*B, h, w, D].

    Args:
      pads: rows before and after a map, and columns before and after it.
      mode: padding values: "zeros", or "circular" for the opposite side of the map.
      groups: number of channel groups, convolved independently.
      implementation: "cpu" is a form that XLA:CPU compiles well (`cpu.py`), if there is one; "reference" is XLA's
        convolution.  All others choose between the two when a program is lowered.

    Raises:
      ValueError: an unknown implementation.
    """
    chosen = dispatch.chosen("convolve", implementation)
    maps = x.astype(kernel.dtype).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    options: dict[str, Any] = dict(stride=stride, pads=pads, mode=mode, groups=groups)
    plain, form = functools.partial(reference.convolve, **options), cpu.form(maps, kernel, **options)
    if form is None or chosen == "reference":
        y = plain(maps, kernel)
    else:
        y = form(maps, kernel) if chosen == "cpu" else jax.lax.platform_dependent(maps, kernel, cpu=form, default=plain)
    return y.reshape(*x.shape[:-3], *y.shape[1:])
