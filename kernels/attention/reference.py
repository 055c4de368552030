"""Softmax attention in plain jnp: the definition.

Shapes: q [*B, H, N, d], k [*B, H, M, d] and v [*B, H, M, e] -> [*B, H, N, e].
"""

import math

import jax
import jax.numpy as jnp

from equivit.kernels.product import Map, einsum, linear, named_product


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, scale: float | None = None
) -> jax.Array:
    """softmax(scale q k^T + bias) v for each head."""
    x = logits(q, k, scale)
    return weighted_sum(x if bias is None else x + bias, v)


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """`attend` for heads side by side: [*B, N, 3 H d] -> [*B, N, H d]."""
    return side_by_side(attend(*split_heads(qkv, heads)))


def self_attention(heads: int, x: jax.Array, qkv: Map, proj: Map) -> jax.Array:
    """`attention` between two linear maps: [*B, N, C] -> [*B, N, D]."""
    return linear(attention(linear(x, *qkv), heads), *proj)


def split_heads(qkv: jax.Array, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[*B, N, 3 H d] to q, k and v, each [*B, H, N, d].

    Split, then transposed: the gradient of a split is one concatenation; that of indexing is a sum of padded arrays.
    """
    shape = (*qkv.shape[:-1], heads, qkv.shape[-1] // (3 * heads))
    q, k, v = (jnp.swapaxes(part.reshape(shape), -2, -3) for part in jnp.split(qkv, 3, axis=-1))
    return q, k, v


def head_by_head(x: jax.Array, heads: int) -> jax.Array:
    """[*B, N, width] -> [*B, heads, N, head channels]."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), -2, -3)


def side_by_side(x: jax.Array) -> jax.Array:
    """[*B, heads, N, head channels] -> [*B, N, width]."""
    return jax.lax.collapse(jnp.swapaxes(x, -2, -3), -2)


def logits(q: jax.Array, k: jax.Array, scale: float | None = None) -> jax.Array:
    """scale q k^T in at least float32, [*B, H, N, M]; a scale of None is 1 / sqrt(d)."""
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    x = einsum("...nd,...md->...nm", q, k)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def weighted_sum(logits: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(logits) v, in the dtype of v."""
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1, keepdims=True)
    if v.dtype == jnp.float16:  # whose range undivided sums over many tokens would leave
        weights, total = weights / total, None
    # Dividing the result, not the weights, saves a pass over N x M entries.
    y = named_product(einsum("...nm,...md->...nd", weights.astype(v.dtype), v))
    return y if total is None else (y / total).astype(v.dtype)
