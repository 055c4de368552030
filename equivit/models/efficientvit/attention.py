"""Attention of linear cost: the token mixer of EfficientViT (arXiv 2205.14756).

With ReLU instead of softmax, (relu(q) relu(k)^T) v = relu(q) (relu(k)^T v).  The product of keys and values is a d x d
matrix per head, for any number of positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.layers.convolution import Conv, DepthwiseConv, NormedConv

EPS = 1e-5


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """relu(q) relu(k)^T v per head, divided by the sum of the weights relu(q) relu(k)^T plus 1e-5.

    Computed in at least float32, including products: sums over positions overflow in float16 and lose digits in
    bfloat16.

    Shapes: [*B, N, H, d] each -> the same.
    """
    with jax.named_scope("attention"):
        q, k, v = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v))
        q, k = jax.nn.relu(q), jax.nn.relu(k)
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, 1)], constant_values=1)  # a column for the sum of weights
        products = jnp.einsum("...nhd,...nhe->...hde", k, v, precision="highest")
        y = jnp.einsum("...nhd,...hde->...nhe", q, products, precision="highest")
        return y[..., :-1] / (y[..., -1:] + EPS)


class LinearAttention(nnx.Module):
    """Linear attention over a map at several scales ("LiteMLA").

    Each head attends with its queries, keys and values, and again with them after each of several convolutions.  The
    channels of `qkv` are ordered heads x (q | k | v) x head channels.

    Shapes: [*B, h, w, width] -> the same.

    Args:
      head_channels: channels per head.
      scales: kernel sizes of the convolutions, odd.
      statistics_groups: `groups` of the batch norm.

    Raises:
      ValueError: `head_channels` does not divide `width`.
    """

    def __init__(
        self,
        width: int,
        *,
        head_channels: int = 16,
        scales: tuple[int, ...] = (5,),
        statistics_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        errors.divides("LinearAttention: head_channels", head_channels, width, f"{width=}")
        parts = 3 * width // head_channels
        one: dict[str, Any] = dict(kernel=(1, 1), bias=False, rngs=rngs)
        self.qkv = Conv(width, 3 * width, **one)
        self.depthwise = nnx.List(
            [DepthwiseConv(3 * width, kernel=(k, k), padding=(k // 2, k // 2), rngs=rngs) for k in scales]
        )
        # Each mixes the channels of q, k or v of one head.
        self.pointwise = nnx.List([Conv(3 * width, 3 * width, groups=parts, **one) for _ in scales])
        self.proj = NormedConv(
            width * (1 + len(scales)), width, kernel=(1, 1), statistics_groups=statistics_groups, rngs=rngs
        )
        self.head_channels = head_channels

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        qkv = self.qkv(x)
        gathered = [inner(outer(qkv)) for outer, inner in zip(self.depthwise, self.pointwise, strict=True)]
        qkv = jnp.concatenate([qkv, *gathered], axis=-1)
        number, each = x.shape[-3] * x.shape[-2], 3 * self.head_channels
        heads = qkv.reshape(*x.shape[:-3], number, qkv.shape[-1] // each, each)
        y = linear_attention(*jnp.split(heads, 3, axis=-1))
        return self.proj(y.reshape(*x.shape[:-1], qkv.shape[-1] // 3), train=train)
