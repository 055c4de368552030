"""Self-attention of a field: linear map to queries, keys and values, softmax attention, and linear map.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.2.
"""

import functools

import jax

from equivit.kernels import dispatch
from equivit.kernels.isotypic_attention import reference
from equivit.kernels.isotypic_attention.reference import head_by_head, irrep_by_irrep
from equivit.kernels.isotypic_linear import Field, Linear

__all__ = ["head_by_head", "irrep_by_irrep", "isotypic_attention"]
NAME = "isotypic_attention"


def isotypic_attention(field: Field, qkv: Linear, proj: Linear, heads: int, *, implementation: str = "auto") -> Field:
    """Self-attention of a field.

    Args:
      field: lines [i, *B, N, C] and planes [2, *B, N, 2C], or lines alone.
      qkv: weights [i, C, 3C] and [2C, 6C], outputs ordered (q | k | v) x heads x channels; bias [3C] or None.
      proj: weights [i, C, C] and [2C, 2C]; bias [C] or None.
      heads: kernels support at most 128 channels per head.
      implementation: "tpu" and "interpret" as for `attention`; others as for `attend`.

    Raises:
      ValueError: an unknown implementation, or no kernel for these shapes or dtypes.
    """
    chosen = dispatch.resolve(NAME, implementation)
    if chosen in ("tpu", "interpret"):
        from equivit.kernels.isotypic_attention import tpu  # deferred: other platforms need no Mosaic

        parts = tuple(w.shape[-1] // (3 * heads) for x, w in zip(field, qkv[0], strict=True) for _ in x)
        if tpu.supported(field, parts, heads):
            kernel = functools.partial(tpu.attention, chosen, parts, heads)
            if not tpu.supported(field, parts, heads, backward=True):
                # With the reference's derivative: without a backward kernel, XLA would have to move lanes.
                kernel = jax.custom_jvp(kernel)
                kernel.defjvp(functools.partial(jax.jvp, functools.partial(reference.isotypic_attention, heads=heads)))
            return kernel(field, qkv, proj)
        if implementation != "auto":
            raise dispatch.no_kernel(NAME, implementation, field, f" and {heads} heads")
        implementation = "xla"
    if chosen == "gpu" and dispatch.hopper():
        from equivit.kernels.isotypic_attention import gpu

        if gpu.supported(field, qkv, proj, heads):
            return gpu.attention(field, qkv, proj, heads)
    return reference.isotypic_attention(field, qkv, proj, heads, implementation=implementation)
