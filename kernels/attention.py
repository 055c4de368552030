"""Softmax attention of all heads, from the output of one linear map, which stays as it is: no copy parts the heads.

Shapes: qkv [*B, N, 3 H d], columns ordered (q | k | v) x heads x head channels -> [*B, N, H d].
The kernel is explained in `attention_tpu.py`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels import attention_tpu, dispatch
from kernels.attention_lanes import Arrangement, arrange

NAME = attention_tpu.NAME
Parts = tuple[int, ...]


def reference(qkv: jax.Array, heads: int) -> jax.Array:
    """The definition, in plain jnp.  The softmax is in at least float32."""
    qkv = qkv.reshape(*qkv.shape[:-1], 3, heads, qkv.shape[-1] // (3 * heads))
    q, k, v = (qkv[..., i, :, :] for i in range(3))
    logits = jnp.einsum("...nhd,...mhd->...hnm", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    return jax.lax.collapse(jnp.einsum("...hnm,...mhd->...nhd", weights.astype(v.dtype), v), -2)


def attention(
    qkv: jax.Array,
    heads: int,
    *,
    implementation: str = "auto",
    plain: Callable[[jax.Array, int], jax.Array] = reference,
) -> jax.Array:
    """Softmax attention of all heads.

    The kernel computes the softmax in float32 and stores only qkv for the derivative.  It is for 100 to 400 tokens: it
    holds a whole image in VMEM.

    Args:
      qkv: [*B, N, 3 H d].
      heads: H; for the kernel, H d must be a multiple of 128, and d at most 128.
      implementation: "auto" uses the kernel in a program that is lowered for a TPU, if it supports the shape and dtype,
        and `plain` otherwise.  "xla" is `plain`; "tpu" is the kernel, and "interpret" runs it anywhere, slowly.  On
        several devices it needs the mesh of `jax.set_mesh`; if that does not divide axis -3 evenly, XLA runs.
      plain: what runs on other platforms, `reference` or a function that equals it.

    Returns:
      [*B, N, H d].

    Raises:
      ValueError: an unknown implementation, a width that is not 3 H d, or no kernel for this shape or dtype.
    """
    chosen = dispatch.chosen(NAME, implementation)
    d, rest = divmod(qkv.shape[-1], 3 * heads)
    if rest or qkv.ndim < 2:
        raise ValueError(f"{NAME}: qkv {qkv.shape} must be [*B, N, 3 H d]; {heads=} needs multiples of {3 * heads}.")

    def on_tpu(qkv, implementation="tpu"):
        return attend_arranged(implementation, (d,), heads, qkv[None])[0][0]

    kernels: dict[str, Callable] = {}
    if supported((qkv[None],), (d,), heads):
        kernels |= {"tpu": on_tpu, "interpret": functools.partial(on_tpu, implementation="interpret")}
    missing = chosen != "auto" and chosen not in kernels
    if chosen == "xla" or missing and implementation == "auto":
        return plain(qkv, heads)
    return dispatch.select(NAME, chosen, lambda qkv: plain(qkv, heads), kernels, qkv)


def rows_reference(heads: int, *qkv: jax.Array) -> tuple[jax.Array, ...]:
    """`reference` of heads with a part in each row of arrays [k, *B, N, 3 H c] -> [k, *B, N, H c]."""
    parts = [a.shape[-1] // (3 * heads) for a in qkv for _ in a]
    rows = [row.reshape(*row.shape[:-1], 3, heads, row.shape[-1] // (3 * heads)) for a in qkv for row in a]
    y = reference(jax.lax.collapse(jnp.concatenate(rows, -1), -3), heads)
    y = jnp.split(y.reshape(*y.shape[:-1], heads, sum(parts)), np.cumsum(parts)[:-1], axis=-1)
    y = iter([jax.lax.collapse(part, -2) for part in y])
    return tuple(jnp.stack([next(y) for _ in a]) for a in qkv)


def supported(qkv: tuple[jax.Array, ...], parts: Parts, heads: int, backward: bool = False) -> bool:
    """Whether there is a kernel for `attend_arranged` of qkv, or for its derivative."""
    arrangement = arrange(parts, heads)
    if arrangement is None or sum(len(a) * a.shape[-1] for a in qkv) != arrangement.token_widths[0]:
        return False
    return fits(qkv[0], arrangement, backward)


def fits(x: jax.Array, arrangement: Arrangement, backward: bool = False) -> bool:
    """Whether the kernel can hold what is so arranged for all tokens of x [k, *B, N, c].

    Not if a size is a symbol (for export).
    """
    *batch, tokens, _ = x.shape[1:]
    known = all(isinstance(n, int) for n in (*batch, tokens))
    return known and attention_tpu.buffers(x.dtype, tokens, arrangement.token_widths, backward) is not None


def attend_arranged(implementation: str, parts: Parts, heads: int, *qkv: jax.Array) -> tuple[jax.Array, ...]:
    """Attention of heads that have `parts` channels in each source, placed as `attention_lanes.arrange` says.

    Shapes: arrays [k, *B, N, qkv width], each of k sources -> [k, *B, N, width].
    """
    return _attend_arranged(implementation, parts, heads, *qkv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend_arranged(implementation, parts, heads, *qkv):
    return forward(*qkv, implementation=implementation, parts=parts, heads=heads)


_attend_arranged.defvjp(
    lambda implementation, parts, heads, *qkv: (
        forward(*qkv, implementation=implementation, parts=parts, heads=heads),
        qkv,
    ),
    lambda implementation, parts, heads, qkv, gradients: backward(
        *qkv, *gradients, implementation=implementation, parts=parts, heads=heads
    ),
)


# Jitted here: layers of equal shapes are traced once.
@functools.partial(jax.jit, static_argnames=("implementation", "parts", "heads"), inline=True)
def forward(*qkv: jax.Array, implementation: str, parts: Parts, heads: int) -> tuple[jax.Array, ...]:
    """`attend_arranged`, without a derivative."""
    kernels = _kernels(attention_tpu.forward if supported(qkv, parts, heads) else None, parts, heads)
    return dispatch.run(NAME, implementation, _plain(parts, heads), kernels, qkv)


@functools.partial(jax.jit, static_argnames=("implementation", "parts", "heads"), inline=True)
def backward(*arrays: jax.Array, implementation: str, parts: Parts, heads: int) -> tuple[jax.Array, ...]:
    """The gradient at its arguments, from these and the gradients at its results; without a kernel, by XLA."""
    qkv, plain = arrays[: len(arrays) // 2], _plain(parts, heads)

    def plain_backward(*arrays):
        return jax.vjp(plain, *arrays[: len(qkv)])[1](arrays[len(qkv) :])

    if not supported(qkv, parts, heads, backward=True):
        return plain_backward(*arrays)
    kernels = _kernels(attention_tpu.backward, parts, heads)
    return dispatch.run(f"{NAME}_backward", implementation, plain_backward, kernels, arrays)


def _kernels(kernel: Callable | None, parts: Parts, heads: int) -> dict[str, Callable | None]:
    if kernel is None:
        return {"tpu": None, "interpret": None, "gpu": None}
    kernel = functools.partial(kernel, arrangement=arrange(parts, heads), scale=1 / math.sqrt(sum(parts)))
    return {"tpu": kernel, "interpret": functools.partial(kernel, interpret=True), "gpu": None}


def _plain(parts: Parts, heads: int) -> Callable:
    """`attend_arranged` by `reference`."""
    arrangement = arrange(parts, heads)
    if len(parts) == 1 or arrangement is None:  # in their natural order
        return lambda qkv: (reference(qkv[0], heads)[None],)

    def plain(*qkv):
        sources = [row for a in qkv for row in a]
        natural = [
            x[..., arrangement.lanes(i, part)[:3]] for i, (x, part) in enumerate(zip(sources, parts, strict=True))
        ]
        y = reference(jax.lax.collapse(jnp.concatenate(natural, -1), -3), heads)
        y = jnp.split(y.reshape(*y.shape[:-1], heads, sum(parts)), np.cumsum(parts)[:-1], axis=-1)
        y = iter([arrangement.placed(i, jax.lax.collapse(x, -2)) for i, x in enumerate(y)])
        return tuple(jnp.stack([next(y) for _ in a]) for a in qkv)

    return plain
