"""Invariant tokens to fields."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.isotypic import channels
from equivit.layers.position import IsotypicPosition
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import Group


class Lift(nnx.Module):
    """Multiplies a learned field of positions, channel by channel, by numbers that are linear in the invariant tokens.

    An invariant number times a field is equivariant.  The invariant component is the linear map itself, without a
    position.  It alone would pass only width / order numbers of a token on; with positions, three quarters of the width
    pass (FLIP: all).  Tokens before the patches have no position, so they have only the invariant component.

    Shapes: tokens [*B, P + K, in_features], places int [*B, K] of the last K tokens, grid (h, w) -> a field of
    [*B, P + K, width].

    Args:
      grid: (rows, columns) of the learned positions.
      linear: makes a dense map, `linear(in_features, out_features)`.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        grid: tuple[int, int],
        *,
        linear: Callable[[int, int], Any],
        group: Group,
        rngs: nnx.Rngs,
    ):
        self.channels, self.lines = channels("Lift", width, group), len(group.lines)
        numbers = self.channels * (self.lines + (2 if group.planes else 0))
        self.linear = linear(in_features, numbers)
        # A position of the unfolded table is a sum of two entries, so its variance is one.
        self.position = IsotypicPosition(grid, width, group=group, std=2**-0.5, rngs=rngs)

    def __call__(self, tokens: jax.Array, places: jax.Array, grid: tuple[int, int]) -> Isotypic:
        numbers, prefix = self.linear(tokens), tokens.shape[-2] - places.shape[-1]

        def placed(leaf):
            rows = leaf[:, places].astype(numbers.dtype)
            return jnp.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(prefix, 0), (0, 0)])

        position = jax.tree.map(placed, self.position(grid))
        lines, planes = jnp.split(numbers, [self.channels * self.lines], axis=-1)
        lines = jnp.stack(jnp.split(lines, self.lines, axis=-1)) * position.lines.at[0].set(1)
        return Isotypic(lines, None if position.planes is None else planes * position.planes)
