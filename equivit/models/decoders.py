"""Masked autoencoders: an encoder of some patches, and a light decoder that predicts the pixels of all patches.

Source: MAE (He et al. 2022, arXiv 2111.06377), Section 3; with a Jumbo token: Jumbo (arXiv 2502.15021), Section 4.3.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Depth, PositiveInt
from equivit.layers.block import Block
from equivit.layers.dropout import Key
from equivit.layers.grid import Layout, check_images
from equivit.layers.parts import Parts
from equivit.layers.position import SinCos
from equivit.layers.prefix import token
from equivit.layers.stack import Stack
from equivit.models.features import Features
from equivit.models.model import check_headless
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoderConfig:
    """The configuration of a masked autoencoder.

    Attributes:
      encoder: the configuration of the encoder, which has no head.  The decoder uses its `mlp`, `norm_eps`, `init`,
        `remat`, `unroll` and version of the sin-cos table.
      decoder_width, decoder_depth, decoder_heads: embedding width, number of blocks, and heads per block.
    """

    encoder: ViTConfig
    decoder_width: PositiveInt = 512
    decoder_depth: Depth = 8
    decoder_heads: PositiveInt = 16

    def __post_init__(self):
        constraints.check_fields(self, "MaskedAutoencoder")
        check_headless("MaskedAutoencoder", "the encoder", self.encoder)
        if "token" in self.encoder.parts:
            raise ValueError(
                "MaskedAutoencoder: the patches of this adaptive encoder begin where the content decides, away from "
                "those whose pixels are predicted; create it with adaptive=False."
            )
        if self.encoder.replaced:
            raise ValueError(
                "MaskedAutoencoder: replaced blocks convolve the whole grid of patches, of which this encoder sees "
                "some; create it with replaced=(), and replace blocks after the training."
            )

    num_classes: ClassVar = None

    @property
    def patch_size(self) -> tuple[int, int]:
        """(height, width) of a patch in pixels."""
        return self.encoder.patch_size

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.encoder.input_shape

    def build(self, rngs: nnx.Rngs) -> "MaskedAutoencoder":
        return MaskedAutoencoder(self, self.encoder.build(rngs), rngs=rngs)


class MaeDecoder(nnx.Module):
    """Predicts the pixels of every patch from the encoder's tokens of some patches.

    The tokens before the patches (the class token, or the J rows of a Jumbo token) are ordinary tokens without a
    position.  Removed patches are replaced by the mask token.

    Shapes: rows [*B, P + K, D], keep int [*B, K], grid (h, w) -> [*B, h w, ph pw C], pixels in `patchify`'s order.
    """

    def __init__(self, config: MaskedAutoencoderConfig, *, rngs: nnx.Rngs):
        encoder, width = config.encoder, config.decoder_width
        ph, pw = encoder.patch_size

        def parts(rngs):
            return Parts(None, rngs, norm_eps=encoder.norm_eps, activation=encoder.mlp, init=encoder.init)

        def block(rngs):
            return Block(**parts(rngs).branches(width, config.decoder_heads, 4 * width))

        self.embed = parts(rngs).linear(encoder.width, width)
        self.mask_token = token((width,), 0.02, rngs)
        self.position = SinCos(width, inclusive=encoder.position == "sincos_inclusive")
        options: dict[str, Any] = dict(remat=encoder.remat, unroll=encoder.unroll, rngs=rngs)
        self.blocks = Stack([(config.decoder_depth, block)], **options)
        self.norm = parts(rngs).norm(width)
        self.pixels = parts(rngs).linear(width, ph * pw * encoder.in_channels)

    def __call__(self, rows: jax.Array, keep: jax.Array, grid: tuple[int, int], *, train: bool = False) -> jax.Array:
        tokens, prefix = self.tokens(rows, keep, grid, train=train), rows.shape[-2] - keep.shape[-1]
        return self.pixels(tokens[..., prefix:, :])

    def tokens(self, rows: jax.Array, keep: jax.Array, grid: tuple[int, int], *, train: bool = False) -> jax.Array:
        """All tokens after the final norm, [*B, P + h w, width]."""
        empty, prefix = self.mask_token[...], rows.shape[-2] - keep.shape[-1]
        rows = self.embed(rows).astype(empty.dtype)
        position = self.position(grid).astype(empty.dtype)
        empty = jnp.broadcast_to(empty, (*rows.shape[:-2], *position.shape))
        patches = _put(empty, keep, rows[..., prefix:, :]) + position
        x = jnp.concatenate([rows[..., :prefix, :], patches], axis=-2)
        x, _ = self.blocks(x, Layout(grid, prefix), train=train)
        return self.norm(x)


class MaskedAutoencoder(nnx.Module):
    """An encoder, any ViT, and a decoder.

    Args:
      encoder: a model built from `config.encoder`.
      rngs: initialises the decoder.
    """

    def __init__(self, config: MaskedAutoencoderConfig, encoder: ViT, *, rngs: nnx.Rngs):
        self.config, self.encoder = config, encoder
        self.decoder = MaeDecoder(config, rngs=rngs)

    head = None

    def __call__(self, images: jax.Array, keep: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """Predicted pixels of all patches, [*B, N, ph pw C], of images [*B, H, W, C] of any size.

        Args:
          keep: int [*B, K], indices of the patches that the encoder sees, row by row over the grid.
          key, train: of the encoder, as in `Model`, like the errors.
        """
        grid = check_images(images, self.config.encoder.in_channels, self.config.encoder.patch_size)
        return self.decoder(self.encoder.tokens(images, key=key, train=train, keep=keep), keep, grid, train=train)

    def pooled(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """The input of a classification head on the encoder."""
        return self.encoder.pooled(images, key=key, train=train)

    def embedding(self, images: jax.Array) -> Features:
        """The features of the encoder before its first block."""
        return self.encoder.embedding(images)

    def features(self, images: jax.Array, **options) -> Features:
        """The features of the encoder, which sees all patches."""
        return self.encoder.features(images, **options)


def _put(tokens: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    """`tokens` [*B, N, C], replaced by `rows` [*B, K, C] at `places` [*B, K], which are distinct."""

    def put(tokens, places, rows):
        return tokens.at[places].set(rows, unique_indices=True, mode="promise_in_bounds")

    for _ in places.shape[:-1]:
        put = jax.vmap(put)
    return put(tokens, places, rows)
