"""The position whose view of a map comes first, among all positions.

The view of a position is its map, a torus, rolled until that position comes first.  Its hash has 64 bits, in two words.
Hashes of pixels are combined to hashes of strips of pixels, each from neighbouring shorter strips, until a strip spans
the axis; strips are combined to blocks likewise.
"""

import jax

from equivit.kernels import dispatch
from equivit.kernels.views import gpu, reference

__all__ = ["greatest_view"]


def greatest_view(energies: jax.Array, pixels: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """The position of the largest energy; among equals, the one whose view has the greatest hash.

    It follows a shift of the map to the last bit, and is the same for each implementation.

    Shapes: energies [B, H, W], none negative, and hashes of pixels [B, 2, H, W] uint32 -> [B] int32, row-major.

    Args:
      implementation: "reference" takes few additions, "gpu" few copies; all others are "gpu" on an NVIDIA GPU, else
        "reference".

    Raises:
      ValueError: an unknown implementation.
    """
    chosen, forms = dispatch.resolve("greatest_view", implementation), {"reference": reference, "gpu": gpu}
    if chosen in forms:
        return forms[chosen].greatest_view(energies, pixels)
    return jax.lax.platform_dependent(energies, pixels, cuda=gpu.greatest_view, default=reference.greatest_view)
