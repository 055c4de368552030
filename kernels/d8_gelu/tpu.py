"""The GELU of an octic field and its derivative on a TPU (Pallas, Mosaic): one pass over tiles of the field."""

import jax
from jax.typing import DTypeLike

from equivit.kernels.pointwise import octic_gelu, octic_gelu_gradient
from equivit.kernels.tpu import blocks

NAME = "d8_gelu"


def supported(channels: int, dtype: DTypeLike, fields: int) -> bool:
    """Whether tiles of the `fields` read and the one field written fit in VMEM."""
    return blocks.supported(dtype, [channels] * (fields + 1))


def forward(lines: jax.Array, planes: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The GELU: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same."""

    def tile(rows, lanes, lines, planes, y_lines, y_planes):
        blocks.write(y_lines, y_planes, rows, lanes, octic_gelu(blocks.read(lines, planes, rows, lanes)))

    return blocks.by_tiles(tile, (lines, planes), channels=lines.shape[-1], name=NAME, interpret=interpret)


def backward(*fields: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The gradient of the input, from the input and the gradient of the output; arrays as in `forward`."""

    def tile(rows, lanes, lines, planes, d_lines, d_planes, dx_lines, dx_planes):
        fields = (blocks.read(*field, rows, lanes) for field in ((lines, planes), (d_lines, d_planes)))
        blocks.write(dx_lines, dx_planes, rows, lanes, octic_gelu_gradient(*fields))

    channels = fields[0].shape[-1]
    return blocks.by_tiles(tile, fields, channels=channels, name=f"{NAME}_backward", interpret=interpret)
