"""Dropout of arrays and fields."""

from typing import Any

import jax
import jax.numpy as jnp

from equivit.symmetry.fields import Isotypic, Tokens

Key = jax.Array | None  # None: no dropout and no stochastic depth
Rate = float | jax.Array  # a probability, which may be traced


def split(key: Key, number: int = 2) -> tuple[jax.Array | None, ...]:
    """Split a key into `number` keys; None, which means no randomness, gives `number` Nones."""
    return (None,) * number if key is None else tuple(jax.random.split(key, number))


def dropout(x: Tokens, rate: Rate, key: Key) -> Any:
    """Zero each entry with probability `rate` and divide the others by 1 - rate; `key=None` returns x.

    The two rows of E are zeroed together, which keeps the symmetry.  A traced rate may be 0, which keeps all entries.

    Raises:
      ValueError: a known rate that is not at least 0 and below 1.
    """
    if key is None or is_zero(rate):
        return x
    if isinstance(x, jax.Array):
        return rescaled(x, jax.random.bernoulli(key, 1 - rate, x.shape), rate)
    keys = jax.random.split(key)
    lines = dropout(x.lines, rate, keys[0])
    if x.planes is None:
        return Isotypic(lines, None)
    kept = jax.random.bernoulli(keys[1], 1 - rate, x.planes.shape[1:])
    return Isotypic(lines, rescaled(x.planes, kept, rate))


def drop_channels(x: jax.Array, rate: float, key: Key) -> jax.Array:
    """Zero each channel of a map [B, h, w, C] with probability `rate`, and divide the others by 1 - rate."""
    if key is None or is_zero(rate):
        return x
    return rescaled(x, jax.random.bernoulli(key, 1 - rate, (len(x), 1, 1, x.shape[-1])), rate)


def rescaled(x: jax.Array, kept: jax.Array, rate: Rate) -> jax.Array:
    """x / (1 - rate) where kept, else 0, in the dtype of x: a traced rate is float32, and x may be narrower."""
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def is_zero(rate: Rate) -> bool:
    """Whether a rate is known to be 0; ValueError for a known rate that is not at least 0 and below 1."""
    known = isinstance(rate, float | int)
    if known and not 0 <= rate < 1:
        raise ValueError(f"dropout: rate={rate} must be at least 0 and below 1.")
    return known and not rate
