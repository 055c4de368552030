"""Processes large fields a few images at a time, so that they fit in a CPU's caches."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from equivit.symmetry.fields import Tokens

# Size of the images that are worked on at a time, in bytes.  The next ones reuse the memory of the fields that are
# computed from them, which then stays in a cache; each smaller group would read the weights once more.
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
    return jax.lax.platform_dependent(x, cpu=functools.partial(_in_halves, function), default=function)


def _images(x: Tokens) -> int:
    """The number of images on axis -3; 0 if there is no such axis or its size is symbolic (`jax.export`)."""
    return x.shape[-3] if len(x.shape) > 2 and isinstance(x.shape[-3], int) else 0


def _image_bytes(x: Tokens, images: int) -> int:
    return math.prod(x.shape) // images * x.dtype.itemsize


def _in_halves(function: Callable[[Tokens], Any], x: Tokens) -> Any:
    """`function` of each half of the images.

    Neither half waits for the other, and so one can use the cores that an operation of the other is too small for.
    """
    images = _images(x)
    if images % 2:
        return _in_groups(function, x, GROUP_BYTES)
    first, second = (
        jax.tree.map(lambda leaf, i=i: jax.lax.slice_in_dim(leaf, i, i + images // 2, axis=-3), x)
        for i in (0, images // 2)
    )
    done = [_in_groups(function, half, GROUP_BYTES // 2) for half in (first, second)]
    return jax.tree.map(lambda *halves: jnp.concatenate(halves, -3), *done)


def _in_groups(function: Callable[[Tokens], Any], x: Tokens, most: int) -> Any:
    """`function` of one group after another: the largest number of images that divides them and fits in `most` bytes.

    That number is at least 1.
    """
    images = _images(x)
    size = _image_bytes(x, images)
    group = max(n for n in range(1, images + 1) if images % n == 0 and (n == 1 or n * size <= most))
    if group == images:
        return function(x)

    def split(leaf):
        shape = (*leaf.shape[:-3], images // group, group, *leaf.shape[-2:])
        return jnp.moveaxis(leaf.reshape(shape), -4, 0)

    def join(leaf):
        leaf = jnp.moveaxis(leaf, 0, -4)
        return leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])

    return jax.tree.map(join, jax.lax.map(function, jax.tree.map(split, x)))
