"""Softmax attention of all heads on a CPU: calls of `attention_cpu.cc`, where it is explained, or
`attention_bfloat16_cpu.cc`.

Shapes: each array of qkv [k, *B, N, 3 H c], with a part of every head's vector in each of its k rows, columns ordered
(q | k | v) x heads x channels -> [k, *B, N, H c].
"""

import jax
import numpy as np

from kernels import cpu


def supported(*qkv: jax.Array) -> bool:
    """Whether there is a kernel for these arrays: of one dtype that it has, and it has been compiled."""
    return cpu.supported(*qkv, in_bfloat16=True)


def forward(*qkv: jax.Array, heads: int) -> tuple[jax.Array, ...]:
    """The weighted sums of v."""
    results = [jax.ShapeDtypeStruct((*a.shape[:-1], a.shape[-1] // 3), a.dtype) for a in qkv]
    return cpu.call("equivit_attention", qkv, results, heads=np.int64(heads))


def backward(*arrays: jax.Array, heads: int) -> tuple[jax.Array, ...]:
    """The gradients at qkv, from these arrays and the gradients at the results."""
    qkv = arrays[: len(arrays) // 2]
    return cpu.call("equivit_attention_backward", arrays, cpu.like(qkv), heads=np.int64(heads))
