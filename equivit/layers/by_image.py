"""Processes large fields a few images at a time, so that they fit in a CPU's caches."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from equivit.symmetry.fields import Tokens

# Size of a group of images, in bytes.  The next group reuses the memory of the fields that are computed from it, which
# then stays in a cache; each smaller group would read the weights once more.
GROUP_BYTES = 2**22
# Smaller images do not keep the cores busy.
IMAGE_BYTES = 2**17


def by_image(function: Callable[[Tokens], Any], x: Tokens, *, least: int | None = None) -> Any:
    """`function(x)`, which must treat images independently; large ones run a few at a time on a CPU, in two halves.

    Equals `function(x)` up to rounding.  Shapes: leaves of x and of the result [..., *B, N, C], images on axis -3.
    Under a mesh nothing is divided, since each device already has few images.

    Args:
      least: smaller images, in bytes, stay together; None for IMAGE_BYTES.
    """
    images = _images(x)
    least = IMAGE_BYTES if least is None else least
    if images < 2 or _image_bytes(x, images) < least or not jax.sharding.get_abstract_mesh().empty:
        return function(x)
    group = _group(images, _image_bytes(x, images))
    return jax.lax.platform_dependent(x, cpu=lambda x: _in_groups(function, x, group), default=function)


def _images(x: Tokens) -> int:
    """The number of images on axis -3; 0 if there is no such axis or its size is symbolic (`jax.export`)."""
    return x.shape[-3] if len(x.shape) > 2 and isinstance(x.shape[-3], int) else 0


def _image_bytes(x: Tokens, images: int) -> int:
    return math.prod(x.shape) // images * x.dtype.itemsize


def _group(images: int, size: int) -> int:
    """The largest number of images of `size` bytes that fits in a group and divides `images`."""
    return max(n for n in range(1, images + 1) if images % n == 0 and (n == 1 or n * size <= GROUP_BYTES))


def _in_groups(function: Callable[[Tokens], Any], x: Tokens, group: int) -> Any:
    if group == _images(x):
        return _in_halves(function, x)

    def split(leaf):
        shape = (*leaf.shape[:-3], leaf.shape[-3] // group, group, *leaf.shape[-2:])
        return jnp.moveaxis(leaf.reshape(shape), -4, 0)

    def join(leaf):
        leaf = jnp.moveaxis(leaf, 0, -4)
        return leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])

    return jax.tree.map(join, jax.lax.map(functools.partial(_in_halves, function), jax.tree.map(split, x)))


def _in_halves(function: Callable[[Tokens], Any], x: Tokens) -> Any:
    """`function` of each half of the images.

    Neither half waits for the other, and so one can use the cores that an operation of the other is too small for.
    """
    images = _images(x)
    if images % 2:
        return function(x)
    first, second = (
        jax.tree.map(lambda leaf, i=i: jax.lax.slice_in_dim(leaf, i, i + images // 2, axis=-3), x)
        for i in (0, images // 2)
    )
    return jax.tree.map(lambda *halves: jnp.concatenate(halves, -3), function(first), function(second))
