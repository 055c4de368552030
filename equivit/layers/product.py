"""Products of arrays, and their gradients, in the form that is fast on each platform.

The gradient of a weight, x^T dy, is a sum over images and tokens.  XLA turns a product that sums over two axes into one
that sums over a single axis by moving the others, and on a CPU this copies x and dy.  Summed over one axis, which
images and tokens together are, nothing moves.  On a TPU it is joining these axes that copies, where the number of
tokens is no multiple of 8.  In bfloat16 nothing is joined, and a CPU has products of its own (`bilinear`).
"""

import functools
import string

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from equivit.layers import bilinear

# What `remat="dots"` keeps: its policy sees no products within derivatives of our own, and none with a batch axis, such
# as those of attention, of which the weighted sums of values are small.
kept = functools.partial(checkpoint_name, name="product")

SCORES = "...nd,...md->...nm"
WEIGHTED = "...nm,...md->...nd"


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W.  Shapes: [*B, N, C], [C, D] -> [*B, N, D]."""
    in_bfloat16 = x.dtype == weight.dtype == jnp.bfloat16
    return kept(einsum("...c,cd->...d", x, weight) if in_bfloat16 else _matmul(x, weight))


def einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """jnp.einsum of two arrays, whose gradients are products of this kind; in bfloat16 by the rules of each platform.

    An axis that is summed over is one of both; "..." stands for the first axes of x, of which y has the last or none.
    """
    (of_x, of_y), result = axes.split("->")[0].split(","), axes.split("->")[1]
    first, ahead = (a.ndim - len(of.replace("...", "")) for a, of in ((x, of_x), (y, of_y)))
    named = string.ascii_uppercase[:first]
    of_x, of_y = of_x.replace("...", named), of_y.replace("...", named[first - ahead :])
    product = _in_bfloat16 if x.dtype == y.dtype == jnp.bfloat16 else bilinear.einsum
    return product(f"{of_x},{of_y}->{result.replace('...', named)}", x, y)


def scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Inner products of queries and keys.  Shapes: [*B, N, D], [*B, M, D] -> [*B, N, M]."""
    return _of_attention(SCORES, queries, keys)


def weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sums of values, by weights.  Shapes: [*B, N, M], [*B, M, D] -> [*B, N, D]."""
    return _of_attention(WEIGHTED, weights, values)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_attention(axes, x, y):
    # Converters to other formats know jnp's.
    return (einsum if x.dtype == y.dtype == jnp.bfloat16 else jnp.einsum)(axes, x, y)


@_of_attention.defjvp
def _(axes, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return einsum(axes, x, y), einsum(axes, dx, y) + einsum(axes, x, dy)


# Jitted here: outside of jit, a choice by platform would be recompiled at every call.
@functools.partial(jax.jit, static_argnums=0, inline=True)
@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)  # as below
def _in_bfloat16(axes, x, y):
    cpu, default = (functools.partial(form, axes) for form in (bilinear.einsum, jnp.einsum))
    return jax.lax.platform_dependent(x, y, cpu=cpu, default=default)


@jax.custom_jvp
def _matmul(x, weight):
    return jnp.matmul(x, weight)


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
    y = bilinear.einsum("nc,cd->nd", jax.lax.collapse(x, 0, -1), weight)
    return y.reshape(*x.shape[:-1], weight.shape[-1])
