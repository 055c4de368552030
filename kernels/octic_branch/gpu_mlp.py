"""The branch with the MLP on a Hopper GPU, in three kernels.

The norm reads the stream and writes bfloat16; the first map and its GELU write the hidden field; the second map, the
layer scale and the sum read it, and the stream, and write the stream.  At ViT-H, 16,384 tokens and a float32 stream
this moves 674 MB, where XLA's products and fusions move about 1 GB.

One kernel for both maps would move 170 MB, but does not fit: the sums of 64 rows of the result are 82,000 float32
numbers, more than the 65,536 registers of a multiprocessor, and the rows of the norm take 164 of 227 KB of shared
memory.  With 32 rows the tensor cores, whose instructions have 64, would be half idle; with the result split between
the two blocks of a cluster, both would have to compute the hidden field, or exchange 16 KB for every 32 channels of it.
"""

import jax

from equivit.kernels.hopper import gelu
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import gpu
from equivit.kernels.octic_branch.reference import Weights

NAME = "octic_mlp"


def supported(lines: jax.Array, weights: Weights, norm: Norm) -> bool:
    """Whether there are kernels for these dtypes and widths."""
    (c, f), dtype = weights.first_lines.shape[1:], weights.first_lines.dtype
    return gpu.supported(lines, weights) and gelu.supported(c, f, dtype)


def forward(lines: jax.Array, planes: jax.Array, *weights: jax.Array, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """The branch; arrays as in `octic_mlp`."""
    w, x = Weights(*weights), (gpu.rows(lines), gpu.rows(planes))
    of_norm, of_first, of_sum = gpu.packed(w, gelu.of_bias(w.first_bias))
    hidden = gelu.forward(*gpu.normed(x, of_norm, norm), w.first_lines, w.first_planes, of_first)
    y_lines, y_planes = gpu.added(x, hidden, (w.second_lines, w.second_planes), of_sum)
    return y_lines.reshape(lines.shape), y_planes.reshape(planes.shape)
