"""The branch with attention on a Hopper GPU, in four kernels around cuDNN's attention.

The norm reads the stream and writes bfloat16; the first map writes q, k and v head by head, as cuDNN takes them; the
next one brings the result back to irreps; the second map, the layer scale and the sum read it, and the stream, and
write the stream.
"""

import jax

from equivit.kernels.attention import attend
from equivit.kernels.hopper import apart
from equivit.kernels.hopper import heads as heads_kernel
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
    normed = gpu.normed(*x, w, norm)
    qkv = heads_kernel.forward(*normed, w.first_lines, w.first_planes, w.first_bias, heads=heads)
    of_images = (a.reshape(-1, lines.shape[-2], *a.shape[1:]).swapaxes(1, 2) for a in qkv)
    attended = attend(*of_images).swapaxes(1, 2)
    second = apart.arranged((w.second_lines, w.second_planes), attended.shape[-1] // 8, axis=-2)
    w = w._replace(second_lines=second[0], second_planes=second[1])
    y_lines, y_planes = gpu.added(*x, apart.forward(attended.reshape(-1, *attended.shape[2:])), w)
    return y_lines.reshape(lines.shape), y_planes.reshape(planes.shape)
