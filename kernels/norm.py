"""Layer norm of a field: irreps are centred, and divided by one common standard deviation; then scales and a bias.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.  A dense array
is one line.  Source: octic ViTs, Section 3.2.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import cpu, dispatch
from kernels.isotypic_linear import Field, add_to_first

NAME = "norm"
TOKENS = 100  # the fewest for the kernel, which unlike `reference` has no forward-mode derivative


class Norm(NamedTuple):
    """Constants of the norm: epsilon, and the weight of the variance of a row of E."""

    eps: float
    row_weight: float = 1.0


def reference(field: Field, scales: Field, bias: jax.Array, norm: Norm, *, once: bool = False) -> Field:
    """The definition, in plain jnp, in at least float32; with `once` the standard deviation is an array of its own."""
    centred = [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in field]
    centred = [a - a.mean(-1, keepdims=True) for a in centred]
    total, *of_planes = (jnp.square(a).mean(-1, keepdims=True).sum(0) for a in centred)
    if of_planes:
        total = total + norm.row_weight * of_planes[0]
    inverse = jax.lax.rsqrt((total + norm.eps) / order(field))
    inverse = jax.lax.optimization_barrier(inverse) if once else inverse
    lines, *planes = (a * inverse * _over_tokens(s, a) for a, s in zip(centred, scales, strict=True))
    lines = add_to_first(lines, bias)
    return tuple(y.astype(a.dtype) for y, a in zip((lines, *planes), field, strict=True))


def order(field: Field) -> int:
    """Of the group: a row of E has twice the channels of a line."""
    return sum(len(a) * rows for a, rows in zip(field, (1, 2), strict=False))


def _over_tokens(scale: jax.Array, array: jax.Array) -> jax.Array:
    """[i, C] -> [i, 1, ..., 1, C], to multiply lines; [2C] as it is."""
    return scale if scale.ndim == 1 else scale.reshape(len(scale), *(1,) * (array.ndim - 2), -1)


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """The norm, in a program for a CPU by the kernel, if it supports the arrays.

    In one for a GPU the standard deviation of lines and planes is computed once: left to itself, XLA reads the whole
    field for either.

    Args:
      field: lines and planes, or lines alone.
      scales: of lines [i, C], of planes [2C].
      bias: [C], of the first line.
      norm: constants.
    """
    names = _allowed(("gpu",) * (len(field) > 1) + ("cpu",) * supported(field, scales, bias))
    return _normalise(field, scales, bias, norm, names)


def normalise_dense(
    x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float, plain: Callable[..., jax.Array]
) -> jax.Array:
    """The same of a dense array [*B, N, C], with scale and bias [C]; elsewhere `plain(x, scale, bias, eps)`."""
    return _normalise_dense(x, scale, bias, eps, plain, _allowed(("cpu",) * supported(x, scale, bias)))


# Both are computed again in a backward pass: what a derivative needs is four times as large as a field in bfloat16.
# JAX keeps what it has traced of them, so that the implementations must be an argument.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normalise(field, scales, bias, norm, names):
    plain = functools.partial(reference, norm=norm)
    kernels = {"gpu": functools.partial(plain, once=True), "cpu": functools.partial(_on_cpu, norm)}
    return _selected(names, plain, kernels, field, scales, bias)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5))
def _normalise_dense(x, scale, bias, eps, plain, names):
    def kernel(x, scale, bias):
        y: Any = _on_cpu(Norm(eps), (x[None],), (scale[None],), bias)
        return y[0][0]

    return _selected(names, functools.partial(plain, eps=eps), {"cpu": kernel}, x, scale, bias)


def _allowed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the implementations that `kernels.using` allows."""
    chosen = dispatch.chosen(NAME, "auto")
    return names if chosen == "auto" else tuple(name for name in names if name == chosen)


def _selected(names: tuple[str, ...], plain: Callable, kernels: dict[str, Callable], *arrays: Any) -> Any:
    with jax.named_scope("norm"):
        return dispatch.select(NAME, "auto", plain, {name: kernels[name] for name in names}, *arrays)


def supported(*arrays: Any) -> bool:
    """Whether there is a kernel for a field and its parameters: of float32, TOKENS tokens or more, on one device."""
    leaves = jax.tree.leaves(arrays)
    many = leaves[0].ndim > 1 and leaves[0].shape[-2] >= TOKENS
    return dispatch.on_one_device(leaves) and cpu.supported(*leaves) and many


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_cpu(norm, field, scales, bias):
    return cpu.call("equivit_norm", (*field, *scales, bias), cpu.like(field), **_constants(norm, field))


def _backward(norm, arrays, gradients):
    field, scales, bias = arrays
    results = cpu.like((*field, *scales, bias))
    found = cpu.call("equivit_norm_backward", (*field, *scales, *gradients), results, **_constants(norm, field))
    return found[: len(field)], found[len(field) : -1], found[-1]


_on_cpu.defvjp(lambda norm, *arrays: (_on_cpu(norm, *arrays), arrays), _backward)


def _constants(norm: Norm, field: Field) -> dict:
    eps, row_weight = map(np.float32, norm)
    return dict(order=np.int64(order(field)), eps=eps, row_weight=row_weight)
