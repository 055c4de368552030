"""The linear map of a field.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same with F.
Source: octic ViTs, Section 3.2.1.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

Field = tuple[jax.Array, ...]
# Weights like the arrays of a field, lines [i, C, F] and planes [2C, 2F] for both rows; bias [F] or None.
Linear = tuple[Field, jax.Array | None]


# What `remat="dots"` keeps for the backward pass: products of planes.  Those of lines are half the work, and as large.
_kept = functools.partial(checkpoint_name, name="product")


def linear(field: Field, map: Linear) -> Field:
    """The linear map, with weights for each array of the field, or for each of its rows."""
    weights, bias = map
    with jax.named_scope("linear"):
        lines, *planes = zip(field, weights, strict=True)
        return affine(*lines, bias), *(_kept(affine(x, w)) if w.ndim == 2 else affine(x, w) for x, w in planes)


def affine(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W as `product`, with the bias [D] added to the first row."""
    y = product(x, weight)
    return y if bias is None else add_to_first(y, bias)


@jax.custom_jvp
def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x W, with one matrix [C, D] for [*B, N, C], or one for each row of it, [i, C, D] for [i, *B, N, C].

    The gradient of a weight is a sum over images and tokens.  On a CPU these are one axis for it: otherwise XLA makes
    them one by turning the arrays.  On a TPU it is joining the axes that copies.
    """
    return _product(x, weight)


@functools.partial(product.defjvp, symbolic_zeros=True)
def _(primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(_product(dx, weight))
    if not isinstance(dweight, SymbolicZero):
        terms.append(_by_weight(x, dweight))
    return product(x, weight), functools.reduce(jnp.add, terms)


# The backward pass begins from x: otherwise what either platform needs is kept for it, and on the others zeros.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _by_weight(x, weight):
    return jax.lax.platform_dependent(x, weight, cpu=_joined, default=_product)


def _joined(x, weight):
    y = _product(jax.lax.collapse(x, weight.ndim - 2, -1), weight)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def _product(x, weight):
    return jnp.matmul(x, weight) if weight.ndim == 2 else jnp.einsum("i...c,icd->i...d", x, weight)


@jax.custom_jvp
def add_to_first(lines: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a bias [F] to the invariant component of lines, in their dtype.

    The gradient of the bias is summed in the bias's own dtype, which may be wider.
    """
    first = np.zeros((len(lines), *(1,) * (lines.ndim - 1)), bias.dtype)
    first[0] = 1  # one broadcast sum: an indexed update would copy the field
    return lines + (first * bias).astype(lines.dtype)


@add_to_first.defjvp
def _(primals, tangents):
    # Padded, so that the gradient of the bias is a sum over the first component alone.
    lines, bias = tangents
    over_tokens = jnp.broadcast_to(bias, lines[:1].shape).astype(lines.dtype)
    return add_to_first(*primals), lines + jnp.pad(over_tokens, [(0, len(lines) - 1), *[(0, 0)] * (lines.ndim - 1)])
