"""Patch merging: halve the map and double the width between the stages of a Swin transformer."""

import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.kernels.phases import Moments, at_largest, token_moments
from equivit.layers import dense, polyphase
from equivit.layers.polyphase import STRIDE
from equivit.models.swin.window import Pair, fill_up
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice


class PatchMerging(nnx.Module):
    """Four neighbours, 2 x 2, become one token of twice the width (Swin, Section 3.1).

    The norm of the four concatenated tokens, then a linear map; with `norm_first=False`, the linear map, then the norm
    (SwinV2).  Maps with odd sides are zero-padded.

    Shapes: [*B, h w, width] -> [*B, ceil(h / 2) ceil(w / 2), 2 width].
    """

    def __init__(
        self, width: int, *, norm_first: bool, eps: float, init: Initializer = dense.WEIGHT_INIT, rngs: nnx.Rngs
    ):
        self.norm = dense.LayerNorm((4 if norm_first else 2) * width, eps=eps)
        self.reduction = dense.Linear(4 * width, 2 * width, bias=False, init=init, rngs=rngs)
        self.norm_first = norm_first

    def __call__(self, x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
        """The merged tokens of a map, and their grid."""
        y, merged = neighbours(x, grid)
        y = self.reduction(self.norm(y)) if self.norm_first else self.norm(self.reduction(y).astype(x.dtype))
        return y.astype(x.dtype), merged  # linear maps compute in the dtype of their weight; the stream keeps its dtype

    def adaptive(self, x: jax.Array, grid: Pair, select: str) -> tuple[jax.Array, Pair, Choice]:
        """The tokens merged at the phase chosen by the content, and the choice (A-PMerge, Eq. 21 to 23).

        Args:
          x: [B, h w, width] on a torus.
          select: takes the largest norm of the merged tokens, before a final norm layer ("output"), or of the first of
            the four neighbours ("input").

        Raises:
          ValueError: the grid is not even.
        """
        errors.sides("PatchMerging", "the map", grid, STRIDE, "an adaptive layer needs it")
        y, choice = polyphase.at_chosen_phase(self, x.reshape(len(x), *grid, x.shape[-1]), STRIDE, select)
        return y, (grid[0] // 2, grid[1] // 2), choice

    def at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """The tokens merged at the chosen phase of each map: [B, h, w, width] -> [B, h w / 4, 2 width]."""
        b, h, w, width = x.shape
        rolled = shifts.roll(x, -shifts.phases(choice.index, STRIDE))
        return self(rolled.reshape(b, h * w, width), (h, w))[0]

    def normed(self, y: jax.Array) -> jax.Array:
        return y if self.norm_first else self.norm(y)

    def at_largest(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The linear map, with a norm before it, at the phase with the largest norm; and the norms of all four.

        With mean m and deviation s of four neighbours, the norm and the linear map W give (sum of g_k W_k x_k - m sum
        of g_k W_k) / s + b W: a convolution of x, then shifted and scaled.

        Shapes: [B, h, w, width] -> [B, h/2, w/2, 2 width] and [B, 4].
        """
        weight = self.reduction.weight[...]
        if not self.norm_first:
            return at_largest(x, _kernel(weight))
        mean, variance = _moments(x)
        scaled = self.norm.scale[...][:, None] * weight
        moments = Moments(mean, jax.lax.rsqrt(variance + self.norm.eps), scaled.sum(0))
        return at_largest(x, _kernel(scaled.astype(weight.dtype)), self.norm.bias[...] @ weight, moments)


def neighbours(x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
    """Concatenate 2 x 2 neighbours, column by column: [*B, h w, C] -> [*B, (h/2) (w/2), 4 C], and the new grid."""
    x = fill_up(x.reshape(*x.shape[:-2], *grid, x.shape[-1]), (2, 2))
    *batch, h, w, channels = x.shape
    x = jnp.einsum("...hawbc->...hwbac", x.reshape(*batch, h // 2, 2, w // 2, 2, channels))
    return x.reshape(*batch, (h // 2) * (w // 2), 4 * channels), (h // 2, w // 2)


def _kernel(weight: jax.Array) -> jax.Array:
    """The linear map of four neighbours, [4 C, D], as a convolution [rows, columns, C, D]."""
    return jnp.swapaxes(weight.reshape(2, 2, -1, weight.shape[-1]), 0, 1)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the 2 x 2 neighbours at each position: [B, h, w, C] -> [B, h, w], in at least float32."""
    means, variances = ([jnp.roll(a, (-i, -j), (1, 2)) for i in range(2) for j in range(2)] for a in token_moments(x))
    mean = functools.reduce(operator.add, means) / 4
    parts = (variance + jnp.square(m - mean) for m, variance in zip(means, variances, strict=True))
    return mean, functools.reduce(operator.add, parts) / 4
