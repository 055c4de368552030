"""Layer norm of a field: centre each irrep, divide by a common standard deviation, scale, and add a bias.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.
"""

import functools

import jax
from jax.typing import DTypeLike

from equivit.derivatives import linear
from equivit.kernels import dispatch
from equivit.kernels.dispatch import stored
from equivit.kernels.isotypic_linear import Field
from equivit.kernels.norm import reference
from equivit.kernels.norm.reference import Norm

__all__ = ["Norm", "fork", "normalise", "standardise"]


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """Normalise a field.

    Args:
      field: lines and planes, or lines alone.
      scales: for lines [i, C], for planes [2C].
      bias: [C], added to the first line.
      norm: the constants.
    """
    return _normalised(norm, field, scales, bias)


# Recomputed in the backward pass: the residuals would be four times as large as a field in bfloat16.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _normalised(norm, field, scales, bias):
    with jax.named_scope("norm"):
        return _cast(reference.scaled(_standardised(norm, field), scales, bias), field)


def standardise(field: Field, norm: Norm) -> Field:
    """Normalise a field without scale and bias."""
    with jax.named_scope("norm"):
        return _cast(_standardised(norm, field), field)


def fork(field: Field, norm: Norm, dtype: DTypeLike) -> tuple[Field, Field]:
    """A field, and the field standardised in a dtype: what a residual sum x + f(standardise(x)) reads of x.

    `kernels.using("gpu")` selects a kernel for each direction on a Hopper GPU: the backward one adds both gradients.
    """
    if dispatch.AUTO.get() == "gpu" and dispatch.hopper():
        from equivit.kernels.norm import gpu  # deferred: other platforms need no Mosaic

        if gpu.supported(field, dtype):
            return gpu.fork(field, norm, dtype)
    return field, tuple(a.astype(dtype) for a in standardise(field, norm))


def _cast(result, field):
    return tuple(y.astype(a.dtype) for y, a in zip(result, field, strict=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _standardised(norm, field):
    return _with_inverse(norm, field)[0]


def _with_inverse(norm, field):
    """The standardised field and 1 / sigma, which on a GPU one pass finds: otherwise two would each read all."""
    parts = reference.centred(field)
    inverse = _once(reference.inverse_deviation(parts, norm), field)
    return tuple(a * inverse for a in parts), inverse


def _once(of_tokens, field):
    return stored(of_tokens) if len(field) > 1 else of_tokens


@_standardised.defjvp
def _derivative(norm, fields, slopes):
    (field,), (slope,) = fields, slopes
    y, inverse = _with_inverse(norm, field)
    forward, backward = (functools.partial(projected, norm) for projected in (_slope, _pullback))
    return y, linear(forward, backward, (field, inverse), slope)


# For x' = x - mean(x), y = x' / sigma and sigma^2 = (sum_i w_i mean(x_i'^2) + eps) / order:
#   dy_i = (dx_i' - y_i sum_j w_j mean(y_j dx_j) / order) / sigma
# and, transposed, with C_i channels:
#   dx_i = (dy_i' - y_i w_i / C_i sum_j C_j mean(y_j dy_j) / order) / sigma
def _slope(norm, residuals, slopes):
    weights = (1.0, norm.row_weight)
    return _projected(residuals, slopes, weights, (1.0, 1.0))


def _pullback(norm, residuals, slopes):
    field, _ = residuals
    gradient = _projected(residuals, slopes, (1.0, 2.0), (1.0, norm.row_weight / 2))
    return _cast(gradient, field)


def _projected(residuals, slopes, summed, subtracted):
    field, inverse = residuals
    y, centred = [a * inverse for a in reference.centred(field)], reference.centred(slopes)
    total = reference.weighted_means((a * b for a, b in zip(y, centred, strict=True)), summed)
    total = _once(total / reference.order(field), field)
    return tuple(inverse * (b - a * (weight * total)) for a, b, weight in zip(y, centred, subtracted, strict=False))
