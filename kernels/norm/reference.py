"""Layer norm of a field in plain jnp, in at least float32: the definition."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.isotypic_linear import Field, add_to_first


class Norm(NamedTuple):
    """Constants of the norm: epsilon, and the weight of the variance of a row of E."""

    eps: float
    row_weight: float = 1.0


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm, store: Callable = lambda x: x) -> Field:
    """Centre each irrep, divide by the common standard deviation, scale, and add the bias to the first line.

    `store` is the identity, applied to the inverse standard deviation of each token, [*B, N, 1].
    """
    wide = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in field)
    centred = tuple(a - a.mean(-1, keepdims=True) for a in wide)
    total, *of_planes = (jnp.square(a).mean(-1, keepdims=True).sum(0) for a in centred)
    if of_planes:
        total = total + norm.row_weight * of_planes[0]
    order = sum(len(a) * rows for a, rows in zip(field, (1, 2), strict=False))  # a row of E has twice the channels
    inverse = store(jax.lax.rsqrt((total + norm.eps) / order))
    lines, *planes = (a * inverse * over_tokens(s, a) for a, s in zip(centred, scales, strict=True))
    lines = add_to_first(lines, bias)
    return tuple(y.astype(a.dtype) for y, a in zip((lines, *planes), field, strict=True))


def over_tokens(scale: jax.Array, array: jax.Array) -> jax.Array:
    """[i, C] -> [i, 1, ..., 1, C], to multiply lines; [2C] as it is."""
    return scale if scale.ndim == 1 else scale.reshape(len(scale), *(1,) * (array.ndim - 2), -1)
