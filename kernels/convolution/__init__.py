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
    """The convolution of maps, in the dtype of the kernel.

    Shapes: x [*B, H, W, groups C], kernel [kh, kw, C, D] -> [*B, h, w, D].

    Args:
      pads: rows before and after a map, and columns before and after it.
      mode: what they hold, "zeros" or with "circular" the other side of the map.
      groups: of channels, each of which is convolved by itself.
      implementation: "cpu" is a form that XLA:CPU compiles well (`cpu.py`), where it has one; "reference" is XLA's
        convolution.  "auto" and others choose between them when a program is lowered.

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
