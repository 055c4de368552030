"""From fields to dense tokens, after the last equivariant block."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic


def components(x: Isotypic) -> jax.Array:
    """The concatenated components; later layers are not equivariant (H8)."""
    return fields.to_dense(x)


def values(x: Isotypic) -> jax.Array:
    """The concatenated values on the group, as in the official H2; later layers are not equivariant."""
    return jnp.concatenate(list(fields.to_regular(x)), axis=-1)


class Invariantize(nnx.Module):
    """Maps every token to invariants, and projects them if their number is not the width (I8, I2).

    Shapes: a field of [*B, N, width] -> [*B, N, width].
    """

    def __init__(self, invariant: nnx.Module, projection: nnx.Module | None):
        self.invariant, self.projection = invariant, projection

    def __call__(self, x: Isotypic) -> jax.Array:
        y = self.invariant(x)
        return y if self.projection is None else self.projection(y).astype(y.dtype)
