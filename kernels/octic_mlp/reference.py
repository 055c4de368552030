"""A branch of an octic block with an MLP, in plain jnp: the definition."""

from typing import NamedTuple

import jax

from kernels.isotypic_linear import linear
from kernels.norm import Norm, normalise
from kernels.norm.reference import over_tokens
from kernels.octic_linear_gelu import octic_linear_gelu


class Weights(NamedTuple):
    """The parameters of a branch.

    Attributes:
      norm_lines, norm_planes, norm_bias: [4, C], [2C] and [C].
      in_lines, in_planes, in_bias: [4, C, F], [2C, 2F] and [F], the first map.
      out_lines, out_planes, out_bias: [4, F, C], [2F, 2C] and [C], the second map.
      scale_lines, scale_planes: [4, C] and [2C], the layer scale.
    """

    norm_lines: jax.Array
    norm_planes: jax.Array
    norm_bias: jax.Array
    in_lines: jax.Array
    in_planes: jax.Array
    in_bias: jax.Array
    out_lines: jax.Array
    out_planes: jax.Array
    out_bias: jax.Array
    scale_lines: jax.Array
    scale_planes: jax.Array


def octic_mlp(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, norm: Norm, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """scale * mlp(norm(x)); `implementation` as in `octic_linear_gelu`."""
    w = Weights(*weights)
    normed = normalise((lines, planes), (w.norm_lines, w.norm_planes), w.norm_bias, norm)
    arrays = (*normed, w.in_lines, w.in_planes, w.in_bias)
    arrays = tuple(a.astype(w.in_lines.dtype) for a in arrays)
    hidden = octic_linear_gelu(*arrays, implementation=implementation)
    out = tuple(a.astype(w.out_lines.dtype) for a in (w.out_lines, w.out_planes))
    y_lines, y_planes = linear(tuple(a.astype(w.out_lines.dtype) for a in hidden), (out, w.out_bias))
    return y_lines * over_tokens(w.scale_lines, y_lines), y_planes * w.scale_planes
