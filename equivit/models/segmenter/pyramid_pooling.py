"""Pyramid pooling: a map concatenated with its means at several scales (PSPNet, arXiv 1612.01105, Section 3.2)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers.convolution import NormedConv
from equivit.layers.resizing import bilinear

SCALES = (1, 2, 3, 6)

# A decoder convolution, initialised as in MMSegmentation.
conv_unit = functools.partial(
    NormedConv, activation=jax.nn.relu, init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
)


class PyramidPooling(nnx.Module):
    """Means of a map at SCALES, each through a 1 x 1 convolution; then a 3 x 3 convolution of all and the map.

    At scale k the map is divided into k x k parts from its corner on, and their means are resized to the map.  With
    `equivariant`, each entry instead gets the mean of a part of the same size around it, on a torus.

    Shapes: [B, h, w, in_channels] -> [B, h, w, width].

    Args:
      mode: padding mode of the last convolution.
    """

    def __init__(self, in_channels: int, width: int, *, mode: str, equivariant: bool, rngs: nnx.Rngs):
        self.scales = nnx.List([conv_unit(in_channels, width, kernel=(1, 1), mode=mode, rngs=rngs) for _ in SCALES])
        channels = in_channels + len(SCALES) * width
        self.bottleneck = conv_unit(channels, width, kernel=(3, 3), mode=mode, rngs=rngs)
        self.means = means_around if equivariant else means_of_parts

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        size, maps = (x.shape[-3], x.shape[-2]), [x]
        for scale, unit in zip(SCALES, self.scales, strict=True):
            rows, columns = (jnp.array(self.means(length, scale), x.dtype) for length in size)
            means = jnp.einsum("ih,jw,...hwc->...ijc", rows, columns, x)
            maps.append(bilinear(unit(means, train=train), size))
        return self.bottleneck(jnp.concatenate(maps, axis=-1), train=train)


def means_of_parts(length: int, scale: int) -> np.ndarray:
    """The matrix of means of `scale` parts of an axis, [scale, length]; uneven parts overlap, as in PyTorch.

    Part k spans floor(k length / scale) to ceil((k + 1) length / scale).
    """
    begin = np.arange(scale) * length // scale
    end = -(-(np.arange(scale) + 1) * length // scale)
    place = np.arange(length)
    inside = (place >= begin[:, None]) & (place < end[:, None])
    return inside / inside.sum(1, keepdims=True)


def means_around(length: int, scale: int) -> np.ndarray:
    """The matrix of means of a part around each position of a circular axis, [length, length]."""
    size = max(1, round(length / scale))
    behind = (np.arange(length) - np.arange(length)[:, None] + size // 2) % length
    return (behind < size) / size
