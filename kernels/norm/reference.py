"""Layer norm of a field in plain jnp, in at least float32: the definition."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.kernels.isotypic_linear import Field, add_to_first


class Norm(NamedTuple):
    """Constants of the norm: epsilon, and the weight of the variance of a row of E."""

    eps: float
    row_weight: float = 1.0


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """Standardise, scale, and add the bias to the first line."""
    return scaled(standardise(field, norm), scales, bias)


def standardise(field: Field, norm: Norm) -> Field:
    """Centre each irrep and divide by the common standard deviation of the token."""
    parts = centred(field)
    inverse = inverse_deviation(parts, norm)
    return tuple(a * inverse for a in parts)


def fork(field: Field, norm: Norm, dtype: DTypeLike) -> tuple[Field, Field]:
    """A field, and the field standardised in a dtype."""
    return field, tuple(a.astype(dtype) for a in standardise(field, norm))


def centred(field: Field) -> Field:
    """The field minus the mean of each irrep over its channels."""
    wide = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in field)
    return tuple(a - a.mean(-1, keepdims=True) for a in wide)


def inverse_deviation(parts: Field, norm: Norm) -> jax.Array:
    """1 / sigma of each token of a centred field, [*B, N, 1].

    sigma^2 = (sum of weighted variances + eps) / order of the group.
    """
    total = weighted_means((jnp.square(a) for a in parts), (1.0, norm.row_weight))
    return jax.lax.rsqrt((total + norm.eps) / order(parts))


def weighted_means(field: Iterable[jax.Array], weights: tuple[float, ...]) -> jax.Array:
    """The means over channels, weighted by kind and summed over the irreps: [*B, N, 1]."""
    means = (weight * a.mean(-1, keepdims=True).sum(0) for a, weight in zip(field, weights, strict=False))
    return functools.reduce(jnp.add, means)


def order(field: Field) -> int:
    """The order of the group: a row of E has twice the channels."""
    return sum(len(a) * copies for a, copies in zip(field, (1, 2), strict=False))


def scaled(field: Field, scales: Field, bias: jax.Array) -> Field:
    """Multiply by a scale per channel, and add the bias to the first line."""
    lines, *planes = (a * over_tokens(s, a) for a, s in zip(field, scales, strict=True))
    return add_to_first(lines, bias), *planes


def over_tokens(scale: jax.Array, array: jax.Array) -> jax.Array:
    """[i, C] -> [i, 1, ..., 1, C], to multiply lines; [2C] as it is."""
    return scale if scale.ndim == 1 else scale.reshape(len(scale), *(1,) * (array.ndim - 2), -1)
