"""Self-attention of a field on a Hopper GPU, for training: the first map writes heads as cuDNN's attention reads them.

`hopper.heads` orders the channels of a head's vector.  `hopper.apart` brings the result, and the gradients of queries,
keys and values, back to irreps, in an order of channels that weights take too.  The result's gradient comes head by
head from the first kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels import mesh
from equivit.kernels.attention import attend
from equivit.kernels.hopper import apart
from equivit.kernels.hopper import heads as heads_kernel
from equivit.kernels.hopper.vectors import packed
from equivit.kernels.isotypic_linear import Field, Linear, linear


def supported(field: Field, qkv: Linear, proj: Linear, heads: int) -> bool:
    """Whether there are kernels for this dtype, width and number of heads.  XLA cannot split them over devices."""
    weights, bias = qkv
    width, dtype = field[0].shape[-1], weights[0].dtype
    octic = len(field) == 2 and None not in (bias, proj[1])
    same = all(a.dtype == dtype for a in (*field, *weights, *proj[0]))
    single = octic and same and not mesh.splits()
    return single and all(heads_kernel.supported(width, heads, dtype, parts) for parts in (1, 3))


def attention(field: Field, qkv: Linear, proj: Linear, heads: int) -> Field:
    """Self-attention of an octic field; arguments as in `isotypic_attention`."""
    batch = field[0].shape[1:-1]
    weights, bias = qkv
    rows = tuple(a.reshape(len(a), -1, a.shape[-1]) for a in field)
    vectors: Any = _heads(heads, *rows, *weights, bias)
    q, k, v = (a.reshape(*batch, *a.shape[1:]).swapaxes(-2, -3) for a in vectors)
    y = attend(q, k, v).swapaxes(-2, -3)
    field = _projected(y.reshape(-1, *y.shape[-2:]), *proj)
    return tuple(a.reshape(len(a), *batch, a.shape[-1]) for a in field)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _heads(heads, *arrays):
    return _multiplied(heads, *arrays)


def _multiplied(heads, lines, planes, w_lines, w_planes, bias):
    (of_bias,) = packed(heads_kernel.of_bias(bias, lines.shape[-1] // heads))
    return heads_kernel.forward(lines, planes, w_lines, w_planes, of_bias, heads=heads)


def _heads_gradient(heads, arrays, gradients):
    lines, planes, w_lines, w_planes, bias = arrays
    c = gradients[0].shape[-1] // 8
    weights = apart.arranged((w_lines, w_planes), c)
    pull = jax.vjp(lambda x, w, b: linear(x, (w, b)), (lines, planes), weights, bias)[1]
    field, weights, of_bias = pull(apart.forward(*gradients))
    return *field, *apart.natural(weights, c), apart.natural((of_bias,), c)[0]


_heads.defvjp(lambda heads, *arrays: (_multiplied(heads, *arrays), arrays), _heads_gradient)


@jax.custom_vjp
def _projected(y, weights, bias):
    """The map after attention, of head vectors [M, H, 8c]."""
    return _with_residuals(y, weights, bias)[0]


def _with_residuals(y, weights, bias):
    field = apart.forward(y)
    return linear(field, (apart.arranged(weights, y.shape[-1] // 8, axis=-2), bias)), (field, weights, bias, y)


def _gradient_of_projected(residuals, gradients):
    field, (lines, planes), bias, y = residuals
    _, heads, width = y.shape
    d_lines, d_planes = gradients
    no_bias = jnp.zeros(lines.shape[1])
    (of_heads,) = _multiplied(heads, d_lines, d_planes, lines.swapaxes(1, 2), planes.T, no_bias)
    weights, of_bias = jax.vjp(lambda *map: linear(field, map), (lines, planes), bias)[1](gradients)
    return of_heads, apart.natural(weights, width // 8, axis=-2), of_bias


_projected.defvjp(_with_residuals, _gradient_of_projected)
