"""The residual branches of an octic block in plain jnp: the definition."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from equivit.kernels.isotypic_attention import isotypic_attention
from equivit.kernels.isotypic_linear import Field, Linear
from equivit.kernels.norm import Norm, normalise
from equivit.kernels.norm.reference import over_tokens
from equivit.kernels.octic_linear_gelu import octic_feed_forward


class Weights(NamedTuple):
    """The parameters of a branch.

    Attributes:
      norm_lines, norm_planes, norm_bias: [4, C], [2C] and [C].
      first_lines, first_planes, first_bias: [4, C, F], [2C, 2F] and [F], the first map of the body.
      second_lines, second_planes, second_bias: [4, G, C], [2G, 2C] and [C], its second map.
      scale_lines, scale_planes: [4, C] and [2C], the layer scale.
    """

    norm_lines: jax.Array
    norm_planes: jax.Array
    norm_bias: jax.Array
    first_lines: jax.Array
    first_planes: jax.Array
    first_bias: jax.Array
    second_lines: jax.Array
    second_planes: jax.Array
    second_bias: jax.Array
    scale_lines: jax.Array
    scale_planes: jax.Array

    @property
    def first(self) -> Linear:
        """The first map."""
        return (self.first_lines, self.first_planes), self.first_bias

    @property
    def second(self) -> Linear:
        """The second map."""
        return (self.second_lines, self.second_planes), self.second_bias


def octic_attention(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, heads: int, norm: Norm, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """x + scale * attention(norm(x)); `implementation` as in `isotypic_attention`."""

    def body(field: Field, w: Weights) -> Field:
        qkv, proj = jax.tree.map(lambda a: a.astype(w.first_lines.dtype), (w.first, w.second))
        return isotypic_attention(field, qkv, proj, heads, implementation=implementation)

    return _branch(body, (lines, planes), Weights(*weights), norm)


def octic_mlp(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, norm: Norm, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """x + scale * mlp(norm(x)); `implementation` as in `octic_feed_forward`."""

    def body(field: Field, w: Weights) -> Field:
        return octic_feed_forward(field, w.first, w.second, implementation=implementation)

    return _branch(body, (lines, planes), Weights(*weights), norm)


def _branch(body: Callable, field: Field, w: Weights, norm: Norm) -> tuple[jax.Array, jax.Array]:
    normed = normalise(field, (w.norm_lines, w.norm_planes), w.norm_bias, norm)
    lines, planes = body(tuple(a.astype(w.first_lines.dtype) for a in normed), w)
    return field[0] + lines * over_tokens(w.scale_lines, lines), field[1] + planes * w.scale_planes
