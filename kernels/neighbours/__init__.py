"""Products of each block of pixels of a map on a torus with the blocks beside it."""

import functools
from collections.abc import Sequence

import jax

from equivit.kernels import dispatch
from equivit.kernels.neighbours import reference, tpu
from equivit.kernels.neighbours.reference import Neighbour, Pair

__all__ = ["Neighbour", "neighbour_products"]


def neighbour_products(
    x: jax.Array, stride: Pair, which: Sequence[Neighbour], *, implementation: str = "auto"
) -> jax.Array:
    """Products of a block's entries with entries of its neighbours and with 1, summed over all blocks of a map.

    The entries of a block are its rows, columns and channels, in this order.  Products are at the highest precision.

    Shapes: [B, H, W, C] -> [B, entries, entries of all neighbours + 1].

    Args:
      stride: size of a block in pixels, (rows, columns); it divides H and W.
      which: the neighbours.
      implementation: "reference" rolls the blocks, "tpu" cuts them from one padded array; all others are "tpu" on a
        TPU, else "reference".

    Raises:
      ValueError: an unknown implementation.
    """
    chosen, forms = dispatch.resolve("neighbour_products", implementation), {"reference": reference, "tpu": tpu}
    forms = {name: functools.partial(of.neighbour_products, stride=stride, which=which) for name, of in forms.items()}
    if chosen in forms:
        return forms[chosen](x)
    return jax.lax.platform_dependent(x, tpu=forms["tpu"], default=forms["reference"])
