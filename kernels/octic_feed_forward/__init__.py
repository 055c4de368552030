"""The MLP of an octic field: linear map, GELU of the values on the group, and linear map.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Sections 3.2.1 and 3.2.3.
"""

from typing import Any

from kernels import dispatch
from kernels.isotypic_linear import Field, Linear, linear
from kernels.octic_linear_gelu import octic_linear_gelu

NAME = "octic_feed_forward"


def octic_feed_forward(field: Field, first: Linear, second: Linear, *, implementation: str = "auto") -> Field:
    """The MLP of a field.

    Args:
      field: lines [4, *B, N, C] and planes [2, *B, N, 2C].
      first: weights [4, C, F] and [2C, 2F]; bias [F].
      second: weights [4, F, C] and [2F, 2C]; bias [C] or None.
      implementation: "gpu" are kernels for a Hopper GPU, of the forward and of the backward pass, if they support the
        arrays; others as for `octic_linear_gelu`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    chosen = dispatch.chosen(NAME, implementation)
    if chosen == "gpu" and dispatch.hopper():
        from kernels.octic_feed_forward import gpu  # deferred: other platforms need no Mosaic

        if gpu.supported(field, first, second):
            return gpu.feed_forward(field, first, second)
    (lines, planes), (w_lines, w_planes) = field, first[0]
    bias: Any = first[1]
    arrays = lines, planes, w_lines, w_planes, bias.astype(w_lines.dtype)
    return linear(octic_linear_gelu(*arrays, implementation=implementation), second)
