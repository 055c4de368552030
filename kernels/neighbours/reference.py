"""Neighbouring blocks are the blocks of a rolled map: the definition."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pair = tuple[int, int]


class Neighbour(NamedTuple):
    """Pixels of the block `lag` blocks further: those between (start, stop) of its rows and of its columns."""

    lag: Pair
    rows: Pair
    columns: Pair


def neighbours(planes: jax.Array, which: Sequence[Neighbour]) -> list[jax.Array]:
    """The pixels of each neighbour of every block."""
    return [jnp.roll(planes[:, slice(*rows), slice(*columns)], (-i, -j), (4, 5)) for (i, j), rows, columns in which]
