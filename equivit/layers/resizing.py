"""Resize maps: linear interpolation in the plane or around a torus, nearest neighbour, and index-tracked unpooling.

Entries are squares with centres at i + 1/2, so k fine entries cover a coarse one: PyTorch's `align_corners=False`,
without antialiasing.
"""

import jax
import jax.numpy as jnp
import numpy as np


def bilinear(x: jax.Array, size: tuple[int, int], *, circular: bool = False) -> jax.Array:
    """Linear interpolation along both axes: [*B, h, w, C] -> [*B, H, W, C]; maps of integers become floats.

    Beyond the outer centres the border value is repeated, or with `circular` the map wraps around.
    """
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)
    for axis, length in zip((-3, -2), size, strict=True):
        if x.shape[axis] != length:
            x = _linear(x, axis, length, circular)
    return x


def _linear(x: jax.Array, axis: int, length: int, circular: bool) -> jax.Array:
    old = x.shape[axis]
    place = (np.arange(length) + 0.5) * (old / length) - 0.5
    place = place if circular else np.clip(place, 0, old - 1)
    first = np.floor(place).astype(int)
    share = (place - first).reshape(-1, *(1,) * (-axis - 1)).astype(x.dtype)
    low = jnp.take(x, first % old, axis=axis, mode="clip")
    high = jnp.take(x, (first + 1) % old if circular else np.minimum(first + 1, old - 1), axis=axis, mode="clip")
    return low * (1 - share) + high * share


def nearest(labels: jax.Array, size: tuple[int, ...], valid: jax.Array | np.ndarray | None = None) -> jax.Array:
    """Nearest-neighbour resize of label maps: [B, H, W] -> [B, h, w].

    Args:
      size: (h, w).
      valid: int [B, 2], the (height, width) of each map without its padding, which is resized; None: all of it.
    """
    for k, length in enumerate(size):
        old = np.array([labels.shape[k + 1]]) if valid is None else valid[:, k]
        rows = (2 * np.arange(length) + 1) * old[:, None] // (2 * length)  # in exact integers
        labels = jnp.take_along_axis(labels, jnp.expand_dims(jnp.asarray(rows, jnp.int32), 2 - k), k + 1)
    return labels


def unpooled(x: jax.Array, factors: tuple[int, int]) -> jax.Array:
    """Upsample by zero filling: each entry goes to the upper left of its block.

    Shapes: [*B, h, w, C] -> [*B, h fh, w fw, C].

    Source: "Making Vision Transformers Truly Shift-Equivariant", Listing A2.2, where the map is also rolled to the
    pooled phase (`symmetry/shifts.py: polyphase_up` does both).
    """
    pads = [(0, 0, 0)] * (x.ndim - 3) + [(0, factor - 1, factor - 1) for factor in factors] + [(0, 0, 0)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), pads)
