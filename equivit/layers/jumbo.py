"""The Jumbo token: J tokens of normal width in attention, and one token J times as wide in its own MLP.

Source: Jumbo, Section 3.  The token is stored split, as the first J rows of the sequence; merging it is a reshape.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, isotypic
from equivit.layers.block import Block, branch_path
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.grid import Layout
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, TokensT, join, rows


def merge(x: TokensT) -> TokensT:
    """J rows to one wide row: [*B, J, C] -> [*B, 1, J C], for an array or each leaf of a field."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], 1, math.prod(leaf.shape[-2:])), x)


def divide(x: TokensT, number: int) -> TokensT:
    """The inverse of `merge`: [*B, 1, J C] -> [*B, J, C]."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], number, leaf.shape[-1] // number), x)


class LowRank(nnx.Module):
    """x A B, with B initialised to zero (Hu et al. 2022).

    Args:
      linear: makes a linear map without bias, `linear(in_features, out_features)`, dense or isotypic.
    """

    def __init__(self, linear: Callable[[int, int], nnx.Module], in_features: int, out_features: int, rank: int):
        self.down = linear(in_features, rank)
        self.up = jax.tree.map(jnp.zeros_like, linear(rank, out_features))

    def __call__(self, x: TokensT) -> TokensT:
        return self.up(self.down(x))


class MlpLora(nnx.Module):
    """A block's own low-rank map, parallel to the whole shared MLP: 0.44 M parameters in Jumbo's Table 4."""

    def __init__(self, linear: Callable[..., nnx.Module], width: int, rank: int):
        self.around = LowRank(linear, width, width, rank)

    def __call__(self, mlp: nnx.Module, x: TokensT) -> TokensT:
        return mlp(x) + self.around(x)


class LinearLora(nnx.Module):
    """A block's own low-rank maps, parallel to the two linear maps of the shared MLP, as usual for LoRA."""

    def __init__(self, linear: Callable[..., nnx.Module], width: int, hidden: int, rank: int, gelu: Callable):
        self.fc1, self.fc2 = LowRank(linear, width, hidden, rank), LowRank(linear, hidden, width, rank)
        self.gelu = gelu

    def __call__(self, mlp: dense.Mlp | isotypic.Mlp, x: Any) -> Any:
        x = self.gelu(mlp.fc1(x) + self.fc1(x))
        return mlp.fc2(x) + self.fc2(x)


class JumboBlock(Block):
    """x + path(scale1(attention(norm1(x)))) on all rows, then an MLP for each kind of token.

    The merged Jumbo token u becomes u + path(scale3(mlp(norm3(u)))); patches p become p + path(scale2(mlp(norm2(p)))).

    Shapes: [*B, J + N, width] or a field -> the same; J is `layout.prefix`.

    Args:
      norm3, scale3: parts for the merged token.
      jumbo_mlp: the wide MLP of this block; None: the shared MLP passed to the call.
      lora: `MlpLora` or `LinearLora`, this block's additions to the shared MLP; or None.
      normed_residual: add the branch to norm3(u) instead of u, as in the JAX version of Jumbo's MAE.
      invariant: in a field, the Jumbo token has only the invariant part; `norm3`, `scale3` and the MLP are dense.
      feeds_patches: False skips the MLP of the patches, unless `layout.reads_patches`; its parameters exist anyway, as
        in the paper's counts and checkpoints.
      parts: the arguments of `Block`.
    """

    def __init__(
        self, *, norm3, scale3, jumbo_mlp, lora, normed_residual: bool, invariant: bool, feeds_patches: bool, **parts
    ):
        super().__init__(**parts)
        self.norm3, self.scale3, self.jumbo_mlp, self.lora = norm3, scale3, jumbo_mlp, lora
        self.normed_residual, self.invariant, self.feeds_patches = normed_residual, invariant, feeds_patches

    def __call__(
        self, x: TokensT, layout: Layout, shared: Any = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> TokensT:
        keys, (attention, mlp) = split(key, 3), self.branches()
        x = attention.added(x, layout, self.dropout, rate, keys[0])
        token, patches = rows(x, 0, layout.prefix), rows(x, layout.prefix)
        if self.feeds_patches or layout.reads_patches:
            patches = mlp.added(patches, layout._replace(prefix=0), self.dropout, rate, keys[1])
        return join(self.feed(token, shared if self.jumbo_mlp is None else self.jumbo_mlp, rate, keys[2]), patches)

    def feed(self, token: Any, mlp: nnx.Module, rate: Rate, key: Key) -> Any:
        """The J rows after the wide MLP."""
        number, group = token.shape[-2], token.group if self.invariant and isinstance(token, Isotypic) else None
        merged = merge(token if group is None else fields.take_invariant(token))
        normed = self.norm3(merged)
        branch = mlp(normed) if self.lora is None else self.lora(mlp, normed)
        base = normed if self.normed_residual else merged
        token = divide(base + branch_path(self.scale3(branch), self.dropout, rate, key), number)
        return token if group is None else fields.invariant_part(token, group)
