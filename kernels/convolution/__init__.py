"""Convolutions of maps, padded with zeros or around the torus."""

import functools
import math
from typing import Any

import jax

from equivit.kernels import dispatch
from equivit.kernels.convolution import cpu, gpu, reference
from equivit.kernels.convolution.reference import wrap_pad

__all__ = ["convolve", "wrap_pad"]
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
      implementation: "cpu" and "gpu" are forms that are fast there (`cpu.py`, `gpu.py`), if there are any; "reference"
        is XLA's convolution.  All others choose among them when a program is lowered.

    Raises:
      ValueError: an unknown implementation, or maps of another number of channels than the kernel reads.
    """
    chosen = dispatch.resolve("convolve", implementation)
    if x.shape[-1] != kernel.shape[2] * groups:
        raise ValueError(
            f"convolve: maps {x.shape} have {x.shape[-1]} channels; a kernel {kernel.shape} with {groups=} reads "
            f"{kernel.shape[2] * groups}."
        )
    maps = x.astype(kernel.dtype).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    options: dict[str, Any] = dict(stride=stride, pads=pads, mode=mode, groups=groups)
    plain = functools.partial(reference.convolve, **options)
    forms = {"cpu": cpu.form(maps, kernel, **options), "gpu": gpu.form(maps, kernel, **options)}
    if chosen in ("reference", *forms):
        y = (forms.get(chosen) or plain)(maps, kernel)
    elif any(forms.values()):
        on_cpu, on_gpu = (form or plain for form in forms.values())
        y = jax.lax.platform_dependent(maps, kernel, cpu=on_cpu, cuda=on_gpu, default=plain)
    else:
        y = plain(maps, kernel)
    return y.reshape(*x.shape[:-3], *y.shape[1:])
