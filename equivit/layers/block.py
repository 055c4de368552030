"""The transformer block, written once: dense or isotypic by the parts it is given."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.by_image import by_image
from equivit.symmetry.fields import Isotypic


class Block(nnx.Module):
    """x + scale1(attention(norm1(x))), then x + scale2(mlp(norm2(x))).

    Each branch is dropped out, then kept or dropped whole for each sample (stochastic depth); the two branches draw
    independently.

    Args:
      norm1, attention, norm2, mlp: the parts, all dense or all isotypic of one group.
      scale1, scale2: layer scales, or None.
      drop_path: probability of dropping a branch for a sample.
      dropout: probability of zeroing an entry of a branch.
      drop: `dropout` of the parts' file.
    """

    def __init__(
        self,
        *,
        norm1: nnx.Module,
        attention: nnx.Module,
        scale1: nnx.Module | None,
        norm2: nnx.Module,
        mlp: nnx.Module,
        scale2: nnx.Module | None,
        drop_path: float,
        dropout: float,
        drop: Callable,
    ):
        self.norm1, self.attention, self.scale1 = norm1, attention, scale1
        self.norm2, self.mlp, self.scale2 = norm2, mlp, scale2
        self.drop_path, self.dropout, self.drop = drop_path, dropout, drop

    def __call__(self, x, *, key: jax.Array | None = None):
        keys = (None, None) if key is None else jax.random.split(key)
        apply = self._applied(x, key)
        x = self._add(x, apply(lambda x: self.attention(self.norm1(x)), x), self.scale1, keys[0])
        return self._add(x, apply(lambda x: self.mlp(self.norm2(x)), x), self.scale2, keys[1])

    def attention_weights(self, x, rows: int | None = None) -> jax.Array:
        """The weights of this block's attention, [*B, heads, rows, N], for the tokens that the block is given."""
        return self.attention.weights(self.norm1(x), rows)

    def _applied(self, x, key) -> Callable:
        """`apply(function, x)`: how a branch is run."""
        # A dense block's weights are as large as its activations: reading them again for each image would cost more.
        # In training the backward pass needs every image's activations at once, and nothing is won.
        return by_image if key is None and isinstance(x, Isotypic) else _whole

    def _add(self, x, branch, scale, key, *, drop: Callable | None = None):
        if key is not None:
            dropout_key, path_key = jax.random.split(key)
            branch = (drop or self.drop)(branch, self.dropout, dropout_key)
            branch = drop_path(branch, self.drop_path, path_key)
        branch = branch if scale is None else scale(branch)
        return jax.tree.map(jnp.add, x, branch)


def _whole(function, x):
    return function(x)


def drop_path(x, rate: float, key: jax.Array | None):
    """Keep x for a share 1 - rate of the samples, divided by that share, and zero it for the others.

    One draw per sample serves all tokens, channels and irreps.
    """
    if key is None or not rate:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (*x.shape[:-2], 1, 1))
    return jax.tree.map(lambda leaf: jnp.where(kept, leaf / (1 - rate), 0), x)
