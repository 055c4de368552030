"""Self-attention of a field in plain jnp: the definition."""

import jax
import jax.numpy as jnp

from equivit.kernels.attention import attend
from equivit.kernels.isotypic_linear import Field, Linear, linear


def isotypic_attention(field: Field, qkv: Linear, proj: Linear, heads: int, *, implementation: str = "xla") -> Field:
    """Linear map to queries, keys and values, `attend` with the given implementation, and linear map."""
    q, k, v = head_by_head(linear(field, qkv), heads)
    return linear(irrep_by_irrep(attend(q, k, v, implementation=implementation), len(field)), proj)


def head_by_head(field: Field, heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a field [i, *B, N, 3 H c], channels (q | k | v) x heads x c in each irrep, into q, k and v [*B, H, N, d].

    A head's vector is [A1 | A2 | B1 | B2 | E row 0 | E row 1].
    """
    thirds = zip(*(jnp.split(leaf, 3, axis=-1) for leaf in field), strict=True)
    q, k, v = (jnp.concatenate([_to_heads(leaf, heads) for leaf in third], -1) for third in thirds)
    return q, k, v


def irrep_by_irrep(y: jax.Array, leaves: int) -> Field:
    """Head vectors [*B, H, N, d] to a field, lines [4, *B, N, H c] and planes [2, *B, N, 2 H c], or lines alone."""
    if leaves == 1:
        return (_from_heads(y, 2),)
    lines, planes = jnp.split(y, 2, axis=-1)
    return _from_heads(lines, 4), _from_heads(planes, 2)


def _to_heads(leaf: jax.Array, heads: int) -> jax.Array:
    """[i, *B, N, H c] -> [*B, H, N, i c]."""
    x = leaf.reshape(*leaf.shape[:-1], heads, leaf.shape[-1] // heads)
    return jax.lax.collapse(jnp.einsum("i...nhc->...hnic", x), -2)


def _from_heads(part: jax.Array, irreps: int) -> jax.Array:
    """[*B, H, N, i c] -> [i, *B, N, H c]."""
    x = part.reshape(*part.shape[:-1], irreps, part.shape[-1] // irreps)
    return jax.lax.collapse(jnp.einsum("...hnic->i...nhc", x), -2)
