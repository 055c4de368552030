"""From fields to dense tokens, after the last equivariant block."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic


def components(x: Isotypic) -> jax.Array:
    """The components side by side; the symmetry is dropped (H8)."""
    return fields.to_dense(x)


def values(x: Isotypic) -> jax.Array:
    """The values on the group side by side, as the official H2 goes on; the symmetry is dropped."""
    return jnp.concatenate(list(fields.to_regular(x)), axis=-1)


class Invariantize(nnx.Module):
    """Every token to invariants, then, where their number is not the width, a projection (I8, I2).

    Shapes: a field of [*B, N, width] -> [*B, N, width].
    """

    def __init__(self, invariant: nnx.Module, projection: nnx.Module | None):
        self.invariant, self.projection = invariant, projection

    def __call__(self, x: Isotypic) -> jax.Array:
        y = self.invariant(x)
        return y if self.projection is None else self.projection(y).astype(y.dtype)
