"""Rows and columns of maps, each map at its own places."""

import jax

from equivit.kernels import dispatch
from equivit.kernels.gather import reference, tpu

__all__ = ["gather"]


def gather(x: jax.Array, rows: jax.Array, columns: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """The entries of each map where its rows and its columns cross, around the torus.

    Shapes: x [B, H, W, ...], rows [B, h] and columns [B, w], integers modulo H and W -> [B, h, w, ...].

    Args:
      implementation: "reference" reads entry by entry, which is slow on a TPU.  "tpu" multiplies by one-hot matrices;
        a NaN or an infinity spreads over its map.  All others are "tpu" for float32 and bfloat16 on a TPU, else
        "reference".

    Raises:
      ValueError: an unknown implementation, or "tpu" for maps of another dtype.
    """
    chosen = dispatch.resolve("gather", implementation)
    on_tpu = {"tpu": tpu.gather} if x.dtype in tpu.DTYPES else {}
    if implementation == "tpu" and not on_tpu:
        known = ", ".join(dtype.name for dtype in tpu.DTYPES)
        raise ValueError(f"gather: implementation='tpu' multiplies maps of {known}, not {x.dtype}.")
    if form := {"reference": reference.gather, **on_tpu}.get(chosen):
        return form(x, rows, columns)
    return jax.lax.platform_dependent(x, rows, columns, default=reference.gather, **on_tpu)
