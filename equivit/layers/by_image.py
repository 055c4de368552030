"""Processes large fields a few images at a time, so that they fit in a CPU's caches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from equivit.symmetry.fields import Tokens

# Size of a group of images, in bytes.  A block's hidden field is four times as large; it, the products before it and
# their transforms then stay in a cache of a few megabytes, and the next group reuses their memory.
GROUP_BYTES = 2**20
# Smaller images do not keep the cores busy.
IMAGE_BYTES = 2**18


def by_image(function: Callable[[Tokens], Any], x: Tokens, *, least: int | None = None) -> Any:
    """`function(x)`, which must treat images independently; large ones run a few at a time on a CPU.

    Equals `function(x)` up to rounding.  Shapes: leaves of x and of the result [..., *B, N, C], images on axis -3.
    Under a mesh nothing is divided, since each device already has few images.

    Args:
      least: smaller images, in bytes, stay together; None for IMAGE_BYTES.
    """
    images = _images(x)
    group = images and _group(x, images, IMAGE_BYTES if least is None else least)
    if not group or group == images or not jax.sharding.get_abstract_mesh().empty:
        return function(x)
    return jax.lax.platform_dependent(x, cpu=lambda x: _in_groups(function, x, group), default=function)


def _images(x: Tokens) -> int:
    """The number of images on axis -3; 0 if there is no such axis or its size is symbolic (`jax.export`)."""
    return x.shape[-3] if len(x.shape) > 2 and isinstance(x.shape[-3], int) else 0


def _group(x: Tokens, images: int, least: int) -> int:
    """The largest number of images that fits in a group and divides `images`."""
    image = math.prod(x.shape) // images * x.dtype.itemsize
    if image < least:
        return images
    return max(n for n in range(1, images + 1) if images % n == 0 and (n == 1 or n * image <= GROUP_BYTES))


def _in_groups(function: Callable[[Tokens], Any], x: Tokens, group: int) -> Any:
    def split(leaf):
        shape = (*leaf.shape[:-3], leaf.shape[-3] // group, group, *leaf.shape[-2:])
        return jnp.moveaxis(leaf.reshape(shape), -4, 0)

    def join(leaf):
        leaf = jnp.moveaxis(leaf, 0, -4)
        return leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])

    return jax.tree.map(join, jax.lax.map(function, jax.tree.map(split, x)))
