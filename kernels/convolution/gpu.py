"""Depthwise convolutions around the torus in a form that XLA:GPU fuses with what reads them."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from equivit.derivatives import with_pullback
from equivit.kernels.convolution import reference
from equivit.kernels.gather.reference import of_map

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]
FEW_TAPS = 9  # largest kernel that is summed tap by tap; larger sums are not one loop


def form(
    x: jax.Array, kernel: jax.Array, *, stride: Pair, pads: Pads, mode: str, groups: int
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """A form that copies no maps to pad them around the torus; None if there is none."""
    (rows, columns, inner, width), channels = kernel.shape, x.shape[-1]
    depthwise = inner == 1 and width == groups == channels
    if mode != "circular" or not depthwise or rows * columns > FEW_TAPS:
        return None
    return functools.partial(_by_taps, stride=stride, pads=pads)


def _pullback(stride: Pair, pads: Pads, arrays: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = arrays
    library = functools.partial(reference.convolve, stride=stride, pads=pads, mode="circular", groups=x.shape[-1])
    return jax.vjp(library, x, kernel)[1](slope)


@functools.partial(jax.jit, static_argnames=("stride", "pads"))
@with_pullback(_pullback, static=(2, 3))
def _by_taps(x: jax.Array, kernel: jax.Array, stride: Pair, pads: Pads) -> jax.Array:
    """A depthwise convolution as a sum over its taps.  Its gradient is the library's: of gathers it is a scatter."""
    rows, columns = (
        jnp.arange((size + sum(pad) - taps) // step + 1) * step - pad[0]
        for size, taps, step, pad in zip(x.shape[1:3], kernel.shape[:2], stride, pads, strict=True)
    )
    return gathered(x, kernel, rows[None], columns[None]).astype(kernel.dtype)


def gathered(x: jax.Array, kernel: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """A depthwise convolution whose first taps are at rows [B, h] and columns [B, w] of each map, modulo its size.

    Each tap is one gather, and a GPU reads the map from memory once for all.  B is 1 for the same places in all maps.

    Shapes: x [B, H, W, ..., C], kernel [kh, kw, 1, C] -> [B, h, w, ..., C], in at least float32.
    """
    (_, height, width, *_), dtype = x.shape, jnp.promote_types(kernel.dtype, jnp.float32)
    if len(rows) == 1:
        of_maps, rows, columns = jax.vmap(of_map, (0, None, None)), rows[0], columns[0]
    else:
        of_maps = jax.vmap(of_map)
    products = []
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            part = of_maps(x, (rows + i) % height, (columns + j) % width)
            products.append(part.astype(dtype) * kernel[i, j, 0])
    return functools.reduce(operator.add, products)
