"""Strided pooling at a phase chosen by the content.

A depthwise convolution on a torus is applied at one phase (row, column) of its stride: the phase with the largest
output norm over all heads ("Making Vision Transformers Truly Shift-Equivariant", Eq. 21 to 23, with the pooling of
MViTv2 instead of merging).  Related maps, such as keys and values, share a phase.
"""

import jax
import jax.numpy as jnp

from equivit.kernels.phases import pool
from equivit.layers.convolution import DepthwiseConv, Pair
from equivit.layers.polyphase import differentiated_at_choice, lattice_norms
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

Maps = tuple[jax.Array, ...]
Pools = tuple[DepthwiseConv, ...]


def pooled(pools: Pools, maps: Maps, select: str) -> tuple[Maps, Choice]:
    """Pool each map by its convolution at a phase chosen by all maps; return the choice too.

    Shapes: maps [B, heads, H, W, C] on a torus, which the stride divides -> [B, heads, H / sh, W / sw, C].

    Args:
      pools: convolutions of equal stride, whose padding keeps the size at stride 1; applied circularly, whatever their
        mode.
      select: "output" takes the phase with the largest norm of the output; "input" takes the largest norm of the input
        on the lattice, which is almost free.
    """
    if select == "output":
        return _largest(pools, maps)
    choice = shifts.strongest(norms(jax.lax.stop_gradient(maps), pools[0].stride))
    return _at(pools, maps, choice), choice


def norms(maps: Maps, stride: Pair) -> jax.Array:
    """The norm of each phase over all maps and heads: [B, heads, H, W, C] each -> [B, sh sw]."""
    number = stride[0] * stride[1]
    by_head = [lattice_norms(_each_head(x), stride).reshape(*x.shape[:2], number) for x in maps]
    return jnp.sqrt(jnp.square(jnp.concatenate(by_head, axis=1)).sum(1))


def _each_head(x: jax.Array) -> jax.Array:
    """[B, heads, ...] -> [B heads, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _phases(choice: Choice, x: jax.Array, stride: Pair) -> jax.Array:
    """The chosen phase for each head of x, [B heads, 2]."""
    return jnp.repeat(shifts.phases(choice.index, stride), x.shape[1], axis=0)


def _at(pools: Pools, maps: Maps, choice: Choice) -> Maps:
    """Pool each map at the chosen phase only."""

    def one(part, x):
        y = part.circular(shifts.roll(_each_head(x), -_phases(choice, x, part.stride)))
        return y.reshape(*x.shape[:2], *y.shape[1:])

    return tuple(map(one, pools, maps))


@differentiated_at_choice(_at)
def _largest(pools: Pools, maps: Maps) -> tuple[Maps, Choice]:
    """`pooled` with select="output"."""
    with jax.named_scope("linear"):
        kernels = tuple(part.kernel[...] for part in pools)
        same = jnp.ones(()), jnp.zeros(())
        y, norms = pool(maps, kernels, (same,) * len(maps), stride=pools[0].stride, padding=pools[0].padding)
        return tuple(a.astype(k.dtype) for a, k in zip(y, kernels, strict=True)), shifts.strongest(norms)
