"""The first linear map of an octic MLP and its GELU on a TPU (Pallas, Mosaic): the hidden field is written once."""

import jax
import jax.numpy as jnp

from equivit.kernels.pointwise import octic_gelu
from equivit.kernels.tpu import blocks

NAME = "octic_linear_gelu"
# The share of `blocks.VMEM_BYTES` for the weights, which stay in VMEM; a third is left for the fields.  The paper's
# widths fit up to ViT-e (6.6 MiB) in bfloat16, and up to ViT-G (6.5 MiB) in float32.
WEIGHT_BYTES = 8 * 2**20


def supported(lines: jax.Array, *weights: jax.Array) -> bool:
    """Whether the weights fit in VMEM beside tiles of the fields."""
    size = sum(a.nbytes for a in weights)
    return size <= WEIGHT_BYTES and blocks.supported(lines.dtype, weights[0].shape[1:], size)


def forward(
    lines: jax.Array, planes: jax.Array, w_lines: jax.Array, w_planes: jax.Array, bias: jax.Array, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """The map and its GELU; arrays as in `octic_linear_gelu`."""
    channels = len(bias)

    def tile(rows, lanes, lines, planes, w_lines, w_planes, bias, y_lines, y_planes):
        h = [blocks.dot(lines[i, rows, :], w_lines[i, :, lanes]) for i in range(4)]
        h[0] += bias[0, lanes].astype(jnp.float32)
        for columns in (lanes, blocks.second_copy(lanes, channels)):
            h += [blocks.dot(planes[row, rows, :], w_planes[:, columns]) for row in (0, 1)]
        blocks.write(y_lines, y_planes, rows, lanes, octic_gelu(h))

    weights = (w_lines, w_planes, bias[None])
    return blocks.by_tiles(tile, (lines, planes), weights, channels=channels, name=NAME, interpret=interpret)
