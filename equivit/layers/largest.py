"""The phase of stride 2 at which what a layer makes of a map is largest, and that: adaptive polyphase sampling."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from equivit.derivatives import zero_slope
from equivit.layers.by_image import by_image
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

Pair = tuple[int, int]
STRIDE = (2, 2)
# Maps of an image that are smaller are taken together: the weights are larger than they.
IMAGE_BYTES = 3 * 2**18


class Layer(Protocol):
    """A layer of stride 2 with a norm after it or not, which is a `nnx.Module`."""

    def at_each_phase(self) -> Callable[[jax.Array], list[jax.Array]]:
        """The layer without that norm: [B, h, w, C] on a torus -> [B, h/2, w/2, D] for each phase, row-major."""
        ...

    def at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """The whole layer at a phase of each map: [B, h, w, C] -> [B, h w / 4, D]."""
        ...

    def normed(self, y: jax.Array) -> jax.Array:
        """The norm after it."""
        ...


@jax.custom_jvp
def largest(layer: Any, x: jax.Array) -> tuple[jax.Array, Choice]:
    """The layer at the phase where its l2 norm is largest: [B, h, w, C] -> [B, h w / 4, D], and the choice.

    All phases are computed at once and one is kept.  The gradient is that of the layer at this phase alone, which takes
    neither the arithmetic nor the memory of the others.

    Args:
      layer: a `Layer`.
    """
    _, *grid, channels = x.shape
    with jax.named_scope("linear"):
        at_each_phase = layer.at_each_phase()

        def kept(x):
            maps = at_each_phase(x.reshape(-1, *grid, channels))
            norms = jnp.sqrt(jnp.stack([jnp.square(y).sum((1, 2, 3)) for y in maps], 1))
            index = shifts.strongest(norms).index[:, None, None, None]
            y = functools.reduce(lambda y, k: jnp.where(index == k, maps[k], y), range(1, 4), maps[0])
            return jax.lax.collapse(y, 1, 3).astype(x.dtype), norms[:, None]

        y, norms = by_image(kept, jax.lax.collapse(x, 1, 3), least=IMAGE_BYTES)
    return layer.normed(y), shifts.strongest(norms[:, 0])


@largest.defjvp
def _derivative(primals, tangents):
    y, choice = largest(*primals)
    # A gradient begins from the map: what it needs of the layer at one phase is computed again.
    at = jax.checkpoint(lambda layer, x: layer.at(x, choice), prevent_cse=False)
    return (y, choice), (jax.jvp(at, primals, tangents)[1], jax.tree.map(zero_slope, choice))
