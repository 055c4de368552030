"""Patch merging: between the stages of a Swin transformer the map halves and the width doubles."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, phases
from equivit.layers.by_image import by_image
from equivit.layers.window import Pair, fill_up
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

STRIDE = (2, 2)
# Maps of an image that are smaller are merged at all phases together: the weights are larger than they.
IMAGE_BYTES = 2**20


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
          x: [B, h w, width] on a torus, with an even grid.
          select: "output" takes the phase whose merged tokens have the largest norm, before a norm after them; "input"
            that of the largest norm of the tokens at the first of the four neighbours, which costs nothing.
        """
        if select == "input":
            choice = shifts.strongest(phases.lattice_norms(x.reshape(len(x), *grid, -1), STRIDE))
            y = self._at(x, grid, choice)
        else:
            y, choice = _largest(self, x, grid)
        return y, (grid[0] // 2, grid[1] // 2), choice

    def _at(self, x: jax.Array, grid: Pair, choice: Choice) -> jax.Array:
        """Merged at a phase of each map."""
        rolled = shifts.roll(x.reshape(len(x), *grid, -1), -shifts.phases(choice.index, STRIDE))
        return self(rolled.reshape(x.shape), grid)[0]

    def _at_each_phase(self) -> Callable[[jax.Array], list[jax.Array]]:
        """The linear map, after a norm before it, at all phases: [B, h, w, width] -> [B, h/2, w/2, 2 width] for each.

        A norm of mean m and deviation s of four neighbours comes out of the linear map W as (sum of g_k W_k x_k - m sum
        of g_k W_k) / s + b W: a convolution of x, shifted and scaled after it.
        """
        weight = self.reduction.weight[...]
        if not self.norm_first:
            filters = phases.filters(_kernel(weight))
            return lambda x: [y for row in phases.convolved(x, filters) for y in row]
        scaled = self.norm.scale[...][:, None] * weight
        filters, total = phases.filters(_kernel(scaled.astype(weight.dtype))), scaled.sum(0)
        bias = self.norm.bias[...] @ weight

        def at_each_phase(x):
            mean, variance = _moments(x)
            scale = phases.by_phase(jax.lax.rsqrt(variance + self.norm.eps))[..., None]
            offset = phases.by_phase(mean)[..., None]
            y = phases.convolved(x, filters)
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
    mean = sum(means) / 4
    return mean, sum(v + jnp.square(m - mean) for m, v in zip(means, variances, strict=True)) / 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _largest(merge: PatchMerging, x: jax.Array, grid: Pair) -> tuple[jax.Array, Choice]:
    """`PatchMerging.adaptive` by the norm of what is merged.

    All phases are computed at once and one is kept.  Its gradient is that of merging at this phase alone, which takes
    neither the arithmetic nor the memory of the others.
    """

    def largest(x):
        maps = at_each_phase(x.reshape(-1, *grid, x.shape[-1]))
        norms = jnp.sqrt(jnp.stack([jnp.square(y).sum((1, 2, 3)) for y in maps], 1))
        index = shifts.strongest(norms).index[:, None, None, None]
        y = functools.reduce(lambda y, k: jnp.where(index == k, maps[k], y), range(1, 4), maps[0])
        return y.reshape(len(x), -1, y.shape[-1]).astype(x.dtype), norms[:, None]

    with jax.named_scope("linear"):
        at_each_phase = merge._at_each_phase()
        y, norms = by_image(largest, x, least=IMAGE_BYTES)
    return y if merge.norm_first else merge.norm(y), shifts.strongest(norms[:, 0])


def _largest_forward(merge, x, grid):
    y, choice = _largest(merge, x, grid)
    return (y, choice), (merge, x, choice)


def _largest_backward(grid, kept, slopes):
    merge, x, choice = kept
    return jax.vjp(lambda merge, x: merge._at(x, grid, choice), merge, x)[1](slopes[0])


_largest.defvjp(_largest_forward, _largest_backward)
