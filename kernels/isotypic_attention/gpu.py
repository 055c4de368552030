"""Self-attention of a field on a Hopper GPU, for training: the first map writes heads as cuDNN's attention reads them.

`hopper.heads` orders the channels of a head's vector.  `hopper.irreps` brings the result, and the gradients of queries,
keys and values, back to irreps, in an order of channels that weights take too.  The result's gradient comes head by
head from the first kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels import dispatch, mesh
from equivit.kernels.attention import attend
from equivit.kernels.hopper import heads as heads_kernel
from equivit.kernels.hopper import irreps
from equivit.kernels.hopper.vectors import packed
from equivit.kernels.isotypic_linear import Field, Linear, linear


def supported(field: Field, qkv: Linear, proj: Linear, heads: int) -> bool:
    """Whether there are kernels for these sizes, dtypes and heads.  XLA cannot split them over devices."""
    weights, bias = qkv
    width, dtype = field[0].shape[-1], weights[0].dtype
    octic = len(field) == 2 and None not in (bias, proj[1])
    same = all(a.dtype == dtype for a in (*field, *weights, *proj[0]))
    single = octic and same and dispatch.sized(field[0]) and not mesh.splits()
    return single and all(heads_kernel.supported(width, heads, dtype, parts) for parts in (1, 3))


def attention(field: Field, qkv: Linear, proj: Linear, heads: int) -> Field:
    """Self-attention of an octic field; arguments as in `isotypic_attention`."""
    batch = field[0].shape[1:-1]
    weights, bias = qkv
    rows = tuple(a.reshape(len(a), -1, a.shape[-1]) for a in field)
    vectors: Any = _heads(heads, *rows, *weights, bias)
    q, k, v = (a.reshape(*batch, heads, -1).swapaxes(-2, -3) for a in vectors)
    y = attend(q, k, v).swapaxes(-2, -3)
    field = _projected(heads, y.reshape(1, vectors[0].shape[1], -1), *proj)
    return tuple(a.reshape(len(a), *batch, a.shape[-1]) for a in field)


def _run(kernel: Callable, fields: Sequence[jax.Array], weights: Sequence[jax.Array] = ()) -> Any:
    """A kernel on arrays [k, M, c].  Under `jax.vmap` it sees all their rows, or runs for one set of weights at a time.

    There is no plain form, as no other operation has the order of channels in a head's vector.
    """
    on_rows = dispatch.on_rows(kernel, len(fields))
    looped = jax.custom_batching.sequential_vmap(on_rows)
    return dispatch.run("isotypic_attention", "gpu", looped, {"gpu": on_rows}, tuple(fields), tuple(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _heads(heads, *arrays):
    return _multiplied(heads, *arrays)


def _multiplied(heads, lines, planes, *weights):
    """P times [1, M, H 8c], head vectors side by side."""

    def kernel(lines, planes, w_lines, w_planes, bias):
        (of_bias,) = packed(heads_kernel.of_bias(bias, lines.shape[-1] // heads))
        vectors = heads_kernel.forward(lines, planes, w_lines, w_planes, of_bias, heads=heads)
        return tuple(a.reshape(1, len(a), -1) for a in vectors)

    return _run(kernel, (lines, planes), weights)


def _by_irrep(heads, *vectors):
    """The field of arrays from `_multiplied`, by `hopper.irreps`."""
    return _run(lambda *arrays: irreps.forward(*(a.reshape(a.shape[1], heads, -1) for a in arrays)), vectors)


def _heads_gradient(heads, arrays, gradients):
    lines, planes, w_lines, w_planes, bias = arrays
    c = lines.shape[-1] // heads
    weights = irreps.arranged((w_lines, w_planes), c)
    pull = jax.vjp(lambda x, w, b: linear(x, (w, b)), (lines, planes), weights, bias)[1]
    field, weights, of_bias = pull(_by_irrep(heads, *gradients))
    return *field, *irreps.natural(weights, c), irreps.natural((of_bias,), c)[0]


_heads.defvjp(lambda heads, *arrays: (_multiplied(heads, *arrays), arrays), _heads_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _projected(heads, y, weights, bias):
    """The map after attention, of head vectors [1, M, H 8c]."""
    return _with_residuals(heads, y, weights, bias)[0]


def _with_residuals(heads, y, weights, bias):
    field = _by_irrep(heads, y)
    return linear(field, (irreps.arranged(weights, _channels(heads, weights), axis=-2), bias)), (field, weights, bias)


def _gradient_of_projected(heads, residuals, gradients):
    field, (lines, planes), bias = residuals
    (of_heads,) = _multiplied(heads, *gradients, lines.swapaxes(1, 2), planes.T, jnp.zeros(lines.shape[1]))
    weights, of_bias = jax.vjp(lambda *map: linear(field, map), (lines, planes), bias)[1](gradients)
    return of_heads, irreps.natural(weights, _channels(heads, weights), axis=-2), of_bias


def _channels(heads, weights):
    """The channels of a head in each line."""
    return weights[0].shape[1] // heads


_projected.defvjp(_with_residuals, _gradient_of_projected)
