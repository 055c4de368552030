"""Norms of patch tokens, and how many of them stand out.

ViTs without registers store global information in a few patch tokens of large norm, which degrades their attention maps
(Darcet et al. 2024).  Source: Jumbo, Figure 5.
"""

import jax
import jax.numpy as jnp

from equivit.models.vit import ViT


def patch_norms(model: ViT, images: jax.Array, block: int = -1) -> jax.Array:
    """L2 norms of the patch tokens after a block, before the final norm: [*B, h, w].

    Args:
      images: [*B, H, W, C].
      block: index of the block; negative ones count from the end.

    Raises:
      IndexError: there is no such block.
    """
    index = block + model.config.depth if block < 0 else block
    tokens = model.features(images, blocks=(index,), norm=False).blocks[index].patches.values
    return jnp.linalg.norm(tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32)), axis=-1)


def outlier_share(norms: jax.Array, times: float = 3.0) -> jax.Array:
    """The fraction of norms above `times` their median."""
    return jnp.mean(norms > times * jnp.median(norms))
