"""cuDNN's flash attention, for NVIDIA GPUs.

It needs a GPU when a program is traced: a machine without a GPU lowers the reference for CUDA, unless
`gpus.lowering_for` describes one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels import gpus, mesh
from equivit.kernels.product import Map, linear

HEAD_CHANNELS = 128  # the most that cuDNN supports on every GPU; must be a multiple of 8


def supported(q: Any, k: Any, v: Any) -> bool:
    """Whether cuDNN supports the dtypes and head channels of these arrays, and the batch is not empty."""
    channels = q.shape[-1]
    if 0 in q.shape or channels > HEAD_CHANNELS or channels % 8 or channels != v.shape[-1]:
        return False
    return {q.dtype, k.dtype, v.dtype} in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")})


def available() -> bool:
    """Whether programs are lowered for a GPU that runs cuDNN: one that is described, or this machine's."""
    return gpus.described() is not None or _machine_has_it()


@functools.cache
def _machine_has_it() -> bool:
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version.lower()


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(d)) v, [*B, H, N, d], [*B, H, M, d] -> [*B, H, N, d]; cuDNN wants heads after tokens."""
    *batch, heads, tokens, channels = q.shape
    q, k, v = (jnp.swapaxes(x, -2, -3).reshape(-1, x.shape[-2], heads, channels) for x in (q, k, v))
    return jnp.swapaxes(mesh.on_rows(_fused, q, k, v).reshape(*batch, tokens, heads, channels), -2, -3)


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


def takes(x: jax.Array, qkv: Map, proj: Map, heads: int) -> bool:
    """Whether this machine has cuDNN, and cuDNN supports these maps."""
    (weight, _), tokens = qkv, x.shape[-2]
    head = jax.ShapeDtypeStruct((*x.shape[:-2], tokens, weight.shape[-1] // (3 * heads)), weight.dtype)
    return available() and proj[0].dtype == weight.dtype and supported(head, head, head)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def self_attention(heads: int, x: jax.Array, qkv: Map, proj: Map) -> jax.Array:
    """Self-attention; arguments as in `kernels.attention`.

    cuDNN reads q, k and v as three maps write them; of one map's result, XLA would copy the thirds.  JAX differentiates
    cuDNN's attention for even numbers of tokens only, and a ViT has 197 or 257.  There x gets one more token, to which
    no other attends, rather than q, k, v, the result and all their gradients.
    """
    return _around(heads, 0, x, qkv, proj)


@self_attention.defjvp
def _derivative(heads, arguments, slopes):
    return jax.jvp(functools.partial(_around, heads, arguments[0].shape[-2] % 2), arguments, slopes)


def _around(heads, padding, x, qkv, proj):
    """Self-attention with `padding` more tokens inside."""
    (weight, bias), (*batch, tokens, _) = qkv, x.shape
    x = jnp.pad(x.astype(weight.dtype), [(0, 0)] * len(batch) + [(0, padding), (0, 0)])
    biases = (None,) * 3 if bias is None else jnp.split(bias, 3)
    maps = zip(mesh.gathered(tuple(jnp.split(weight, 3, axis=-1))), biases, strict=True)
    q, k, v = (linear(x, *one).reshape(-1, tokens + padding, heads, weight.shape[-1] // (3 * heads)) for one in maps)
    with jax.named_scope("attention"):
        y = mesh.on_rows(functools.partial(_attended, tokens), q, k, v)
    return linear(y.reshape(*batch, tokens + padding, -1), *proj)[..., :tokens, :]


def _attended(tokens, q, k, v):
    """cuDNN's attention, [B, N, H, d] -> the same, of which only the first `tokens` are attended to."""
    lengths = jnp.full(len(k), tokens, jnp.int32) if tokens < k.shape[1] else None
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
