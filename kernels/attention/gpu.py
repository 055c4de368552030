"""cuDNN's flash attention, for NVIDIA GPUs.

It needs a GPU when a program is traced: a machine without a GPU lowers the reference for CUDA, unless
`gpus.lowering_for` describes one.
"""

import functools

import jax
import jax.numpy as jnp

from kernels import gpus, mesh

HEAD_CHANNELS = 128  # the most that cuDNN supports on every GPU; must be a multiple of 8


def supported(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Whether cuDNN supports these dtypes and head channels, and the batch is not empty."""
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
