"""One phase of each map by comparing its index with every phase: on a TPU that is faster than a gather."""

import functools

import jax
import jax.numpy as jnp

from equivit.kernels.phases import reference
from equivit.kernels.phases.reference import Pair


@functools.partial(jax.jit, static_argnames="stride")  # traced once for all maps of a shape
def phase(y: jax.Array, index: jax.Array, stride: Pair) -> jax.Array:
    """One phase of each map: [B, h, w, D] at [B] -> [B, h / sh, w / sw, D]."""
    (sh, sw), index = stride, index[:, None, None, None]
    phases = [y[:, row::sh, column::sw] for row in range(sh) for column in range(sw)]
    return functools.reduce(lambda chosen, k: jnp.where(index == k, phases[k], chosen), range(1, sh * sw), phases[0])


at_largest = functools.partial(reference.at_largest, take=phase)
pool = functools.partial(reference.pool, take=phase)
