"""The MLP of an octic field on a Hopper GPU: a kernel for the first map and its GELU, and one for their gradient.

Under differentiation the first kernel writes the hidden field too.  In the backward pass the second kernel multiplies
with the transposed second map and the derivative of the GELU.
"""

import functools

import jax
import jax.numpy as jnp

from equivit import derivatives
from equivit.kernels import d8_gelu, dispatch
from equivit.kernels.hopper import gelu
from equivit.kernels.hopper.vectors import packed
from equivit.kernels.isotypic_linear import Field, Linear, linear


def supported(field: Field, first: Linear, second: Linear) -> bool:
    """Whether there are kernels for these dtypes and widths."""
    (weights, bias), dtype = first, field[0].dtype
    c, f = weights[0].shape[1:]
    same = bias is not None and all(a.dtype == dtype for a in (*weights, *second[0]))
    return same and all(gelu.supported(width, f, dtype) for width in (c, second[0][0].shape[-1]))


@jax.custom_jvp
def feed_forward(field: Field, first: Linear, second: Linear) -> Field:
    """The MLP of an octic field; arguments as in `octic_feed_forward`."""
    return linear(_activated(False, field, first), second)


@feed_forward.defjvp
def _derivative(arrays, slopes):
    (field, first, second), (*of_first, of_second) = arrays, slopes
    *hidden, lines, planes = _activated(True, field, first)
    y, change = jax.jvp(functools.partial(linear, (lines, planes)), (second,), (of_second,))
    along = jax.jvp(linear, (field, first), tuple(of_first))[1]
    through = derivatives.linear(_after_hidden, _pullback, (tuple(hidden), second[0]), along)
    return y, jax.tree.map(jnp.add, change, through)


def _activated(hidden, field, first):
    """The GELU of the first map; with `hidden`, the hidden field before it."""

    def plain(lines, planes, w_lines, w_planes, bias):
        h = linear((lines, planes), ((w_lines, w_planes), bias))
        y = d8_gelu.d8_gelu(*h, implementation="xla")
        return (*h, *y) if hidden else y

    def kernel(lines, planes, w_lines, w_planes, bias):
        (of_bias,) = packed(gelu.of_bias(bias))
        return gelu.forward(lines, planes, w_lines, w_planes, of_bias, hidden=hidden)

    on_rows = dispatch.on_rows(kernel, 2)
    return dispatch.run("octic_feed_forward", "gpu", plain, {"gpu": on_rows}, field, (*first[0], first[1]))


def _after_hidden(residuals, slopes):
    """The change of the result along one of the hidden field."""
    hidden, weights = residuals
    return linear(d8_gelu.backward(*hidden, *slopes, implementation="gpu"), (weights, None))


def _pullback(residuals, gradient):
    """The gradient of the hidden field."""
    hidden, weights = residuals

    def plain(lines, planes, d_lines, d_planes, w_lines, w_planes):
        of_gelu = linear((d_lines, d_planes), ((w_lines.swapaxes(1, 2), w_planes.T), None))
        return d8_gelu.backward(lines, planes, *of_gelu, implementation="gpu")

    kernel = dispatch.on_rows(gelu.backward, 4)
    return dispatch.run("octic_feed_forward", "gpu", plain, {"gpu": kernel}, (*hidden, *gradient), weights)
