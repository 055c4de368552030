"""Large fields, a few images at a time: what keeps a CPU's caches useful."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Entries of a group of images, in bytes.  A block's hidden field is four times as large; it, the products before it
# and their transforms then stay in a cache of some megabytes, and their memory is used again by the next group.
GROUP_BYTES = 2**20
# Below this an image is too small to keep the cores busy.
IMAGE_BYTES = 2**18


def by_image(function: Callable, x):
    """`function(x)`, where images do not meet; on a CPU some images at a time when they are large.

    Values are those of `function(x)` to rounding.  Shapes: leaves [..., *B, N, C], the images on axis -3.  Under a mesh
    each device has few images already, and nothing is divided.
    """
    images = _images(x)
    group = images and _group(x, images)
    if not group or group == images or not jax.sharding.get_abstract_mesh().empty:
        return function(x)
    return jax.lax.platform_dependent(x, cpu=lambda x: _in_groups(function, x, group), default=function)


def _images(x) -> int:
    """How many images lie on axis -3; 0 when there is no such axis, or their number is a symbol of an export."""
    return x.shape[-3] if len(x.shape) > 2 and isinstance(x.shape[-3], int) else 0


def _group(x, images) -> int:
    """The most images, a divisor of all, whose entries fit."""
    image = math.prod(x.shape) // images * x.dtype.itemsize
    if image < IMAGE_BYTES:
        return images
    return max(n for n in range(1, images + 1) if images % n == 0 and (n == 1 or n * image <= GROUP_BYTES))


def _in_groups(function, x, group):
    def split(leaf):
        shape = (*leaf.shape[:-3], leaf.shape[-3] // group, group, *leaf.shape[-2:])
        return jnp.moveaxis(leaf.reshape(shape), -4, 0)

    def join(leaf):
        leaf = jnp.moveaxis(leaf, 0, -4)
        return leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])

    return jax.tree.map(join, jax.lax.map(function, jax.tree.map(split, x)))
