"""Shared code of the Hopper forms of both branches: dtypes, the norm before the body, and the sum after it."""

import jax
import jax.numpy as jnp

from equivit.kernels.hopper import norm as norm_kernel
from equivit.kernels.hopper import residual, vectors
from equivit.kernels.hopper.vectors import Vectors
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch.reference import Weights

MAPS = ("first_lines", "first_planes", "second_lines", "second_planes")  # among the weights
Field = tuple[jax.Array, ...]


def supported(lines: jax.Array, w: Weights) -> bool:
    """Whether products are in bfloat16, the weights do not widen the stream, and norm and sum have kernels."""
    products, kept = {getattr(w, name).dtype for name in MAPS}, jnp.result_type(lines, *w) == lines.dtype
    if products != {jnp.dtype(jnp.bfloat16)} or not kept or not norm_kernel.supported(lines.shape[-1], lines.dtype):
        return False
    _, f, c = w.second_lines.shape
    return residual.supported(f, c, w.second_lines.dtype, lines.dtype)


def rows(array: jax.Array) -> jax.Array:
    """[k, *B, N, c] -> [k, M, c]."""
    return array.reshape(len(array), -1, array.shape[-1])


def packed(w: Weights, first_bias: jax.Array) -> tuple[Vectors, ...]:
    """The vectors of the norm, of the first map, whose rows are given, and of the sum."""
    of_norm = vectors.of_field(w.norm_lines, w.norm_planes, w.norm_bias)
    of_sum = vectors.of_field(w.scale_lines, w.scale_planes, w.second_bias)
    return vectors.packed(of_norm, first_bias, of_sum)


def normed(field: Field, of_norm: Vectors, norm: Norm) -> Field:
    """The norm of a field [k, M, c], in bfloat16."""
    return norm_kernel.forward(*field, of_norm, norm=norm, dtype=jnp.bfloat16)


def added(field: Field, h: Field, second: Field, of_sum: Vectors) -> Field:
    """The field plus scale * (h times the second map + bias), for a field h with G channels."""
    return residual.forward(*field, *h, *second, of_sum)
