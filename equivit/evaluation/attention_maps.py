"""Attention maps of the global tokens: class token, registers or Jumbo token.

Source: Jumbo, Appendix A.6.
"""

import jax

from equivit.layers.grid import check_images
from equivit.models.vit.model import ViT


def attention_maps(model: ViT, images: jax.Array, block: int = -1) -> jax.Array:
    """Attention weights from the tokens before the patches to each patch, on the grid: [*B, heads, P, h, w].

    The P rows are the class token and the registers, or the J parts of a Jumbo token, in any family with such tokens.
    The softmax is over all tokens, so a map sums to 1 minus the attention on the P tokens themselves.  In equivariant
    blocks the maps move with the image.

    Args:
      images: [*B, H, W, C], of any size that the patch size divides.
      block: index of the block; negative ones count from the end.

    Raises:
      IndexError: there is no such block.
      ValueError: the model has only patch tokens, or is adaptive, so that each image has a different grid offset.
    """
    config = model.config
    h, w = check_images(images, config.in_channels, config.patch_size)
    if not config.prefix:
        raise ValueError("attention_maps: the model has only patch tokens; use one with a class token or registers.")
    if "token" in config.parts:
        raise ValueError(
            "attention_maps: the patches of this adaptive model have an offset that depends on the image; place "
            "model.attention_weights on the images by model.features(images).patches.offset."
        )
    index = block + config.depth if -config.depth <= block < 0 else block
    weights = model.attention_weights(images, index, rows=config.prefix)
    return weights[..., config.prefix :].reshape(*weights.shape[:-1], h, w)
