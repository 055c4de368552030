"""The Jumbo token: J tokens of the common width in attention, one token J times as wide in its own MLP.

Source: Jumbo, Section 3.  The token is kept split, as the first J rows of the sequence; merging it is a reshape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.block import Block
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, join, rows


def merge(x):
    """J rows to one wide row: [*B, J, C] -> [*B, 1, J C], an array or each leaf of a field."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], 1, -1), x)


def split(x, number: int):
    """The inverse of `merge`: [*B, 1, J C] -> [*B, J, C]."""
    return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], number, -1), x)


class LowRank(nnx.Module):
    """x A B with B zero at first (Hu et al. 2022).

    Args:
      linear: makes a linear map without bias, `linear(in_features, out_features)`, dense or isotypic.
    """

    def __init__(self, linear: Callable[[int, int], nnx.Module], in_features: int, out_features: int, rank: int):
        self.down = linear(in_features, rank)
        self.up = jax.tree.map(jnp.zeros_like, linear(rank, out_features))

    def __call__(self, x):
        return self.up(self.down(x))


class MlpLora(nnx.Module):
    """A block's own low-rank map around the whole of the shared MLP: 0.44 M parameters in Jumbo's Table 4."""

    def __init__(self, linear: Callable[[int, int], nnx.Module], width: int, rank: int):
        self.around = LowRank(linear, width, width, rank)

    def __call__(self, mlp: nnx.Module, x):
        return jax.tree.map(jnp.add, mlp(x), self.around(x))


class LinearLora(nnx.Module):
    """A block's own low-rank map beside each of the two linear maps of the shared MLP, as LoRA is usually placed."""

    def __init__(self, linear: Callable[[int, int], nnx.Module], width: int, hidden: int, rank: int, gelu: Callable):
        self.fc1, self.fc2 = LowRank(linear, width, hidden, rank), LowRank(linear, hidden, width, rank)
        self.gelu = gelu

    def __call__(self, mlp: nnx.Module, x):
        x = self.gelu(jax.tree.map(jnp.add, mlp.fc1(x), self.fc1(x)))
        return jax.tree.map(jnp.add, mlp.fc2(x), self.fc2(x))


class JumboBlock(Block):
    """x + scale1(attention(norm1(x))) on all rows; then each kind of token has an MLP.

    The merged Jumbo token u becomes u + scale3(mlp(norm3(u))); patches p become p + scale2(mlp(norm2(p))).

    Shapes: [*B, J + N, width] or a field -> the same.

    Args:
      tokens: J.
      norm3, scale3: parts for the merged token.
      jumbo_mlp: the wide MLP of this block; None: the one that all blocks share, given to the call.
      lora: `MlpLora` or `LinearLora`, this block's additions to the shared MLP; or None.
      jumbo_drop: `dropout` for the merged token.
      normed_residual: u is norm3(u) in the sum too, as in the JAX version of Jumbo's MAE.
      invariant: of a field the Jumbo token keeps the invariant part alone, and `norm3`, `scale3` and the MLP are dense.
      feeds_patches: False leaves the patches as attention left them; their MLP is there all the same, since the
        paper's counts and checkpoints have it.
      parts: those of `Block`.
    """

    def __init__(
        self,
        *,
        tokens: int,
        norm3: nnx.Module,
        scale3: nnx.Module | None,
        jumbo_mlp: nnx.Module | None,
        lora: nnx.Module | None,
        jumbo_drop: Callable,
        normed_residual: bool,
        invariant: bool,
        feeds_patches: bool,
        **parts,
    ):
        super().__init__(**parts)
        self.norm3, self.scale3, self.jumbo_mlp, self.lora = norm3, scale3, jumbo_mlp, lora
        self.tokens, self.jumbo_drop = tokens, jumbo_drop
        self.normed_residual, self.invariant, self.feeds_patches = normed_residual, invariant, feeds_patches

    def __call__(self, x, shared: nnx.Module | None = None, *, key: jax.Array | None = None):
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        apply = self._applied(x, key)
        x = self._add(x, apply(lambda x: self.attention(self.norm1(x)), x), self.scale1, keys[0])
        token, patches = rows(x, 0, self.tokens), rows(x, self.tokens)
        if self.feeds_patches:
            patches = self._add(patches, apply(lambda x: self.mlp(self.norm2(x)), patches), self.scale2, keys[1])
        return join(self._feed(token, shared, keys[2]), patches)

    def _feed(self, token, shared, key):
        """The wide MLP, on the J rows."""
        lift = self.invariant and isinstance(token, Isotypic)
        group = token.group if lift else None
        merged = merge(fields.take_invariant(token) if lift else token)
        normed = self.norm3(merged)
        mlp = shared if self.jumbo_mlp is None else self.jumbo_mlp
        branch = mlp(normed) if self.lora is None else self.lora(mlp, normed)
        base = normed if self.normed_residual else merged
        token = split(self._add(base, branch, self.scale3, key, drop=self.jumbo_drop), self.tokens)
        return fields.invariant_part(token, group) if lift else token
