"""The projection head of DINO and iBOT, and the cosine of its output with each prototype."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.dense import Linear, gelu, uniform


class DinoHead(nnx.Module):
    """An MLP to the bottleneck, unit length, and a product with the prototypes g_k v_k / |v_k|; no bias there.

    Losses over many rows take `project` and `prototypes` apart, and never hold all logits (`objectives/streams.py`).

    Shapes: [*B, N, width] -> [*B, N, prototypes], float32.

    Args:
      prototypes: K, their number.
      hidden: width of the two hidden layers of the MLP.
      bottleneck: width of the features that meet the prototypes.

    Source: DINOv2 (arXiv 2304.07193), Section 4; weight normalisation is Salimans and Kingma's (2016).
    """

    def __init__(self, width: int, prototypes: int, *, hidden: int = 2048, bottleneck: int = 256, rngs: nnx.Rngs):
        self.fc1 = Linear(width, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, hidden, rngs=rngs)
        self.fc3 = Linear(hidden, bottleneck, rngs=rngs)
        # As PyTorch's linear maps start: the official code draws the rest of the head anew, not this.
        drawn = uniform(rngs.params(), (prototypes, bottleneck), 1 / math.sqrt(bottleneck))
        self.directions = nnx.Param(drawn, product=True)
        self.gains = nnx.Param(jnp.ones(prototypes), decay=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return logits(self.project(x), self.prototypes())

    def project(self, x: jax.Array) -> jax.Array:
        """The unit vectors that meet the prototypes: [*B, N, width] -> [*B, N, bottleneck], float32."""
        return unit(self.fc3(gelu(self.fc2(gelu(self.fc1(x))))), 1e-12)

    def prototypes(self) -> jax.Array:
        """The rows g_k v_k / |v_k|, [prototypes, bottleneck], in the dtype of v."""
        directions = self.directions[...]
        rows = self.gains[...][:, None].astype(jnp.float32) * unit(directions, 0)
        return rows.astype(directions.dtype)


def logits(features: jax.Array, prototypes: jax.Array) -> jax.Array:
    """Products of each row with each prototype: [*B, d], [K, d] -> [*B, K], float32, multiplied in K's dtype."""
    with jax.named_scope("linear"):
        features = features.astype(prototypes.dtype)
        return jnp.einsum("...d,kd->...k", features, prototypes, preferred_element_type=jnp.float32)


def unit(x: jax.Array, eps: float) -> jax.Array:
    """x / max(|x|, eps) along the last axis, in float32.  With eps > 0 a vector of zeros has a finite gradient."""
    with jax.named_scope("norm"):
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), eps**2))
