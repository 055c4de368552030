"""Self-attention of a field on a Hopper GPU, for training: the first map writes heads as cuDNN's attention reads them.

The kernel orders the channels of a head's vector (`hopper.heads`).  A gather brings the result, and the gradients of
queries, keys and values, back to irreps.  The result's gradient comes head by head from the same kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import attend
from kernels.hopper import heads as heads_kernel
from kernels.isotypic_linear import Field, Linear, linear


def supported(field: Field, qkv: Linear, proj: Linear, heads: int) -> bool:
    """Whether there are kernels for this dtype, width and number of heads."""
    weights, bias = qkv
    width, dtype = field[0].shape[-1], weights[0].dtype
    octic = len(field) == 2 and None not in (bias, proj[1])
    same = all(a.dtype == dtype for a in (*field, *weights, *proj[0]))
    return octic and same and all(heads_kernel.supported(width, heads, dtype, parts) for parts in (1, 3))


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
    return heads_kernel.forward(*arrays, heads=heads)


def _heads_gradient(heads, arrays, gradients):
    lines, planes, w_lines, w_planes, bias = arrays
    order = _natural(heads, gradients[0].shape[-1])
    slope = _by_irrep(*(g.reshape(len(g), -1)[:, np.array(order)] for g in gradients))
    pull = jax.vjp(lambda x, w, b: linear(x, (w, b)), (lines, planes), (w_lines, w_planes), bias)[1]
    field, weights, of_bias = pull(slope)
    return *field, *weights, of_bias


_heads.defvjp(lambda heads, *arrays: (_heads(heads, *arrays), arrays), _heads_gradient)


@jax.custom_vjp
def _projected(y, weights, bias):
    """The map after attention, of head vectors [M, H, 8c]."""
    return _with_residuals(y, weights, bias)[0]


def _with_residuals(y, weights, bias):
    _, heads, width = y.shape
    field = _by_irrep(y.reshape(len(y), -1)[:, np.array(_natural(heads, width))])
    return linear(field, (weights, bias)), (field, weights, bias, y)


def _gradient_of_projected(residuals, gradients):
    field, weights, bias, y = residuals
    of_maps = jax.vjp(lambda *map: linear(field, map), weights, bias)[1](gradients)
    lines, planes = weights
    transposed = lines.swapaxes(1, 2), planes.T
    (of_heads,) = heads_kernel.forward(*gradients, *transposed, jnp.zeros(lines.shape[1]), heads=y.shape[1])
    return of_heads, *of_maps


_projected.defvjp(_with_residuals, _gradient_of_projected)


@functools.cache
def _natural(heads: int, width: int) -> tuple[int, ...]:
    """The place of A1 | A2 | B1 | B2 | E row 0 | E row 1 of all heads in a row of head vectors of this width."""
    *lines, first, second, third, fourth = heads_kernel.places(width // 8, heads)  # both halves of each row of E
    return tuple(np.concatenate([*lines, first, third, second, fourth]).tolist())


def _by_irrep(*parts):
    """Arrays [M, 8C] side by side in each irrep: k of them to [4, M, k C] and [2, M, 2k C]."""
    lines, planes = zip(*(jnp.split(x, 2, axis=1) for x in parts), strict=True)
    return _joined(lines, 4), _joined(planes, 2)


def _joined(parts, number):
    rows = [x.reshape(len(x), number, -1) for x in parts]
    return jnp.moveaxis(jnp.concatenate(rows, axis=-1), 1, 0)
