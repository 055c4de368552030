"""Patch merging: between the stages of a Swin transformer the map halves and the width doubles."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense
from equivit.layers.window import Pair, fill_up


class PatchMerging(nnx.Module):
    """Four neighbours, 2 x 2, become one token of twice the width (Swin, Section 3.1).

    Norm of the four side by side, then a linear map; with `norm_first=False` the linear map, then the norm (SwinV2).
    A map of odd sides is filled up with zeros.

    Shapes: [*B, h w, width] -> [*B, ceil(h / 2) ceil(w / 2), 2 width].
    """

    def __init__(self, width: int, *, norm_first: bool, eps: float, rngs: nnx.Rngs):
        self.norm = dense.LayerNorm((4 if norm_first else 2) * width, eps=eps)
        self.reduction = dense.Linear(4 * width, 2 * width, bias=False, rngs=rngs)
        self.norm_first = norm_first

    def __call__(self, x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
        """The merged tokens of a map, and its grid."""
        y, merged = neighbours(x, grid)
        y = self.reduction(self.norm(y)) if self.norm_first else self.norm(self.reduction(y).astype(x.dtype))
        return y.astype(x.dtype), merged  # a linear map computes in the dtype of its weight, the stream keeps its own


def neighbours(x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
    """The 2 x 2 neighbours side by side, column by column, [*B, h w, C] -> [*B, (h/2) (w/2), 4 C], and the new grid."""
    x = fill_up(x.reshape(*x.shape[:-2], *grid, x.shape[-1]), (2, 2))
    *batch, h, w, channels = x.shape
    x = jnp.einsum("...hawbc->...hwbac", x.reshape(*batch, h // 2, 2, w // 2, 2, channels))
    return x.reshape(*batch, (h // 2) * (w // 2), 4 * channels), (h // 2, w // 2)
