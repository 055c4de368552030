"""Bidirectional attention between a few latent vectors and many tokens, with one matrix of scores.

Source: BiXT (arXiv 2402.12138).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.kernels.attention import attend, reference, side_by_side
from equivit.layers.dense import Linear
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.stochastic_depth import drop_path


class CrossAttention(nnx.Module):
    """Latents and tokens attend to each other, with references r and values v instead of queries, keys and values.

    The columns of both maps are ordered (r | v) x heads x head channels.

    Shapes: latents [*B, L, width] and tokens [*B, N, width] -> the same two; the second is None unless `both`.

    Args:
      both: whether tokens also attend to latents.

    Raises:
      ValueError: `num_heads` does not divide `width`.
    """

    def __init__(self, width: int, num_heads: int, *, both: bool, init: Initializer, rngs: nnx.Rngs):
        errors.divides("CrossAttention: num_heads", num_heads, width, f"{width=}")
        self.latents = Linear(width, (1 + both) * width, init=init, rngs=rngs)
        self.tokens = Linear(width, 2 * width, init=init, rngs=rngs)
        self.proj_latents = Linear(width, width, init=init, rngs=rngs)
        self.proj_tokens: Any = Linear(width, width, init=init, rngs=rngs) if both else None
        self.num_heads = num_heads

    def __call__(self, latents: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        width = tokens.shape[-1]
        r_tokens, v_tokens = self._heads(self.tokens(tokens), width)
        if self.proj_tokens is None:
            (r_latents,) = self._heads(self.latents(latents), width)
            y = attend(r_latents, r_tokens, v_tokens)
            return self.proj_latents(side_by_side(y)), None
        r_latents, v_latents = self._heads(self.latents(latents), width)
        y, z = attend_both(r_latents, r_tokens, v_latents, v_tokens)
        return self.proj_latents(side_by_side(y)), self.proj_tokens(side_by_side(z))

    def _heads(self, x: jax.Array, width: int) -> jax.Array:
        """r, and v if present: [*B, N, parts width] -> [parts, *B, num_heads, N, head channels]."""
        x = x.reshape(*x.shape[:-1], x.shape[-1] // width, self.num_heads, width // self.num_heads)
        return jnp.einsum("...nphd->p...hnd", x)


def attend_both(a: jax.Array, b: jax.Array, v_a: jax.Array, v_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sets of tokens attend to each other with one matrix of scores S = a b^T / sqrt(d) per head.

    The first gets softmax(S) v_b, the second softmax(S^T) v_a.

    Shapes: a and v_a [*B, H, N, d], b and v_b [*B, H, M, d] -> [*B, H, N, d] and [*B, H, M, d].
    """
    with jax.named_scope("attention"):
        logits = reference.logits(a, b)
        return reference.weighted_sum(logits, v_b), reference.weighted_sum(jnp.swapaxes(logits, -1, -2), v_a)


class CrossBlock(nnx.Module):
    """Cross-attention and MLPs as residual branches, with separate norms for latents and tokens.

    Shapes: latents [*B, L, width] and tokens [*B, N, width] -> the same two.

    Args:
      attention: a `CrossAttention`; if it is one-way, the tokens are returned unchanged.
      norm1_latents, norm1_tokens: before the attention.
      norm2_latents, mlp_latents, norm2_tokens, mlp_tokens: after it; None for tokens that do not change.
    """

    def __init__(self, *, norm1_latents, norm1_tokens, attention, norm2_latents, mlp_latents, norm2_tokens, mlp_tokens):
        self.norm1_latents, self.norm1_tokens, self.attention = norm1_latents, norm1_tokens, attention
        self.norm2_latents, self.mlp_latents = norm2_latents, mlp_latents
        self.norm2_tokens, self.mlp_tokens = norm2_tokens, mlp_tokens

    def __call__(
        self, latents: jax.Array, tokens: jax.Array, *, rate: Rate = 0.0, key: Key = None
    ) -> tuple[jax.Array, jax.Array]:
        """Latents and tokens after the block; `rate` and `key` are for stochastic depth per branch."""
        keys = split(key, 4)
        to_latents, to_tokens = self.attention(self.norm1_latents(latents), self.norm1_tokens(tokens))
        latents = latents + drop_path(to_latents, rate, keys[0])
        latents = latents + drop_path(self.mlp_latents(self.norm2_latents(latents)), rate, keys[1])
        if to_tokens is None:
            return latents, tokens
        tokens = tokens + drop_path(to_tokens, rate, keys[2])
        return latents, tokens + drop_path(self.mlp_tokens(self.norm2_tokens(tokens)), rate, keys[3])
