"""Attention with rotary positions: queries and keys are rotated by angles that depend on the place of their patch.

The product of a rotated query and a rotated key depends on their distance, so attention knows relative positions.
Source: RoFormer (arXiv 2104.09864), Section 3.2; per axis and for relative image coordinates as in DINOv3 (arXiv
2508.10104), without its random changes of the coordinates in training.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.kernels.attention import attend, weights
from equivit.kernels.product import add_bias
from equivit.layers import dense
from equivit.layers.grid import Layout, grid_of

BASE = 100.0  # frequency i of n is BASE^(-i / n) turns for half the side of an image


class Attention(dense.Attention):
    """`dense.Attention` that rotates the queries and keys of patches; keys have no bias.

    The tokens before the patches have no place and are not rotated.

    Args:
      qkv_bias: whether queries and values have biases.

    Raises:
      ValueError: 4 does not divide the channels of a head.
    """

    def __init__(self, width: int, num_heads: int, *, qkv_bias: bool = True, rngs: nnx.Rngs, **options: Any):
        super().__init__(width, num_heads, qkv_bias=False, rngs=rngs, **options)
        if (channels := width // num_heads) % 4:
            raise ValueError(
                f"Attention: {width=} and {num_heads=} give {channels} channels a head, which 4 must divide for rotary "
                f"positions; {errors.multiples(channels, 4)}."
            )
        self.q_bias: Any = nnx.Param(jnp.zeros(width)) if qkv_bias else None
        self.v_bias: Any = nnx.Param(jnp.zeros(width)) if qkv_bias else None

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        return self.projected(attend(*self._rotated(x, layout)))

    def weights(self, x: jax.Array, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        q, k, _ = self._rotated(x, layout)
        return weights(q[..., :rows, :], k)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v before the rotation, each [*B, num_heads, N, head channels]."""
        q, k, v = super().heads(x)
        return (q, k, v) if self.q_bias is None else (self._biased(q, self.q_bias), k, self._biased(v, self.v_bias))

    def _biased(self, x: jax.Array, bias: nnx.Param) -> jax.Array:
        return add_bias(x, bias[...].reshape(self.num_heads, 1, -1))

    def _rotated(self, x: jax.Array, layout: Layout | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        grid, (q, k, v) = grid_of(layout, "rotary positions"), self.heads(x)
        return rotated(q, grid), rotated(k, grid), v


def rotated(x: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """The last h w tokens with channels c and c + d/2 rotated as one plane; the tokens before them are unchanged.

    Shapes: [*B, P + h w, d] -> the same, computed in at least float32.
    """
    with jax.named_scope("attention"):
        angle = angles(grid, x.shape[-1] // 2)
        prefix, wide = x.shape[-2] - len(angle), jnp.promote_types(x.dtype, jnp.float32)
        first, second = jnp.split(x[..., prefix:, :].astype(wide), 2, axis=-1)
        cos, sin = (jnp.asarray(f(angle), wide) for f in (np.cos, np.sin))
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([x[..., :prefix, :], turned.astype(x.dtype)], axis=-2)


@functools.lru_cache
def angles(grid: tuple[int, int], planes: int) -> np.ndarray:
    """The angles of the centre of each patch, [h w, planes]: half by its row, half by its column.

    The centres of the h rows lie at (i + 1/2) 2 / h - 1, in [-1, 1], and columns likewise, for any size of the image.
    """
    frequencies = 2 * np.pi * BASE ** (-np.arange(planes // 2) / (planes // 2))
    centres = ((place + 0.5) * 2 / size - 1 for place, size in zip(np.indices(grid), grid, strict=True))
    return np.concatenate([centre.reshape(-1, 1) * frequencies for centre in centres], axis=1)
