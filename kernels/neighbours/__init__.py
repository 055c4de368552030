"""The blocks of pixels beside each block of a map on a torus."""

from collections.abc import Sequence

import jax

from equivit.kernels import dispatch
from equivit.kernels.neighbours import reference, tpu
from equivit.kernels.neighbours.reference import Neighbour

__all__ = ["Neighbour", "neighbours"]


def neighbours(planes: jax.Array, which: Sequence[Neighbour], *, implementation: str = "auto") -> list[jax.Array]:
    """Some pixels of the blocks that lie beside each block of a map on a torus.

    Shapes: [B, sh, sw, C, h, w], the pixels of a block before its position -> [B, rows, columns, C, h, w] for each
    neighbour.

    Args:
      which: the neighbours; a lag is in blocks down, not negative, and to the right.
      implementation: "reference" rolls these pixels alone, "tpu" cuts them from one padded map; all others are "tpu" on
        a TPU, else "reference".

    Raises:
      ValueError: an unknown implementation.
    """
    chosen, forms = dispatch.resolve("neighbours", implementation), {"reference": reference, "tpu": tpu}
    if chosen in forms:
        return forms[chosen].neighbours(planes, which)

    def on_tpu(planes: jax.Array) -> list[jax.Array]:
        return tpu.neighbours(planes, which)

    def plain(planes: jax.Array) -> list[jax.Array]:
        return reference.neighbours(planes, which)

    return jax.lax.platform_dependent(planes, tpu=on_tpu, default=plain)
