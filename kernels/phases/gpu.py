"""Convolutions at all phases in few passes over memory: what decides is reduced at once, and one phase is written."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.convolution.gpu import gathered
from equivit.kernels.convolution.reference import by_library, wrap_pad
from equivit.kernels.phases import reference
from equivit.kernels.phases.reference import Affine, Maps, Pair, affine_of, chosen_of, squares

Sample = tuple[jax.Array, jax.Array, jax.Array]  # number, mean, squared deviations from the mean


@functools.partial(jax.jit, static_argnames="padding")  # traced once for all maps of a shape, as `pool` is
def at_largest(x: jax.Array, kernel: jax.Array, bias: Any, moments: Any, padding: Pair) -> tuple[jax.Array, jax.Array]:
    """The phase with the largest norm, [B, h/2, w/2, D], and the norms [B, 4]."""
    return chosen_of(_folded(x, kernel, padding), bias, moments)


def _folded(x: jax.Array, kernel: jax.Array, padding: Pair) -> jax.Array:
    """The convolution of stride 1 around the torus, [B, h, w, D].

    The library pads with zeros, and outputs that begin before the map belong to its other end: their sum is fused with
    what reads it, while maps padded around the torus would be a copy.  Narrow types take that copy: parts that are
    rounded before their sum would not follow shifts, and sums in float32 would have products in float32.
    """
    if kernel.dtype.itemsize < 4:
        padded = wrap_pad(x.astype(kernel.dtype), reference.ends_of(kernel, padding))
        return by_library(padded, kernel, (1, 1), reference.NONE, 1).astype(jnp.float32)
    ends = kernel.shape[0] - 1, kernel.shape[1] - 1
    pads = (ends[0], ends[0]), (ends[1], ends[1])
    y = by_library(x.astype(kernel.dtype), kernel, (1, 1), pads, 1)
    for axis, end, after in zip((1, 2), ends, padding, strict=True):
        size, before = x.shape[axis], end - after
        spans = (0, before), (before, before + size), (before + size, None)
        above, y, below = (jax.lax.slice_in_dim(y, *span, axis=axis) for span in spans)
        y = y + _placed(above, size - before, 0, axis) + _placed(below, 0, size - after, axis)
    return y


def _placed(x: jax.Array, before: int, after: int, axis: int) -> jax.Array:
    """x with zeros before and after it along an axis."""
    return jnp.pad(x, [(before, after) if i == axis else (0, 0) for i in range(x.ndim)])


@functools.partial(jax.jit, static_argnames=("stride", "padding"))
def pool(maps: Maps, kernels: Maps, affines: tuple[Affine, ...], stride: Pair, padding: Pair) -> tuple[Maps, jax.Array]:
    """The phase with the largest norm, [B, heads, H / sh, W / sw, C] for each map, and the norms [B, sh sw]."""

    def at(phase: jax.Array, step: Pair) -> Maps:
        rows, columns = (
            phase[:, k, None] - padding[k] + jnp.arange(0, maps[0].shape[2 + k], step[k]) for k in range(2)
        )
        every = (
            gathered(jnp.moveaxis(x, 1, 3), kernel, rows, columns) for x, kernel in zip(maps, kernels, strict=True)
        )
        return tuple(affine_of(jnp.moveaxis(y, 3, 1), *affine) for y, affine in zip(every, affines, strict=True))

    norms = jnp.sqrt(functools.reduce(operator.add, (squares(y, stride) for y in at(jnp.zeros((1, 2), int), (1, 1)))))
    return at(jnp.stack(jnp.divmod(norms.argmax(1), stride[1]), -1), stride), norms


@jax.custom_jvp
def token_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over channels in one pass, [*B, C] -> [*B].  The derivative is the reference's."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    zero = np.zeros((), x.dtype)
    each = jnp.ones_like(x), x, jnp.zeros_like(x)
    number, mean, squares = jax.lax.reduce(each, (zero, zero, zero), _united, (x.ndim - 1,))
    return mean, squares / number


@token_moments.defjvp
def _derivative(primals, tangents):
    return token_moments(*primals), jax.jvp(reference.token_moments, primals, tangents)[1]


def _united(one: Sample, other: Sample) -> Sample:
    """Two samples together (Chan, Golub and LeVeque 1979)."""
    (n, mean, squares), (others, other_mean, other_squares) = one, other
    share, apart = others / jnp.maximum(n + others, 1), other_mean - mean
    return n + others, mean + share * apart, squares + other_squares + n * share * jnp.square(apart)
