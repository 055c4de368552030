"""Neighbouring blocks are the blocks of a rolled map: the definition."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Pair = tuple[int, int]


def neighbours(planes: jax.Array, lags: Sequence[Pair], spans: Sequence[tuple[Pair, Pair]]) -> list[jax.Array]:
    """The pixels of a span, of the blocks further by a lag, for each lag and span."""
    return [
        jnp.roll(planes[:, slice(*rows), slice(*columns)], (-i, -j), (4, 5))
        for (i, j), (rows, columns) in zip(lags, spans, strict=True)
    ]
