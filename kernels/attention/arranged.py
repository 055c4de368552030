"""Attention, and its derivative, for heads placed in the lanes of TPU registers by `lanes.py`.

The kernels are in `tpu.py`.  They compute the softmax in float32 and store only q, k and v for the derivative.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels import dispatch
from equivit.kernels.attention import reference, tpu
from equivit.kernels.attention.lanes import Arrangement, arrange

NAME = "attention"
Parts = tuple[int, ...]  # channels of a head in each source


def supported(qkv: tuple[jax.Array, ...], parts: Parts, heads: int, backward: bool = False) -> bool:
    """Whether there is a kernel for `attend`, or for its derivative."""
    arrangement = arrange(parts, heads)
    if arrangement is None or sum(len(a) * a.shape[-1] for a in qkv) != arrangement.token_widths[0]:
        return False
    return fits(qkv[0], arrangement, backward)


def fits(x: jax.Array, arrangement: Arrangement, backward: bool = False) -> bool:
    """Whether the kernel can hold all tokens of x [k, *B, N, c] so arranged; False for symbolic sizes (export)."""
    *batch, tokens, _ = x.shape[1:]
    known = all(isinstance(n, int) for n in (*batch, tokens))
    return known and tpu.buffers(x.dtype, tokens, arrangement.token_widths, backward) is not None


def attend(implementation: str, parts: Parts, heads: int, *qkv: jax.Array) -> tuple[jax.Array, ...]:
    """Attention of heads with `parts` channels in each source, placed by `lanes.arrange`.

    Shapes: arrays [k, *B, N, qkv width], each of k sources -> [k, *B, N, width].
    """
    return _attend(implementation, parts, heads, *qkv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(implementation, parts, heads, *qkv):
    return forward(implementation, parts, heads, *qkv)


_attend.defvjp(
    lambda *arguments: (forward(*arguments), arguments[3:]),
    lambda implementation, parts, heads, qkv, gradients: backward(implementation, parts, heads, *qkv, *gradients),
)


# Jitted here: layers of equal shapes are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def forward(implementation: str, parts: Parts, heads: int, *qkv: jax.Array) -> tuple[jax.Array, ...]:
    """`attend`, without a derivative."""
    kernel = _placed(tpu.forward, parts, heads) if supported(qkv, parts, heads) else None
    return dispatch.run(NAME, implementation, _plain(parts, heads), dispatch.by_implementation(kernel), qkv)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def backward(implementation: str, parts: Parts, heads: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradient of the arguments, from the arguments and the gradients of the results; without a kernel, by XLA."""
    qkv, plain = arrays[: len(arrays) // 2], _plain(parts, heads)

    def plain_backward(*arrays):
        return jax.vjp(plain, *arrays[: len(qkv)])[1](arrays[len(qkv) :])

    if not supported(qkv, parts, heads, backward=True):
        return plain_backward(*arrays)
    kernels = dispatch.by_implementation(_placed(tpu.backward, parts, heads))
    return dispatch.run(f"{NAME}_backward", implementation, plain_backward, kernels, arrays)


def _placed(kernel: Callable, parts: Parts, heads: int) -> Callable:
    return functools.partial(kernel, arrangement=arrange(parts, heads), scale=1 / math.sqrt(sum(parts)))


def _plain(parts: Parts, heads: int) -> Callable:
    """`attend` in plain jnp."""
    arrangement = arrange(parts, heads)
    if len(parts) == 1 or arrangement is None:  # in their natural order
        return lambda qkv: (reference.attention(qkv[0], heads)[None],)

    def plain(*qkv):
        sources = [row for a in qkv for row in a]
        natural = [
            x[..., arrangement.lanes(i, part)[:3]] for i, (x, part) in enumerate(zip(sources, parts, strict=True))
        ]
        y = reference.attention(jax.lax.collapse(jnp.concatenate(natural, -1), -3), heads)
        y = jnp.split(y.reshape(*y.shape[:-1], heads, sum(parts)), np.cumsum(parts)[:-1], axis=-1)
        y = iter([arrangement.placed(i, jax.lax.collapse(x, -2)) for i, x in enumerate(y)])
        return tuple(jnp.stack([next(y) for _ in a]) for a in qkv)

    return plain
