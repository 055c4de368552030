"""Neighbours as shifts of one flat array of padded maps, whose positions fill the lanes of a TPU."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.neighbours.reference import Neighbour, Pair, products


def neighbour_products(x: jax.Array, stride: Pair, which: Sequence[Neighbour]) -> jax.Array:
    """Products of a block's entries with its neighbours' and with 1: [B, H, W, C] -> [B, entries, others + 1].

    A map that repeats beyond its edges, written row by row, has the block at lag (i, j) a constant number of positions
    further.  Positions in the margins count as blocks of zeros.
    """
    (b, height, width, channels), (sh, sw) = x.shape, stride
    lags = np.array([neighbour.lag for neighbour in which])
    below, beside = int(lags[:, 0].max()), int(np.abs(lags[:, 1]).max())
    h, w = height // sh + below, width // sw + 2 * beside
    x = jnp.pad(x, ((0, 0), (0, below * sh), (beside * sw, beside * sw), (0, 0)), mode="wrap")
    planes = x.reshape(b, h, sh, w, sw, channels).transpose(0, 2, 4, 5, 1, 3)
    flat = jnp.pad(planes.reshape(b, sh * sw * channels, h * w), ((0, 0), (0, 0), (0, beside)))
    number = (h - below) * w
    column = np.arange(number) % w
    inside = (column >= beside) & (column < w - beside)
    parts = [
        jax.lax.slice_in_dim(flat[:, first:end], i * w + j, i * w + j + number, axis=2)
        for (i, j), rows, columns in which
        for first, end in _runs(np.arange(sh * sw * channels).reshape(sh, sw, channels), rows, columns)
    ]
    return products(jnp.where(inside, flat[..., :number], 0), parts)


def _runs(entries: np.ndarray, rows: Pair, columns: Pair) -> Iterator[Pair]:
    """The entries in these rows and columns of a block, as (first, end) of numbers without a gap."""
    chosen = entries[slice(*rows), slice(*columns)].ravel()
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
        yield int(run[0]), int(run[-1]) + 1
