"""XLA's convolution of maps, padded with zeros or around the torus: the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Pair = tuple[int, int]


def convolve(
    x: jax.Array, kernel: jax.Array, stride: Pair, pads: tuple[Pair, Pair], mode: str, groups: int
) -> jax.Array:
    """Convolve maps [n, H, W, groups C] with a kernel [kh, kw, C, D]."""
    if mode == "circular":
        x, pads = wrap_pad(x, pads), ((0, 0), (0, 0))
    return by_library(x, kernel, stride, pads, groups)


def by_library(
    x: jax.Array,
    kernel: jax.Array,
    stride: Pair,
    pads: tuple[Pair, Pair],
    groups: int,
    sums: DTypeLike | None = None,
) -> jax.Array:
    """XLA's convolution, padded with zeros.  Sums, and so the result, have the dtype `sums`, or else the kernel's."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        stride,
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        preferred_element_type=sums,
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def wrap_pad(x: jax.Array, ends: tuple[Pair, Pair]) -> jax.Array:
    """Pad maps around the torus: [*B, H, W, C] -> [*B, t + H + b, l + W + r, C].

    A TPU copies the edges.  Elsewhere maps are read by constant indices, which XLA fuses with the next operation; on a
    TPU that is a loop over the rows of large maps.  The gradient is the copy's everywhere, since the gradient of
    indexing would be a slow scatter.

    Args:
      ends: (t, b) and (l, r).
    """
    copied, by_index = (functools.partial(form, ends=ends) for form in (_copied, _by_index))
    return jax.lax.platform_dependent(x, tpu=copied, default=by_index)


@wrap_pad.defjvp
def _around_derivative(ends, primals, tangents):
    (x,), (slope,) = primals, tangents
    return wrap_pad(x, ends), _copied(slope, ends)


def _copied(x: jax.Array, ends: tuple[Pair, Pair]) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [*ends, (0, 0)], mode="wrap")


def _by_index(x: jax.Array, ends: tuple[Pair, Pair]) -> jax.Array:
    for axis, (before, after) in zip((-3, -2), ends, strict=True):
        size = x.shape[axis]
        x = jnp.take(x, np.arange(-before, size + after) % size, axis=axis, mode="clip")
    return x
