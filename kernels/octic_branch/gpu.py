"""Shared code of the Hopper forms of both branches: what the kernels of `kernels.hopper` support, and the norm."""

import jax
import jax.numpy as jnp

from kernels.hopper import norm as norm_kernel
from kernels.norm import Norm
from kernels.octic_branch.reference import Weights

MAPS = ("first_lines", "first_planes", "second_lines", "second_planes")  # among the weights
Field = tuple[jax.Array, jax.Array]


def supported(lines: jax.Array, weights: Weights) -> bool:
    """Whether the products are in bfloat16, the norm has a kernel, and the weights do not widen the stream."""
    products = {getattr(weights, name).dtype for name in MAPS}
    kept = jnp.result_type(lines, *weights) == lines.dtype
    return products == {jnp.dtype(jnp.bfloat16)} and kept and norm_kernel.supported(lines.shape[-1], lines.dtype)


def rows(array: jax.Array) -> jax.Array:
    """[k, *B, N, c] -> [k, M, c]."""
    return array.reshape(len(array), -1, array.shape[-1])


def normed(lines: jax.Array, planes: jax.Array, w: Weights, norm: Norm) -> Field:
    """The norm of a field [k, M, c], in bfloat16."""
    return norm_kernel.forward(lines, planes, w.norm_lines, w.norm_planes, w.norm_bias, norm=norm, dtype=jnp.bfloat16)
