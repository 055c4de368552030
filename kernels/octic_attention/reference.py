"""A branch of an octic block with attention, in plain jnp: the definition."""

from typing import NamedTuple

import jax

from kernels.isotypic_attention import isotypic_attention
from kernels.isotypic_linear import Linear
from kernels.norm import Norm, normalise
from kernels.norm.reference import over_tokens


class Weights(NamedTuple):
    """The parameters of a branch.

    Attributes:
      norm_lines, norm_planes, norm_bias: [4, C], [2C] and [C].
      qkv_lines, qkv_planes, qkv_bias: [4, C, 3C], [2C, 6C] and [3C], outputs ordered (q | k | v) x heads x channels.
      proj_lines, proj_planes, proj_bias: [4, C, C], [2C, 2C] and [C].
      scale_lines, scale_planes: [4, C] and [2C], the layer scale.
    """

    norm_lines: jax.Array
    norm_planes: jax.Array
    norm_bias: jax.Array
    qkv_lines: jax.Array
    qkv_planes: jax.Array
    qkv_bias: jax.Array
    proj_lines: jax.Array
    proj_planes: jax.Array
    proj_bias: jax.Array
    scale_lines: jax.Array
    scale_planes: jax.Array

    @property
    def qkv(self) -> Linear:
        """The first map."""
        return (self.qkv_lines, self.qkv_planes), self.qkv_bias

    @property
    def proj(self) -> Linear:
        """The second map."""
        return (self.proj_lines, self.proj_planes), self.proj_bias


def octic_attention(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, heads: int, norm: Norm, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """scale * attention(norm(x)); `implementation` as in `isotypic_attention`."""
    w = Weights(*weights)
    normed = normalise((lines, planes), (w.norm_lines, w.norm_planes), w.norm_bias, norm)
    field, qkv, proj = jax.tree.map(lambda a: a.astype(w.qkv_lines.dtype), (normed, w.qkv, w.proj))
    y_lines, y_planes = isotypic_attention(field, qkv, proj, heads, implementation=implementation)
    return y_lines * over_tokens(w.scale_lines, y_lines), y_planes * w.scale_planes
