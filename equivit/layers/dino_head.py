"""The projection head of DINO and iBOT."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.dense import Linear, gelu, uniform


class DinoHead(nnx.Module):
    """Unit vectors from an MLP, times K prototypes g_k v_k / |v_k|, without bias.

    Losses over many rows use `mlp` and `prototypes` separately, and never hold all logits (`objectives/streams.py`).

    Shapes: [*B, N, width] -> [*B, N, prototypes], float32.

    Args:
      prototypes: K, the number of prototypes.
      hidden: width of the two hidden layers of the MLP.
      bottleneck: width of the unit vectors.

    Source: DINO (arXiv 2104.14294), Appendix C; DINOv2 (2304.07193), where the gains g are trained.
    """

    def __init__(self, width: int, prototypes: int, *, hidden: int = 2048, bottleneck: int = 256, rngs: nnx.Rngs):
        self.mlp = Bottleneck(width, hidden, bottleneck, rngs=rngs)
        # PyTorch's default for linear maps: the official code reinitialises the MLP, but not this.
        drawn = uniform(rngs.params(), (prototypes, bottleneck), 1 / math.sqrt(bottleneck))
        self.directions = nnx.Param(drawn, product=True)
        self.gains = nnx.Param(jnp.ones(prototypes), decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.prototypes().logits(self.mlp(x))

    def prototypes(self) -> "Prototypes":
        """The prototypes, without the MLP."""
        directions = self.directions[...]
        squares = jnp.square(directions.astype(jnp.float32)).sum(-1)
        return Prototypes(directions, self.gains[...].astype(jnp.float32) * jax.lax.rsqrt(squares))


class Bottleneck(nnx.Module):
    """Linear, GELU, linear, GELU, linear, unit length.  Shapes: [*B, N, width] -> [*B, N, bottleneck], float32."""

    def __init__(self, width: int, hidden: int, bottleneck: int, *, rngs: nnx.Rngs):
        self.fc1 = Linear(width, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, hidden, rngs=rngs)
        self.fc3 = Linear(hidden, bottleneck, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return unit(self.fc3(gelu(self.fc2(gelu(self.fc1(x))))), 1e-12)


class Prototypes(NamedTuple):
    """K rows factors_k directions_k.  The product is not materialised: with its gradient it is as large as a head.

    Attributes:
      directions: [K, d], v.
      factors: [K], g / |v|, float32.
    """

    directions: jax.Array
    factors: jax.Array

    def logits(self, features: jax.Array) -> jax.Array:
        """Products with all rows, [*B, d] -> [*B, K], float32, multiplied in the dtype of `directions`."""
        with jax.named_scope("linear"):
            features = features.astype(self.directions.dtype)
            products = jnp.einsum("...d,kd->...k", features, self.directions, preferred_element_type=jnp.float32)
            return products * self.factors

    def over(self, temperature: float | jax.Array) -> "Prototypes":
        """Prototypes whose logits are divided by a temperature."""
        return self._replace(factors=self.factors / temperature)


def unit(x: jax.Array, eps: float) -> jax.Array:
    """x / max(|x|, eps) along the last axis, in float32.  With eps > 0 a vector of zeros has a finite gradient."""
    with jax.named_scope("norm"):
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), eps**2))
