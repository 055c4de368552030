"""Neighbouring blocks from one padded map of four axes; maps of six axes libtpu lays out with images along lanes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from equivit.kernels.neighbours.reference import Neighbour


def neighbours(planes: jax.Array, which: Sequence[Neighbour]) -> list[jax.Array]:
    """The pixels of each neighbour of every block."""
    lags = [neighbour.lag for neighbour in which]
    (h, w), below, beside = planes.shape[-2:], max(i for i, _ in lags), max(abs(j) for _, j in lags)
    maps = jax.lax.collapse(planes, 1, 4)
    maps = jnp.pad(maps, ((0, 0), (0, 0), (0, below), (beside, beside)), mode="wrap")
    return [
        maps[..., i : i + h, beside + j : beside + j + w].reshape(planes.shape)[:, slice(*rows), slice(*columns)]
        for (i, j), rows, columns in which
    ]
