"""Norms of patch tokens, and the fraction of outliers.

ViTs without registers store global information in a few patch tokens of large norm, which degrades their attention maps
(Darcet et al. 2024).  Source: Jumbo, Figure 5.
"""

import dataclasses

import jax
import jax.numpy as jnp

from equivit.models.features import Grid
from equivit.models.vit.model import ViT


def patch_norms(model: ViT, images: jax.Array, block: int = -1) -> Grid:
    """L2 norms of the patch tokens after a block, before the final norm: values [*B, h, w, 1].

    The grid's `pixels()` places them on the images, in adaptive models too.

    Args:
      images: [*B, H, W, C].
      block: index of the block; negative ones count from the end.

    Raises IndexError if there is no such block.
    """
    index = block + model.config.depth if block < 0 else block
    grid = model.features(images, blocks=(index,), norm=False).blocks[index].patches
    tokens = grid.values.astype(jnp.promote_types(grid.values.dtype, jnp.float32))
    return dataclasses.replace(grid, values=jnp.linalg.norm(tokens, axis=-1, keepdims=True))


def outlier_share(norms: jax.Array, times: float = 3.0) -> jax.Array:
    """The fraction of norms above `times` their median."""
    return jnp.mean(norms > times * jnp.median(norms))
