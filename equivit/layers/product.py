"""Products of tokens and a weight, with the gradient of the weight in the form that is fast on each platform.

That gradient, x^T dy, is a sum over images and tokens.  XLA turns a product that sums over two axes into one that sums
over a single axis by moving the others, and on a CPU this copies x and dy.  Summed over one axis, which images and
tokens together are, nothing moves.  On a TPU it is joining these axes that copies, where the number of tokens is no
multiple of 8.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

# What `remat="dots"` keeps: its policy sees no products within derivatives of our own, and none with a batch axis, such
# as those of attention, of which the weighted sums of values are small.
kept = functools.partial(checkpoint_name, name="product")


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W.  Shapes: [*B, N, C], [C, D] -> [*B, N, D]."""
    return kept(_matmul(x, weight))


@jax.custom_jvp
def _matmul(x, weight):
    if x.dtype == weight.dtype == jnp.bfloat16:
        return _in_bfloat16(x, weight)
    return jnp.matmul(x, weight)


# Jitted here: outside of jit, a choice by platform would be compiled anew at every call.
@functools.partial(jax.jit, inline=True)
def _in_bfloat16(x, weight):
    return jax.lax.platform_dependent(x, weight, cpu=_rounded, default=jnp.matmul)


def _rounded(x, weight):
    """x W by way of float32: XLA:CPU has fast products of bfloat16 for results in float32 alone."""
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


@functools.partial(_matmul.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(jnp.matmul(dx, weight))
    if not isinstance(dweight, SymbolicZero):
        terms.append(_by_weight(x, dweight))
    return _matmul(x, weight), functools.reduce(jnp.add, terms)


# The backward pass begins from x: otherwise what either platform needs is kept for it, and on the others zeros.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _by_weight(x, weight):
    return jax.lax.platform_dependent(x, weight, cpu=_joined, default=jnp.matmul)


def _joined(x, weight):
    """x W with one axis for images and tokens."""
    y = jnp.matmul(jax.lax.collapse(x, 0, -1), weight)
    return y.reshape(*x.shape[:-1], weight.shape[-1])
