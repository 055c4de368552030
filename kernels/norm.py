"""Layer norm of a field: irreps are centred, and divided by one common standard deviation; then scales and a bias.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels import dispatch
from kernels.isotypic_linear import Field, add_to_first

NAME = "norm"


class Norm(NamedTuple):
    """Constants of the norm: epsilon, and the weight of the variance of a row of E."""

    eps: float
    row_weight: float = 1.0


def reference(field: Field, scales: Field, bias: jax.Array, norm: Norm, *, once: bool = False) -> Field:
    """The definition, in plain jnp, in at least float32; with `once` the standard deviation is an array of its own."""
    centred = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in field]
    centred = [a - a.mean(-1, keepdims=True) for a in centred]
    total, *of_planes = (jnp.square(a).mean(-1, keepdims=True).sum(0) for a in centred)
    if of_planes:
        total = total + norm.row_weight * of_planes[0]
    inverse = jax.lax.rsqrt((total + norm.eps) / order(field))
    inverse = jax.lax.optimization_barrier(inverse) if once else inverse
    lines, *planes = (a * inverse * _over_tokens(s, a) for a, s in zip(centred, scales, strict=True))
    lines = add_to_first(lines, bias)
    return tuple(y.astype(a.dtype) for y, a in zip((lines, *planes), field, strict=True))


def order(field: Field) -> int:
    """The order of the group: a row of E has twice the channels of a line."""
    return sum(len(a) * rows for a, rows in zip(field, (1, 2), strict=False))


def _over_tokens(scale: jax.Array, array: jax.Array) -> jax.Array:
    """[i, C] -> [i, 1, ..., 1, C], to multiply lines; [2C] as it is."""
    return scale if scale.ndim == 1 else scale.reshape(len(scale), *(1,) * (array.ndim - 2), -1)


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """The norm.

    In a program for a GPU the standard deviation of lines and planes is computed once: left to itself, XLA reads the
    whole field for either.

    Args:
      field: lines and planes, or lines alone.
      scales: of lines [i, C], of planes [2C].
      bias: [C], of the first line.
      norm: constants.
    """
    by_platform = len(field) > 1 and dispatch.chosen(NAME, "auto") in ("auto", "gpu")
    return _normalise(field, scales, bias, norm, by_platform)


# Computed again in a backward pass: what a derivative needs is four times as large as a field in bfloat16.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normalise(field, scales, bias, norm, by_platform):
    plain = functools.partial(reference, norm=norm)
    kernels: dict[str, Callable] = {"gpu": functools.partial(plain, once=True)} if by_platform else {}
    with jax.named_scope("norm"):
        return dispatch.select(NAME, "auto", plain, kernels, field, scales, bias)
