"""Attention whose heads share keys and values: Mobile MQA of MobileNetV4 (arXiv 2404.10518)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.attention import attend
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import NormedConv
from equivit.models.mobilenetv4.inverted_bottleneck import ResidualBlock

XAVIER = nnx.initializers.xavier_uniform()


class MultiQueryAttention(nnx.Module):
    """Attention over a map with queries per head and one set of keys and values; no biases, no positions.

    With a stride, keys and values come from separate depthwise 3x3 convolutions with batch norm.

    Shapes: [*B, h, w, width] -> the same.

    Args:
      head_channels: channels of a query, key or value.
      kv_stride: stride of the convolutions for keys and values, along both axes; 1: no convolutions.
      statistics_groups: `groups` of their batch norms.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        head_channels: int,
        kv_stride: int = 1,
        statistics_groups: int = 1,
        rngs: nnx.Rngs,
    ):
        linear: dict[str, Any] = dict(bias=False, init=XAVIER, rngs=rngs)
        stride, groups = (kv_stride, kv_stride), statistics_groups
        down: dict[str, Any] = dict(kernel=(3, 3), stride=stride, groups=width, statistics_groups=groups, init=XAVIER)
        self.query = dense.Linear(width, num_heads * head_channels, **linear)
        self.key_conv: Any = None if kv_stride == 1 else NormedConv(width, width, **down, rngs=rngs)
        self.key = dense.Linear(width, head_channels, **linear)
        self.value_conv: Any = None if kv_stride == 1 else NormedConv(width, width, **down, rngs=rngs)
        self.value = dense.Linear(width, head_channels, **linear)
        self.output = dense.Linear(num_heads * head_channels, width, **linear)
        self.head_channels = head_channels

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        q = self.query(x)
        k = self.key(x if self.key_conv is None else self.key_conv(x, train=train))
        v = self.value(x if self.value_conv is None else self.value_conv(x, train=train))
        y = attend(*(self._one_head(part) for part in (q, k, v)))
        return self.output(y.reshape(q.shape))

    def _one_head(self, x: jax.Array) -> jax.Array:
        """[*B, h, w, heads channels] -> [*B, 1, h w heads, channels].

        The heads differ in their queries only, so they form one head with more tokens, without a transpose.
        """
        *batch, h, w, width = x.shape
        return x.reshape(*batch, 1, h * w * width // self.head_channels, self.head_channels)


class MobileAttention(ResidualBlock):
    """x + path(scale(attention(norm(x)))), with a batch norm.

    Shapes: [*B, h, w, width] -> the same.

    Args:
      layer_scale: initial layer scale; None for none.
      statistics_groups: `groups` of the batch norms.
      options: of `MultiQueryAttention`.
    """

    def __init__(self, width: int, *, layer_scale: float | None = None, statistics_groups: int = 1, **options: Any):
        self.norm: Any = BatchNorm(width, groups=statistics_groups)
        self.attention = MultiQueryAttention(width, statistics_groups=statistics_groups, **options)
        self.scale: Any = None if layer_scale is None else dense.LayerScale(width, layer_scale)

    def branch(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = self.attention(x if self.norm is None else self.norm(x, train=train), train=train)
        return y if self.scale is None else self.scale(y)

    def folded(self) -> "MobileAttention":
        """The same map for inference: the norm is folded into queries, keys and values.

        If keys and values have a stride, the norm stays: their convolutions zero-pad its output, which no bias can
        reproduce.
        """
        block = nnx.clone(self)
        if block.norm is None or block.attention.key_conv is not None:
            return block
        factor, shift = block.norm.affine()
        for linear in (block.attention.query, block.attention.key, block.attention.value):
            weight = linear.weight[...]
            # A float32 sum: accelerators round the factors of matrix products.
            linear.bias = nnx.data(nnx.Param(jnp.sum(shift[:, None] * weight, 0)))
            linear.weight.set_value((factor[:, None] * weight).astype(weight.dtype))
        block.norm = None
        return block
