"""The branch with attention on a Hopper GPU, in four kernels around cuDNN's attention.

The norm reads the stream and writes bfloat16; the first map writes q, k and v head by head, as cuDNN takes them; the
next one brings the result back to irreps; the second map, the layer scale and the sum read it, and the stream, and
write the stream.
"""

import jax

from equivit.kernels.attention import attend
from equivit.kernels.hopper import heads as heads_kernel
from equivit.kernels.hopper import irreps
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import gpu
from equivit.kernels.octic_branch.reference import Weights

NAME = "octic_attention"


def supported(lines: jax.Array, weights: Weights, heads: int, norm: Norm) -> bool:
    """Whether there are kernels for these dtypes, widths and heads."""
    c, dtype = lines.shape[-1], weights.first_lines.dtype
    return gpu.supported(lines, weights) and heads_kernel.supported(c, heads, dtype)


def forward(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, heads: int, norm: Norm
) -> tuple[jax.Array, jax.Array]:
    """The branch; arrays as in `octic_attention`."""
    w, x = Weights(*weights), (gpu.rows(lines), gpu.rows(planes))
    c = lines.shape[-1] // heads
    of_norm, of_first, of_sum = gpu.packed(w, heads_kernel.of_bias(w.first_bias, c))
    qkv = heads_kernel.forward(*gpu.normed(x, of_norm, norm), w.first_lines, w.first_planes, of_first, heads=heads)
    of_images = (a.reshape(-1, lines.shape[-2], *a.shape[1:]).swapaxes(1, 2) for a in qkv)
    attended = attend(*of_images).swapaxes(1, 2)
    second = irreps.arranged((w.second_lines, w.second_planes), c, axis=-2)
    y_lines, y_planes = gpu.added(x, irreps.forward(attended.reshape(-1, *attended.shape[2:])), second, of_sum)
    return y_lines.reshape(lines.shape), y_planes.reshape(planes.shape)
