"""The blocks of pixels beside each block of a map on a torus."""

from collections.abc import Sequence

import jax

from equivit.kernels import dispatch
from equivit.kernels.neighbours import reference, tpu
from equivit.kernels.neighbours.reference import Pair

__all__ = ["neighbours"]


def neighbours(
    planes: jax.Array, lags: Sequence[Pair], spans: Sequence[tuple[Pair, Pair]], *, implementation: str = "auto"
) -> list[jax.Array]:
    """Some pixels of the blocks that lie further by each lag, for each block of a map.

    Shapes: [B, sh, sw, C, h, w], the pixels of a block before its position -> [B, rows, columns, C, h, w] for each lag.

    Args:
      lags: blocks down, none negative, and to the right.
      spans: rows and columns of a block's pixels, each (start, stop), for each lag.
      implementation: "reference" rolls these pixels alone, "tpu" cuts them from one padded map; all others are "tpu" on
        a TPU, else "reference".

    Raises:
      ValueError: an unknown implementation.
    """
    chosen, forms = dispatch.chosen("neighbours", implementation), {"reference": reference, "tpu": tpu}
    if chosen in forms:
        return forms[chosen].neighbours(planes, lags, spans)

    def on_tpu(planes: jax.Array) -> list[jax.Array]:
        return tpu.neighbours(planes, lags, spans)

    def plain(planes: jax.Array) -> list[jax.Array]:
        return reference.neighbours(planes, lags, spans)

    return jax.lax.platform_dependent(planes, tpu=on_tpu, default=plain)
