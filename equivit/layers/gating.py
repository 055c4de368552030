"""Gates that are learned: the relaxed choice of a subset, and attention that is partly convolution.

Source: Differentiable Subset Pruning (Li et al. 2021), after Xie and Ermon (2019); depthwise attention, Eq. 17 and 18.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.layers import dense
from equivit.layers.depthwise import replace_attention
from equivit.layers.depthwise_conv import depthwise_conv, filled_grid
from equivit.layers.grid import Layout
from equivit.layers.replaced import BY_HEAD
from kernels.attention import attend, side_by_side


def relaxed_top_k(weights: jax.Array, number: int, temperature: float | jax.Array, uniform: jax.Array) -> jax.Array:
    """Gates that add up to `number`; as the temperature goes to 0, 1 for a random subset and 0 for the others.

    The sum of `number` relaxed draws without replacement: softmax(r / temperature), where r are the weights with Gumbel
    noise, and after each draw with log(1 - what was drawn).

    Shapes: weights [n], uniform [n] in (0, 1) -> [n].
    """
    tiny = jnp.finfo(weights.dtype).tiny

    def draw(scores, _):
        logs = jax.nn.log_softmax(scores / temperature)
        rest = jnp.maximum(-jnp.expm1(logs), tiny)  # 1 - p, exact where p is near 0
        return scores + jnp.log(rest), jnp.exp(logs)

    noise = -jnp.log(-jnp.log(jnp.clip(uniform, tiny)))
    return jax.lax.scan(draw, weights + noise, length=number)[1].sum(0)


def temperature(step: int | jax.Array, start: float, end: float, steps: int) -> jax.Array:
    """Geometric from `start` to `end` over `steps`, then `end`."""
    return start * (end / start) ** jnp.minimum(step / steps, 1.0)


def hard_top_k(weights: jax.Array, number: int) -> jax.Array:
    """1 for the `number` largest weights [n], of equal ones the first, and 0 for the others."""
    return jnp.zeros_like(weights).at[jax.lax.top_k(weights, number)[1]].set(1)


class Gate(nnx.Variable):
    """The share of the convolution in each head, [H], which every step computes again (`objectives/gated.py`)."""


class GatedAttention(dense.Attention):
    """(1 - g) attention + g convolution for each head, with the values and the projection of both in common (Eq. 18).

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      attention: whose parameters are inherited.
      kind: of the convolution, "dw" or "conv" (`layers/depthwise.py`).
      kernel_size: k, odd.
      rngs: draws the taps.

    Raises:
      ValueError: as `replace_attention`, or another kind.
    """

    def __init__(self, attention: dense.Attention, kind: str, *, kernel_size: int = 3, rngs: nnx.Rngs):
        errors.one_of("GatedAttention: kind", kind, BY_HEAD)
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads
        self.taps = replace_attention(attention, kind, kernel_size=kernel_size, rngs=rngs).taps
        self.gate, self.kind = Gate(jnp.zeros(attention.num_heads)), kind

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        q, k, v = self.heads(x)
        attended = attend(q, k, v)
        taps, channels, values = self.taps[...], v.shape[-1], side_by_side(v)
        taps = jnp.repeat(jnp.moveaxis(taps, 0, -1), channels, axis=-1) if self.kind == "conv" else taps
        gate = jnp.repeat(self.gate[...], channels).astype(values.dtype)
        convolved = depthwise_conv(values, taps, filled_grid(layout, x.shape[-2], "GatedAttention"))
        return self.proj((1 - gate) * side_by_side(attended) + gate * convolved)
