"""Convolution, batch norm, ReLU: what decoders of label maps are made of."""

import jax
from flax import nnx

from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import Conv, Pair

INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # as MMSegmentation begins


class ConvUnit(nnx.Module):
    """A convolution that keeps the size of a map, without bias; batch norm; ReLU.

    Shapes: [*B, h, w, in_channels] -> [*B, h, w, width].

    Args:
      kernel: of odd sizes.
      mode: of its padding (`layers/convolution.py`).
    """

    def __init__(self, in_channels: int, width: int, *, kernel: Pair, mode: str, rngs: nnx.Rngs):
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = Conv(in_channels, width, kernel=kernel, padding=padding, mode=mode, bias=False, rngs=rngs)
        self.conv.kernel.set_value(INIT(rngs.params(), self.conv.kernel.shape))
        self.norm = BatchNorm(width)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return jax.nn.relu(self.norm(self.conv(x), train=train))
