"""All phases of a strided convolution are the convolution of stride 1: the definitions."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels.convolution import convolve
from equivit.kernels.convolution.reference import by_library, wrap_pad
from equivit.kernels.gather import gather

Pair = tuple[int, int]
Maps = tuple[jax.Array, ...]
NONE = ((0, 0), (0, 0))
Affine = tuple[jax.Array, jax.Array]  # factor and shift of each channel


def phase(y: jax.Array, index: jax.Array, stride: Pair) -> jax.Array:
    """One phase of each map: [B, h, w, D] at [B] -> [B, h / sh, w / sw, D]."""
    rows, columns = (
        place[:, None] + jnp.arange(0, size, step)
        for place, size, step in zip(jnp.divmod(index, stride[1]), y.shape[1:3], stride, strict=True)
    )
    return gather(y, rows, columns)


def at_largest(
    x: jax.Array, kernel: jax.Array, bias: Any, moments: Any, padding: Pair, take: Callable = phase
) -> tuple[jax.Array, jax.Array]:
    """The phase with the largest norm, [B, h/2, w/2, D], and the norms [B, 4]; `take` is a form of `phase`."""
    ends, sums = ends_of(kernel, padding), jnp.promote_types(kernel.dtype, jnp.float32)
    y = by_library(wrap_pad(x.astype(kernel.dtype), ends), kernel, (1, 1), NONE, 1, sums)
    return chosen_of(y, bias, moments, take)


def chosen_of(y: jax.Array, bias: Any, moments: Any, take: Callable = phase) -> tuple[jax.Array, jax.Array]:
    """`at_largest` from the convolution of stride 1, [B, h, w, D] in at least float32."""
    if moments is not None:
        y = (y - moments.mean[..., None] * moments.total) * moments.scale[..., None]
    y = y if bias is None else y + bias
    norms = jnp.sqrt(squares(y, (2, 2)))
    return take(y, norms.argmax(1), (2, 2)), norms


def pool(
    maps: Maps, kernels: Maps, affines: tuple[Affine, ...], stride: Pair, padding: Pair, take: Callable = phase
) -> tuple[Maps, jax.Array]:
    """The phase with the largest norm, [B, heads, H / sh, W / sw, C] for each map, and the norms [B, sh sw]."""
    every = [
        affine_of(convolve(x, kernel, pads=ends_of(kernel, padding), mode="circular", groups=x.shape[-1]), *affine)
        for x, kernel, affine in zip(maps, kernels, affines, strict=True)
    ]
    norms = jnp.sqrt(functools.reduce(operator.add, (squares(y, stride) for y in every)))

    def chosen(y):
        flat = y.reshape(-1, *y.shape[2:])
        kept = take(flat, jnp.repeat(norms.argmax(1), y.shape[1]), stride)
        return kept.reshape(*y.shape[:2], *kept.shape[1:])

    return tuple(map(chosen, every)), norms


def ends_of(kernel: jax.Array, padding: Pair) -> tuple[Pair, Pair]:
    """The pads of a convolution at stride 1 that is as large as the map."""
    rows, columns = ((before, taps - 1 - before) for before, taps in zip(padding, kernel.shape[:2], strict=True))
    return rows, columns


def affine_of(y: jax.Array, factor: jax.Array, shift: jax.Array) -> jax.Array:
    """factor y + shift, in at least float32."""
    return y.astype(jnp.promote_types(y.dtype, jnp.float32)) * factor + shift


def squares(y: jax.Array, stride: Pair) -> jax.Array:
    """The squared l2 norm of each phase over all channels and heads: [B, *heads, H, W, D] -> [B, sh sw]."""
    (sh, sw), energies = stride, jnp.square(y).sum(-1)
    b, *heads, h, w = energies.shape
    return energies.reshape(b, math.prod(heads), h // sh, sh, w // sw, sw).sum((1, 2, 4)).reshape(b, sh * sw)


def token_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over channels, [*B, C] -> [*B]: the mean first, so that a large one costs no digits."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = x.mean(-1)
    return mean, jnp.square(x - mean[..., None]).mean(-1)
