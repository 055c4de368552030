"""The transformer block, written once: dense or between fields by the parts it is given."""

import jax
from flax import nnx

from equivit.layers.drop import drop_path, dropout, split
from equivit.layers.grid import Layout


class Block(nnx.Module):
    """x + path(scale1(attention(norm1(x)))), then x + path(scale2(mlp(norm2(x)))).

    `path` is dropout, then stochastic depth: a branch is kept or dropped whole for each sample.  The two branches draw
    independently.

    Shapes: [*B, N, width] or a field -> the same.

    Args:
      norm1, attention, scale1, norm2, mlp, scale2: the parts, all dense or all between fields of one group
        (`layers/parts.py` makes them).
      dropout: probability of zeroing an entry of a branch.
    """

    def __init__(self, *, norm1, attention, scale1, norm2, mlp, scale2, dropout: float = 0.0):
        self.norm1, self.attention, self.scale1 = norm1, attention, scale1
        self.norm2, self.mlp, self.scale2 = norm2, mlp, scale2
        self.dropout = dropout

    def __call__(
        self,
        x,
        layout: Layout | None = None,
        *,
        rate: float | jax.Array = 0.0,
        phase: int = 0,
        train: bool = False,
        key: jax.Array | None = None,
    ):
        """The tokens after the block.

        Args:
          layout: where the tokens lie, for parts that need to know.
          rate: probability of dropping a branch for a sample.
          phase, train: for blocks that alternate, or have batch statistics; this one does and has not.
          key: drives what is random; None: nothing is.
        """
        keys = split(key)
        x = x + self.path(self.scale1(self.attention(self.norm1(x), layout)), rate, keys[0])
        return x + self.path(self.scale2(self.mlp(self.norm2(x), layout)), rate, keys[1])

    def path(self, branch, rate, key):
        """A branch on its way to the sum: dropout, then stochastic depth."""
        dropout_key, path_key = split(key)
        return drop_path(dropout(branch, self.dropout, dropout_key), rate, path_key)

    def attention_weights(self, x, rows: int | None = None) -> jax.Array:
        """The weights of this block's attention, [*B, heads, rows, N], for the tokens that the block is given."""
        return self.attention.weights(self.norm1(x), rows)
