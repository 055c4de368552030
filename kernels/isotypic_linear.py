"""The linear map of a field.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same with F.
Source: octic ViTs, Section 3.2.1.
"""

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.product import LINEAR, bilinear, named_product

Field = tuple[jax.Array, ...]
# Weights like the arrays of a field, lines [i, C, F] and planes [2C, 2F] for both rows; bias [F] or None.
Linear = tuple[Field, jax.Array | None]


def linear(field: Field, map: Linear) -> Field:
    """x W + b: one matrix [C, F] for all rows of an array, or one per row [i, C, F]; b is added to the first row."""
    (weights, bias) = map
    with jax.named_scope("linear"):
        first, *others = (named_product(_product(x, w)) for x, w in zip(field, weights, strict=True))
        return first if bias is None else add_to_first(first, bias), *others


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return bilinear(LINEAR if weight.ndim == 2 else "i...c,icd->i...d", x, weight)


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
