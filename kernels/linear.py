"""The linear map f(x) W + b of tokens, where f is the identity or the exact GELU.

Shapes: x [*B, N, C], W [C, D], b [D] or None -> [*B, N, D]; or with a matrix for each row of a field, and b for the
first: x [i, *B, N, C], W [i, C, D], b [D] or None -> [i, *B, N, D].
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels import cpu, dispatch

NAME = "linear"
TOKENS = 100  # the fewest for the kernel, which unlike jnp has no forward-mode derivative

Plain = Callable[[jax.Array, jax.Array, jax.Array | None, bool], jax.Array]


def reference(x: jax.Array, weight: jax.Array, bias: jax.Array | None, activated: bool) -> jax.Array:
    """The definition, in plain jnp; `activated` says that f is the GELU."""
    x = jax.nn.gelu(x, approximate=False) if activated else x
    if weight.ndim == 2:
        return x @ weight if bias is None else x @ weight + bias
    y = jnp.einsum("i...c,icd->i...d", x, weight)
    return y if bias is None else y.at[0].add(bias)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, activated: bool, plain: Plain) -> jax.Array:
    """The map, by the kernel for CPUs in a program for one of them, if it supports the arrays; elsewhere by `plain`.

    What `remat="dots"` keeps has the name "product"; that of `unnamed` is left to the caller.

    Args:
      x: tokens.
      weight: W.
      bias: b.
      activated: whether f is the GELU.
      plain: what `reference` defines.
    """
    if not _by_kernel(x, weight, bias):
        return plain(x, weight, bias, activated)
    return checkpoint_name(unnamed(x, weight, bias, activated, plain), "product")


def unnamed(x: jax.Array, weight: jax.Array, bias: jax.Array | None, activated: bool, plain: Plain) -> jax.Array:
    """The same without a name."""
    if not _by_kernel(x, weight, bias):
        return plain(x, weight, bias, activated)
    return _linear(x, weight, bias, activated, plain, dispatch.chosen(NAME, "auto"))


def _by_kernel(*arrays):
    return dispatch.chosen(NAME, "auto") in ("auto", "cpu") and supported(*arrays)


# A backward pass begins from the arguments: otherwise what either platform needs is kept for it, on the others zeros.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5))
def _linear(x, weight, bias, activated, plain, implementation):
    plain, kernel = functools.partial(plain, activated=activated), functools.partial(_on_cpu, activated)
    return dispatch.select(NAME, implementation, plain, {"cpu": kernel}, x, weight, bias)


def supported(x: Any, weight: Any, bias: Any = None) -> bool:
    """Whether there is a kernel for arrays: of one dtype that it has, TOKENS tokens or more, on one device.

    The bias may also be of float32 if the others are of bfloat16.
    """
    many = x.ndim > 1 and x.shape[-2] >= TOKENS
    if not many or not dispatch.on_one_device((x, weight, bias)) or not cpu.supported(x, weight, in_bfloat16=True):
        return False
    return bias is None or bias.dtype in (x.dtype, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_cpu(activated, x, weight, bias):
    arrays = (x, weight) if bias is None else (x, weight, bias.astype(jnp.float32))
    y = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[-1]), x.dtype)
    return cpu.call("equivit_linear", arrays, [y], activated=activated)[0]


def _backward(activated, arrays, dy):
    x, weight, bias = arrays
    (dx,) = cpu.call("equivit_linear_backward_x", (dy, weight, x) if activated else (dy, weight), cpu.like([x]))
    results = cpu.like([weight])
    if bias is not None:
        results.append(jax.ShapeDtypeStruct(bias.shape, jnp.float32))
    d_weight, *d_bias = cpu.call("equivit_linear_backward_weight", (x, dy), results, activated=activated)
    return dx, d_weight, None if bias is None else d_bias[0].astype(bias.dtype)


_on_cpu.defvjp(lambda activated, *arrays: (_on_cpu(activated, *arrays), arrays), _backward)
