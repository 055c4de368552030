"""The transformer block, dense or equivariant depending on the parts it is given."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from equivit.layers import isotypic
from equivit.layers.dropout import dropout, split
from equivit.layers.grid import Layout
from equivit.layers.stochastic_depth import drop_path, on_subset, subset
from equivit.symmetry.fields import Tokens, TokensT


class Subsets(NamedTuple):
    """Stochastic depth by subsets (`layers/stochastic_depth.py`).

    Attributes:
      rate: the share of images that a branch leaves out.
      groups: runs of consecutive images, in each of which as many are left out.
    """

    rate: float
    groups: int


class Block(nnx.Module):
    """x + path(scale1(attention(norm1(x)))), then x + path(scale2(mlp(norm2(x)))).

    `path` is dropout, then stochastic depth, which keeps or drops a whole branch per sample, independently for the two
    branches.  With `subsets` a branch is computed only for the samples that keep it.  Without a key nothing stands
    between the parts, and a branch of an octic block is one operation (`kernels/octic_branch.py`).

    Shapes: [*B, N, width] or a field -> the same.

    Args:
      norm1, attention, scale1, norm2, mlp, scale2: the parts, all dense or all equivariant under one group
        (`layers/parts.py` builds them).
      dropout: probability of zeroing an entry of a branch.
      subsets: in place of the rate of a call; x then has one batch axis.
    """

    def __init__(
        self, *, norm1, attention, scale1, norm2, mlp, scale2, dropout: float = 0.0, subsets: Subsets | None = None
    ):
        self.norm1, self.attention, self.scale1 = norm1, attention, scale1
        self.norm2, self.mlp, self.scale2 = norm2, mlp, scale2
        self.dropout, self.subsets = dropout, subsets

    def __call__(
        self,
        x: TokensT,
        layout: Layout | None = None,
        *,
        rate: float | jax.Array = 0.0,
        phase: int = 0,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> TokensT:
        """The tokens after the block.

        Args:
          layout: the token layout, for parts that need it.
          rate: probability of dropping a branch for a sample.
          phase, train: for blocks that alternate or have batch statistics; unused here.
          key: for dropout and stochastic depth; None: neither.
        """
        keys = split(key)
        y: Any = x  # a field just where the parts are isotypic, which types cannot express
        if key is None and type(self.attention) is isotypic.Attention:
            y = self.attention.residual(y, self.norm1, self.scale1)
        else:
            y = self.residual(lambda x: self.scale1(self.attention(self.norm1(x), layout)), y, rate, keys[0])
        if key is None and isinstance(self.mlp, isotypic.Mlp):
            return self.mlp.residual(y, self.norm2, self.scale2)
        return self.residual(lambda x: self.scale2(self.mlp(self.norm2(x), layout)), y, rate, keys[1])

    def residual(self, branch: Callable[[Any], Any], x: Any, rate: float | jax.Array, key: jax.Array | None) -> Any:
        """x + path(branch(x)), or that of a part of the images."""
        if self.subsets is None or key is None:
            return x + self.path(branch(x), rate, key)
        dropout_key, path_key = jax.random.split(key)
        kept = subset(path_key, x.shape[-3], *self.subsets)
        return on_subset(lambda x: dropout(branch(x), self.dropout, dropout_key), x, kept)

    def path(self, branch: TokensT, rate: float | jax.Array, key: jax.Array | None) -> TokensT:
        """A branch after dropout and stochastic depth."""
        dropout_key, path_key = split(key)
        return drop_path(dropout(branch, self.dropout, dropout_key), rate, path_key)

    def attention_weights(self, x: Tokens, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """The attention weights [*B, heads, rows, N] of the block for its input tokens x; `rows` as in `Attention`."""
        return self.attention.weights(self.norm1(x), rows, layout)
