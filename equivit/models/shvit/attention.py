"""Single-head attention on some of the channels: the token mixer of SHViT (arXiv 2401.16456)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.attention import attend
from equivit.layers import dense
from equivit.layers.convolution import NormedConv


class GroupNorm(nnx.Module):
    """Normalises each map to mean 0 and variance 1 over positions and channels; then applies scale and bias.

    It is group norm with a single group; a layer norm would use statistics per position.

    Shapes: [*B, h, w, C] -> the same.
    """

    def __init__(self, width: int, *, eps: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(width), norm=True)
        self.bias = nnx.Param(jnp.zeros(width), norm=True)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            y = y - y.mean((-3, -2, -1), keepdims=True)
            y = y * jax.lax.rsqrt(jnp.square(y).mean((-3, -2, -1), keepdims=True) + self.eps)
            return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class SingleHeadAttention(nnx.Module):
    """Single-head attention on the first `partial` channels; then ReLU and a linear map of all channels.

    The other channels bypass norm and attention.  The channels of `qkv` are ordered q, k, v.

    Shapes: [*B, h, w, width] -> the same.

    Args:
      partial: number of channels that attend, also the channels of the values.
      qk_width: channels of queries and of keys.
      statistics_groups: `groups` of the batch norms.
    """

    def __init__(self, width: int, partial: int, *, qk_width: int = 16, statistics_groups: int = 1, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(kernel=(1, 1), statistics_groups=statistics_groups, rngs=rngs)
        self.norm = GroupNorm(partial)
        self.qkv = NormedConv(partial, 2 * qk_width + partial, **options)
        self.proj = NormedConv(width, width, scale=0.0, **options)
        self.partial, self.qk_width = partial, qk_width

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        first, rest = x[..., : self.partial], x[..., self.partial :]
        qkv = self.qkv(self.norm(first), train=train)
        # Attention products have the dtype of linear maps, as everywhere.
        tokens = jax.lax.collapse(qkv.astype(self.qkv.conv.kernel[...].dtype), x.ndim - 3, x.ndim - 1)
        q, k, v = jnp.split(tokens[..., None, :, :], (self.qk_width, 2 * self.qk_width), axis=-1)
        y = attend(q, k, v)
        y = jnp.concatenate([y.reshape(first.shape).astype(x.dtype), rest], axis=-1)
        return self.proj(dense.relu(y), train=train)
