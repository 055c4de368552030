"""Softmax attention for all models: cuDNN's fused kernel where it can run, otherwise plain matrix products.

A head's vectors may come in parts, (q1, q2, ...), which stand for their concatenation on the last axis: the equivariant
layers have one part per kind of irrep, and the plain products use them without a copy, unless they are differentiated.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from equivit.derivatives import linear
from equivit.layers.in_order import in_order
from equivit.layers.product import kept, scores, weighted

IMPLEMENTATIONS = ("auto", "xla", "cudnn")
KERNEL_TOKENS = 100  # the fewest for which "auto" is a kernel: with fewer, a TPU's registers of keys are half empty
HEAD_CHANNELS = 128  # the most that cuDNN supports on every GPU; must be a multiple of 8

Parts = tuple[jax.Array, ...]


def attend(q: Parts, k: Parts, v: Parts, *, implementation: str = "auto") -> Parts:
    """softmax(q k^T / sqrt(d)) v for each head, d being the channels of all parts; the softmax is in at least float32.

    Shapes: each part of q [*B, H, N, d_i], of k and v [*B, H, M, d_i] -> like the parts of v, with N tokens.

    "auto" is cuDNN's flash attention on an NVIDIA GPU in bfloat16 or float16, if the channels per head are a multiple
    of 8, at most 128, and as many as those of v; otherwise it is "xla".  cuDNN needs a GPU at tracing time: a program
    that is lowered for CUDA on a machine without one uses the plain products.  The kernel for TPUs is for heads side
    by side: `attend_side_by_side`.

    Raises:
      ValueError: an unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attend: {implementation=} is not one of {', '.join(IMPLEMENTATIONS)}.")
    with jax.named_scope("attention"):
        if implementation == "auto" and cudnn_takes(q, k, v) and _has_cudnn():
            return jax.lax.platform_dependent(q, k, v, cuda=_cudnn, default=_xla)
        return (_cudnn if implementation == "cudnn" else _xla)(q, k, v)


def attend_side_by_side(qkv: jax.Array, num_heads: int, *, implementation: str = "auto") -> jax.Array:
    """`attend` for heads side by side, as a linear map gives them: columns (q | k | v) x heads x head channels.

    Shapes: [*B, N, 3 H d] -> [*B, N, H d].

    "tpu" is the kernel of `kernels.attention`, which takes the heads as they lie, and so is "auto" in a program
    lowered for a TPU, if the kernel supports the shape and there are at least KERNEL_TOKENS tokens.  "interpret" runs
    it on any machine, slowly.  Otherwise the heads are brought apart for `attend`, which has the other
    implementations.

    Raises:
      ValueError: an unknown implementation, or no kernel for the shape or dtype.
    """
    from kernels import attention as kernel  # here, so that `isotypic.py` first reports another package of this name

    def plain(qkv, heads):
        q, k, v = ((head_by_head(part, heads),) for part in jnp.split(qkv, 3, axis=-1))
        (y,) = attend(q, k, v, implementation=implementation)
        return side_by_side(y)

    if implementation in ("tpu", "interpret") or implementation == "auto" and enough_for_kernel(qkv):
        with jax.named_scope("attention"):
            return kernel.attention(qkv, num_heads, implementation=implementation, plain=plain)
    return plain(qkv, num_heads)


def head_by_head(x: jax.Array, num_heads: int) -> jax.Array:
    """[*B, N, width] -> [*B, num_heads, N, head channels]."""
    return jnp.einsum("...nhd->...hnd", x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads))


@jax.custom_jvp
def side_by_side(x: jax.Array) -> jax.Array:
    """[*B, num_heads, N, head channels] -> [*B, N, width]."""
    return jax.lax.collapse(jnp.einsum("...hnd->...nhd", x), -2)


@side_by_side.defjvp
def _(primals, tangents):
    # Else XLA:CPU may turn x, or the gradient, in an order that is slow.
    return jax.jvp(lambda x: jax.lax.collapse(in_order(jnp.einsum("...hnd->...nhd", x)), -2), primals, tangents)


def enough_for_kernel(x: jax.Array) -> bool:
    """Whether "auto" may be a kernel for these tokens, [*B, N, c]; not if their number is symbolic."""
    return isinstance(x.shape[-2], int) and x.shape[-2] >= KERNEL_TOKENS


def attend_with_bias(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, *, scale: float | None = None):
    """softmax(scale q k^T + bias) v for each head, by plain products: windows are too small for a fused kernel.

    Shapes: q [*B, H, N, d], k and v [*B, H, M, d], bias one that broadcasts to [*B, H, N, M] -> [*B, H, N, d].

    Args:
      scale: None for 1 / sqrt(d).
    """
    with jax.named_scope("attention"):
        return _weighted(_logits((q,), (k,), scale) + bias, (v,))[0]


def attend_both(a: jax.Array, b: jax.Array, v_a: jax.Array, v_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sets of tokens that attend to each other by one matrix of scores S = a b^T / sqrt(d), for each head.

    The first gets softmax(S) v_b, the second softmax(S^T) v_a.  By plain products: fused kernels go one way.

    Shapes: a and v_a [*B, H, N, d], b and v_b [*B, H, M, d] -> [*B, H, N, d] and [*B, H, M, d].
    """
    with jax.named_scope("attention"):
        logits = _logits((a,), (b,))
        return _weighted(logits, (v_b,))[0], _weighted(jnp.swapaxes(logits, -1, -2), (v_a,))[0]


def attend_relative(q: Parts, k: Parts, v: Parts, vectors: Parts, pairs: np.ndarray) -> Parts:
    """softmax(q (k + r)^T / sqrt(d)) v for each head, r being the vector of the distance from key to query.

    The first tokens, which have no place in the grid, have no distances either: there r is 0.

    Shapes: each part of q, k and v [*B, H, P + n, d_i], of the vectors [m, d_i] -> like the parts of v.

    Args:
      pairs: [n, n], the distance of each query from each key among the n tokens of the grid, as an index of vectors;
        each row is a permutation.
    """
    with jax.named_scope("attention"):
        return _weighted(_relative_logits(q, k, vectors, pairs), v)


def relative_weights(q: Parts, k: Parts, vectors: Parts, pairs: np.ndarray) -> jax.Array:
    """The weights in `attend_relative`, [*B, H, P + n, P + n], in at least float32."""
    with jax.named_scope("attention"):
        return jax.nn.softmax(_relative_logits(q, k, vectors, pairs))


def _relative_logits(q: Parts, k: Parts, vectors: Parts, pairs: np.ndarray) -> jax.Array:
    prefix = q[0].shape[-2] - len(pairs)
    near = _logits(tuple(part[..., prefix:, :] for part in q), vectors)
    near = _by_pair(near, pairs)
    return _logits(q, k) + jnp.pad(near, [(0, 0)] * (near.ndim - 2) + [(prefix, 0)] * 2)


def _by_pair(x: jax.Array, pairs: np.ndarray) -> jax.Array:
    """x[..., i, pairs[i, j]] for each i and j; as rows of pairs are permutations, its gradient reads likewise."""

    def reader(pairs):
        return lambda _, x: jnp.take_along_axis(x, pairs.reshape(*(1,) * (x.ndim - 2), *pairs.shape), -1)

    read, transpose = reader(pairs), reader(pairs.argsort(1))
    function = jax.custom_jvp(functools.partial(read, ()))
    function.defjvp(lambda primals, slopes: (function(*primals), linear(read, transpose, (), *slopes)))
    return function(x)


def attention_weights(q: Parts, k: Parts) -> jax.Array:
    """softmax(q k^T / sqrt(d)) for each head, the weights in `attend`, in at least float32.

    Shapes: each part of q [*B, H, N, d_i], of k [*B, H, M, d_i] -> [*B, H, N, M].
    """
    with jax.named_scope("attention"):
        return jax.nn.softmax(_logits(q, k))


def cudnn_takes(q: Parts, k: Parts, v: Parts) -> bool:
    """Whether cuDNN's attention has a kernel for these types and head channels, and there is an image."""
    channels, dtypes = sum(part.shape[-1] for part in q), {part.dtype for part in (*q, *k, *v)}
    if 0 in q[0].shape or channels > HEAD_CHANNELS or channels % 8 or channels != sum(part.shape[-1] for part in v):
        return False
    return dtypes in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")})


@functools.cache
def _has_cudnn() -> bool:
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower()


def _logits(q: Parts, k: Parts, scale: float | None = None) -> jax.Array:
    scale = 1 / math.sqrt(sum(part.shape[-1] for part in q)) if scale is None else scale
    products = (scores(a * scale, b) for a, b in zip(q, k, strict=True))
    logits = functools.reduce(operator.add, products)
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _xla(q: Parts, k: Parts, v: Parts) -> Parts:
    return _weighted(_logits(q, k), v) if len(v) == 1 else _in_parts(q, k, v)


@jax.custom_jvp
def _in_parts(q: Parts, k: Parts, v: Parts) -> Parts:
    """Without a copy; but under differentiation `_side_by_side`, whose gradients are fewer and wider products."""
    return _weighted(_logits(q, k), v)


def _side_by_side(q: Parts, k: Parts, v: Parts) -> Parts:
    whole_q, whole_k, whole_v = ((jnp.concatenate(parts, -1),) for parts in (q, k, v))
    (y,) = _weighted(_logits(whole_q, whole_k), whole_v)
    return _apart(y, v)


_in_parts.defjvp(functools.partial(jax.jvp, _side_by_side))


def _apart(y: jax.Array, v: Parts) -> Parts:
    """Into parts like those of v."""
    ends = np.cumsum([part.shape[-1] for part in v])[:-1]
    return tuple(jnp.split(y, ends, axis=-1))


def _weighted(logits: jax.Array, v: Parts) -> Parts:
    """softmax(logits) v."""
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    # Dividing the result, not the weights, saves a pass over N x M entries.
    total = weights.sum(-1, keepdims=True)
    sums = (kept(weighted(weights.astype(part.dtype), part)) for part in v)
    return tuple((y / total).astype(y.dtype) for y in sums)


def _cudnn(q, k, v):
    """`_xla` by cuDNN, which wants the parts concatenated and heads after tokens."""
    shape = v[0].shape[:-3]
    q, k, v_all = (jnp.swapaxes(jnp.concatenate(parts, -1), -2, -3) for parts in (q, k, v))
    y = _fused(*(x.reshape(-1, *x.shape[-3:]) for x in (q, k, v_all)))
    return _apart(jnp.swapaxes(y.reshape(*shape, *y.shape[-3:]), -2, -3), v)


@jax.custom_vjp
def _fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """cuDNN's attention, [B, N, H, d], [B, M, H, d] -> [B, N, H, d]."""
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _fused_even(q, k, v):
    """The same, with an even number of tokens: JAX refuses others under differentiation."""
    tokens, lengths = q.shape[1], None
    if k.shape[1] % 2:
        lengths = jnp.full(len(k), k.shape[1], jnp.int32)
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
    return y[:, :tokens]


_fused.defvjp(lambda *arrays: jax.vjp(_fused_even, *arrays), lambda transposed, gradient: transposed(gradient))
