"""Patch merging: between the stages of a Swin transformer the map halves and the width doubles."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.layers import dense, polyphase
from equivit.layers.polyphase import STRIDE
from equivit.models.swin.window import Pair, fill_up
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice


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

    def adaptive(self, x: jax.Array, grid: Pair, select: str) -> tuple[jax.Array, Pair, Choice]:
        """The tokens merged at the phase that the content chooses, and that choice (A-PMerge, Eq. 21 to 23).

        Args:
          x: [B, h w, width] on a torus.
          select: "output" takes the phase whose merged tokens have the largest norm, before a norm after them; "input"
            that of the largest norm of the tokens at the first of the four neighbours, which costs nothing.

        Raises:
          ValueError: the grid is not even.
        """
        errors.sides("PatchMerging", "the map", grid, STRIDE, "an adaptive layer needs it")
        x = x.reshape(len(x), *grid, x.shape[-1])
        if select == "input":
            choice = shifts.strongest(polyphase.lattice_norms(x, STRIDE))
            y = self.at(x, choice)
        else:
            y, choice = polyphase.largest_phase(self, x)
        return y, (grid[0] // 2, grid[1] // 2), choice

    def at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """Merged at a phase of each map: [B, h, w, width] -> [B, h w / 4, 2 width]."""
        b, h, w, width = x.shape
        rolled = shifts.roll(x, -shifts.phases(choice.index, STRIDE))
        return self(rolled.reshape(b, h * w, width), (h, w))[0]

    def normed(self, y: jax.Array) -> jax.Array:
        """Merged tokens after the norm that comes after the linear map, if one does."""
        return y if self.norm_first else self.norm(y)

    def at_each_phase(self) -> Callable[[jax.Array], list[jax.Array]]:
        """The linear map, after a norm before it, at all phases: [B, h, w, width] -> [B, h/2, w/2, 2 width] for each.

        A norm of mean m and deviation s of four neighbours comes out of the linear map W as (sum of g_k W_k x_k - m sum
        of g_k W_k) / s + b W: a convolution of x, shifted and scaled after it.
        """
        weight = self.reduction.weight[...]
        if not self.norm_first:
            filters = polyphase.filters(_kernel(weight))
            return lambda x: [y for row in polyphase.convolved(x, filters) for y in row]
        scaled = self.norm.scale[...][:, None] * weight
        filters, total = polyphase.filters(_kernel(scaled.astype(weight.dtype))), scaled.sum(0)
        bias = self.norm.bias[...] @ weight

        def at_each_phase(x):
            mean, variance = _moments(x)
            scale = polyphase.by_phase(jax.lax.rsqrt(variance + self.norm.eps))[..., None]
            offset = polyphase.by_phase(mean)[..., None]
            y = polyphase.convolved(x, filters)
            return [(y[p][q] - offset[p, q] * total) * scale[p, q] + bias for p in range(2) for q in range(2)]

        return at_each_phase


def neighbours(x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
    """The 2 x 2 neighbours side by side, column by column, [*B, h w, C] -> [*B, (h/2) (w/2), 4 C], and the new grid."""
    x = fill_up(x.reshape(*x.shape[:-2], *grid, x.shape[-1]), (2, 2))
    *batch, h, w, channels = x.shape
    x = jnp.einsum("...hawbc->...hwbac", x.reshape(*batch, h // 2, 2, w // 2, 2, channels))
    return x.reshape(*batch, (h // 2) * (w // 2), 4 * channels), (h // 2, w // 2)


def _kernel(weight: jax.Array) -> jax.Array:
    """The linear map of four neighbours, [4 C, D], as a convolution [rows, columns, C, D]."""
    return jnp.swapaxes(weight.reshape(2, 2, -1, weight.shape[-1]), 0, 1)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the four neighbours from each place on: [B, h, w, C] -> [B, h, w], in at least float32."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = x.mean(-1)
    means, variances = (
        [jnp.roll(a, (-i, -j), (1, 2)) for i in range(2) for j in range(2)]
        for a in (mean, jnp.square(x - mean[..., None]).mean(-1))
    )
    mean = functools.reduce(operator.add, means) / 4
    parts = (variance + jnp.square(m - mean) for m, variance in zip(means, variances, strict=True))
    return mean, functools.reduce(operator.add, parts) / 4
