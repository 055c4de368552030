"""Patch merging: between the stages of a Swin transformer the map halves and the width doubles."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, phases
from equivit.layers.window import Pair, fill_up
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

STRIDE = (2, 2)


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
        """The tokens merged at the phase that the content chooses, and that choice (Eq. 21 to 23 of A-PMerge).

        Args:
          x: [B, h w, width] on a torus, with an even grid.
          select: "output" takes the phase whose merged tokens have the largest norm, before a norm after them; "input"
            that of the largest norm of the tokens at the first of the four neighbours, which costs nothing.
        """
        x = x.reshape(len(x), *grid, -1)
        if select == "input":
            choice = shifts.strongest(phases.lattice_norms(x, STRIDE))
            y = self._at(x, choice)
        else:
            y, choice = _largest(self, x)
        return y, (grid[0] // 2, grid[1] // 2), choice

    def _at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """Merged at a phase of each map: [B, h, w, width] -> [B, h w / 4, 2 width]."""
        x = shifts.roll(x, -shifts.phases(choice.index, STRIDE))
        return self(x.reshape(len(x), -1, x.shape[-1]), (x.shape[1], x.shape[2]))[0]

    def _at_each_phase(self, x: jax.Array) -> jax.Array:
        """The linear map, after a norm before it, at all phases: [B, h, w, width] -> [2, 2, B, h/2, w/2, 2 width].

        The norm of four neighbours of means a_k and deviations d_k, (d_k + a_k - m) g / s + b with the mean m of all,
        comes out of the linear map W as (sum of g_k W_k (d_k + a_k - m)) / s + b W: a convolution of d, with what
        depends on the means added, and divided after it.
        """
        weight, width = self.reduction.weight[...], x.shape[-1]
        if not self.norm_first:
            return phases.convolved(x, _kernel(weight))
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scaled = self.norm.scale[...][:, None] * weight
        mean = x.mean(-1, keepdims=True)
        deviation = x - mean
        means = jnp.concatenate([jnp.roll(mean, (-i, -j), (1, 2)) for j in range(2) for i in range(2)], -1)
        square = jnp.square(deviation).mean(-1)
        variance = sum(jnp.roll(square, (-i, -j), (1, 2)) for j in range(2) for i in range(2)) / 4 + means.var(-1)
        means -= means.mean(-1, keepdims=True)
        y = phases.convolved(deviation, _kernel(scaled.astype(weight.dtype)))
        y += phases.by_phase(means) @ scaled.reshape(4, width, -1).sum(1)
        y *= phases.by_phase(jax.lax.rsqrt(variance + self.norm.eps))[..., None]
        return y + self.norm.bias[...] @ weight


def neighbours(x: jax.Array, grid: Pair) -> tuple[jax.Array, Pair]:
    """The 2 x 2 neighbours side by side, column by column, [*B, h w, C] -> [*B, (h/2) (w/2), 4 C], and the new grid."""
    x = fill_up(x.reshape(*x.shape[:-2], *grid, x.shape[-1]), (2, 2))
    *batch, h, w, channels = x.shape
    x = jnp.einsum("...hawbc->...hwbac", x.reshape(*batch, h // 2, 2, w // 2, 2, channels))
    return x.reshape(*batch, (h // 2) * (w // 2), 4 * channels), (h // 2, w // 2)


def _kernel(weight: jax.Array) -> jax.Array:
    """The linear map of four neighbours, [4 C, D], as a convolution [rows, columns, C, D]."""
    return jnp.swapaxes(weight.reshape(2, 2, -1, weight.shape[-1]), 0, 1)


@jax.custom_vjp
def _largest(merge: PatchMerging, x: jax.Array) -> tuple[jax.Array, Choice]:
    """`PatchMerging.adaptive` by the norm of what is merged.

    All phases are computed at once and one is kept.  Its gradient is that of merging at this phase alone, which takes
    neither the arithmetic nor the memory of the others.
    """
    with jax.named_scope("linear"):
        y = merge._at_each_phase(x)
        y = y.reshape(4, len(x), -1, y.shape[-1])
        choice = shifts.strongest(jnp.sqrt(jnp.square(y).sum((2, 3))).T)
        y = jnp.take_along_axis(y, choice.index[None, :, None, None], 0, mode="promise_in_bounds")[0].astype(x.dtype)
    return y if merge.norm_first else merge.norm(y), choice


def _largest_forward(merge, x):
    y, choice = _largest(merge, x)
    return (y, choice), (merge, x, choice)


def _largest_backward(kept, slopes):
    merge, x, choice = kept
    return jax.vjp(lambda merge, x: merge._at(x, choice), merge, x)[1](slopes[0])


_largest.defvjp(_largest_forward, _largest_backward)
