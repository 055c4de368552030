"""Softmax attention.

`attend` takes queries, keys and values per head, `attention` all heads side by side, `self_attention` tokens.
"""

import functools

import jax

from equivit.kernels import dispatch
from equivit.kernels.attention import gpu, reference
from equivit.kernels.attention.reference import head_by_head, side_by_side, split_heads
from equivit.kernels.product import Map, linear

__all__ = ["attend", "attention", "head_by_head", "self_attention", "side_by_side", "split_heads", "weights"]

NAME = "attention"


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None = None,
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(scale q k^T + bias) v for each head; the softmax is in at least float32.

    Shapes: q [*B, H, N, d], k [*B, H, M, d], v [*B, H, M, e] -> [*B, H, N, e].

    Args:
      bias: broadcasts to [*B, H, N, M]; None for 0.
      scale: None for 1 / sqrt(d).
      implementation: "gpu" is cuDNN's flash attention, for bfloat16 and float16, no bias, and 8 to 128 channels a head,
        in multiples of 8.  "auto" uses it on an NVIDIA GPU.  All others use the reference.

    Raises:
      ValueError: an unknown implementation, or no kernel for these arrays.
    """
    chosen = dispatch.AUTO.get() if implementation == "auto" else dispatch.resolve("attend", implementation)
    with jax.named_scope("attention"):
        takes = chosen in ("auto", "gpu") and bias is None and scale is None and gpu.supported(q, k, v)
        if implementation == "gpu":
            if not takes:
                raise dispatch.no_kernel("attend", implementation, (q, k, v))
            return gpu.attend(q, k, v)
        if takes and gpu.available():
            return jax.lax.platform_dependent(q, k, v, cuda=gpu.attend, default=reference.attend)
        return reference.attend(q, k, v, bias, scale)


def attention(qkv: jax.Array, heads: int, *, implementation: str = "auto") -> jax.Array:
    """Softmax attention of all heads, from one linear map with columns (q | k | v) x heads x head channels.

    Shapes: [*B, N, 3 H d] -> [*B, N, H d].

    Args:
      heads: H.
      implementation: "tpu" is a kernel that reads the heads in place (`tpu.py`), for 100 to 400 tokens, H d a multiple
        of 128 and d at most 128.  "interpret" runs it anywhere, slowly.  Others as for `attend`.

    Raises:
      ValueError: an unknown implementation, a width that is not 3 H d, or no kernel for this shape or dtype.
    """
    chosen = dispatch.AUTO.get() if implementation == "auto" else dispatch.resolve(NAME, implementation)
    if qkv.ndim < 2 or qkv.shape[-1] % (3 * heads):
        raise ValueError(f"{NAME}: qkv {qkv.shape} must be [*B, N, 3 H d]; {heads=} needs multiples of {3 * heads}.")
    if chosen in ("tpu", "interpret"):
        from equivit.kernels.attention import arranged  # deferred: other platforms need no Mosaic

        parts = (qkv.shape[-1] // (3 * heads),)
        if arranged.supported((qkv[None],), parts, heads):
            with jax.named_scope("attention"):
                return arranged.attend(chosen, parts, heads, qkv[None])[0][0]
        if implementation != "auto":
            raise dispatch.no_kernel(NAME, implementation, qkv)
        implementation = "xla"
    return side_by_side(attend(*split_heads(qkv, heads), implementation=implementation))


def self_attention(x: jax.Array, qkv: Map, proj: Map, heads: int) -> jax.Array:
    """Linear map to queries, keys and values, `attention`, and linear map.

    Shapes: [*B, N, C] -> [*B, N, D].

    Args:
      qkv: weight [C, 3 H d], columns (q | k | v) x heads x head channels, and bias.
      proj: weight [H d, D], and bias.
      heads: H.
    """
    if dispatch.AUTO.get() in ("auto", "gpu") and gpu.takes(x, qkv, proj, heads):
        fused, plain = (functools.partial(form, heads) for form in (gpu.self_attention, reference.self_attention))
        return jax.lax.platform_dependent(x, qkv, proj, cuda=fused, default=plain)
    return linear(attention(linear(x, *qkv), heads), *proj)


def weights(q: jax.Array, k: jax.Array) -> jax.Array:
    """Attention weights, softmax(q k^T / sqrt(d)) in at least float32: [*B, H, N, M]."""
    with jax.named_scope("attention"):
        return jax.nn.softmax(reference.logits(q, k))
