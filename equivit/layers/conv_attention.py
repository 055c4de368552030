"""Attention whose queries, keys and values are convolved first: the parts of CvT (arXiv 2103.15808, Section 3)."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense
from equivit.layers.attention import attend
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import Conv, DepthwiseConv, Pair
from equivit.layers.drop import drop_path, dropout, split
from equivit.layers.grid import Layout


class ConvEmbed(nnx.Module):
    """A convolution whose windows overlap, then a layer norm: the beginning of a stage (CvT, Section 3.1).

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride, padding, mode: of the convolution.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        mode: str,
        eps: float,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(in_channels, width, kernel=kernel, stride=stride, padding=padding, mode=mode, rngs=rngs)
        self.norm = dense.LayerNorm(width, eps=eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class ConvNorm(nnx.Module):
    """A depthwise 3 x 3 convolution, then batch norm.  Shapes: [*B, H, W, width] -> [*B, h, w, width]."""

    def __init__(self, width: int, *, stride: Pair, mode: str, rngs: nnx.Rngs):
        self.conv = DepthwiseConv(width, kernel=(3, 3), stride=stride, padding=(1, 1), mode=mode, rngs=rngs)
        self.norm = BatchNorm(width)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return self.norm(self.conv(x), train=train)


class ConvAttention(nnx.Module):
    """Attention of a map; queries, keys and values are linear maps of what three convolutions make of it (Eq. 2).

    Tokens before the map, such as the class token, are not convolved.

    Shapes: [*B, prefix + h w, width] -> the same.

    Args:
      stride: of the convolutions for keys and values; (2, 2) leaves a quarter of them.
      mode: of the convolutions' padding.

    Raises:
      ValueError: `num_heads` does not divide `width`.
    """

    def __init__(self, width: int, num_heads: int, *, stride: Pair, mode: str, rngs: nnx.Rngs):
        if width % num_heads:
            raise ValueError(f"ConvAttention: {num_heads=} must divide {width=}.")
        self.conv_q = ConvNorm(width, stride=(1, 1), mode=mode, rngs=rngs)
        self.conv_k, self.conv_v = (ConvNorm(width, stride=stride, mode=mode, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.proj = (dense.Linear(width, width, rngs=rngs) for _ in range(4))
        self.num_heads = num_heads

    def __call__(self, x: jax.Array, layout: Layout, *, train: bool = False) -> jax.Array:
        prefix, tokens = x[..., : layout.prefix, :], x[..., layout.prefix :, :]
        grid = tokens.reshape(*x.shape[:-2], *layout.grid, x.shape[-1])
        queries = self.conv_q(grid, train=train)
        keys, values = self.keys_and_values(grid, train=train)
        q, k, v = (
            self._heads(linear(_tokens(prefix, y)))
            for linear, y in ((self.q, queries), (self.k, keys), (self.v, values))
        )
        with jax.named_scope("attention"):
            # The official code divides the products by the root of the full width, not of a head's; its weights were
            # trained so.  `attend` divides by that of a head's.
            q = q * self.num_heads**-0.5
        (y,) = attend((q,), (k,), (v,))
        return self.proj(dense.Attention.side_by_side(y))

    def keys_and_values(self, x: jax.Array, *, train: bool) -> tuple[jax.Array, jax.Array]:
        """The maps of keys and of values, [*B, h, w, width] each, before their linear maps; they must share a grid."""
        return self.conv_k(x, train=train), self.conv_v(x, train=train)

    def _heads(self, x: jax.Array) -> jax.Array:
        """[*B, N, width] -> [*B, num_heads, N, head channels]."""
        return jnp.einsum("...nhd->...hnd", x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads))


class ConvBlock(nnx.Module):
    """x + path(attention(norm1(x))), then x + path(mlp(norm2(x))).

    `path` is dropout, then stochastic depth.

    Shapes: [*B, prefix + h w, width] -> the same.

    Args:
      norm1, attention, norm2, mlp: the parts.
      dropout: probability of zeroing an entry of a branch.
    """

    def __init__(self, *, norm1, attention: ConvAttention, norm2, mlp, dropout: float = 0.0):
        self.norm1, self.attention = norm1, attention
        self.norm2, self.mlp = norm2, mlp
        self.dropout = dropout

    def __call__(
        self,
        x: jax.Array,
        layout: Layout,
        *,
        rate: float | jax.Array = 0.0,
        phase: int = 0,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The tokens after the block.

        Args:
          rate: probability of dropping a branch for a sample.
          phase: unused; all blocks are alike.
          train: whether batch norms use and record the statistics of this batch.
          key: for dropout and stochastic depth; None: neither.
        """
        keys = split(key)
        x = x + self._path(self.attention(self.norm1(x), layout, train=train), rate, keys[0])
        return x + self._path(self.mlp(self.norm2(x)), rate, keys[1])

    def _path(self, branch: jax.Array, rate: float | jax.Array, key: jax.Array | None) -> jax.Array:
        dropout_key, path_key = split(key)
        return drop_path(dropout(branch, self.dropout, dropout_key), rate, path_key)


def _tokens(prefix: jax.Array, grid: jax.Array) -> jax.Array:
    """The tokens of a map after those of the prefix: [*B, prefix, C] and [*B, h, w, C] -> [*B, prefix + h w, C]."""
    return jnp.concatenate([prefix.astype(grid.dtype), jax.lax.collapse(grid, grid.ndim - 3, grid.ndim - 1)], axis=-2)
