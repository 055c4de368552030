"""The biases and scales of several Hopper kernels in one array.

XLA copies them out of the stack of blocks: with one array in one short kernel, otherwise in one for each of them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

OF_FIELD = 7  # vectors of `of_field`, the bias last


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["first"])
@dataclasses.dataclass(frozen=True)
class Vectors:
    """Vectors of a kernel in float32: rows of an array [n, width] from `first` on, among rows of other kernels."""

    array: jax.Array
    first: int = 0


def packed(*groups: jax.Array) -> tuple[Vectors, ...]:
    """Groups of vectors [r, width] in one array, which each kernel sees as rows of its own width."""
    parts, firsts, length = [], [], 0
    for group in groups:
        gap = -length % group.shape[1]
        parts += [jnp.zeros(gap, jnp.float32), group.ravel().astype(jnp.float32)]
        firsts.append((length + gap) // group.shape[1])
        length += gap + group.size
    widths = [group.shape[1] for group in groups]
    array = jnp.concatenate([*parts, jnp.zeros(-length % math.lcm(*widths), jnp.float32)])
    return tuple(Vectors(array.reshape(-1, width), first) for width, first in zip(widths, firsts, strict=True))


def of_field(lines: jax.Array, planes: jax.Array, bias: jax.Array) -> jax.Array:
    """A vector for each irrep and copy, [4, C] and [2C], and one for the invariant irrep, [C]: [7, C]."""
    return jnp.concatenate([lines, planes.reshape(2, -1), bias[None]])
