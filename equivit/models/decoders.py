"""Masked autoencoding: an encoder that sees some patches, and a light decoder that predicts the pixels of all.

Source: MAE (He et al. 2022, arXiv 2111.06377), Section 3; with a Jumbo token: Jumbo (arXiv 2502.15021), Section 4.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense
from equivit.layers.block import Block
from equivit.layers.grid import check_images
from equivit.layers.position import SinCos
from equivit.layers.stack import Stack
from equivit.models.vit import ViT, mlp, token
from equivit.models.vit_config import ViTConfig


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoderConfig:
    """The choices that make one masked autoencoder.

    Attributes:
      encoder: those of the encoder, which has no head.  The decoder has its kind of MLP, its epsilon, its spelling of
        the sin-cos table, its type to compute in, and runs its blocks as it does.
      decoder_width, decoder_depth, decoder_heads: embedding width, blocks, and heads per block of the decoder.
    """

    encoder: ViTConfig
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16

    def __post_init__(self):
        if self.encoder.num_classes is not None:
            raise ValueError(
                f"MaskedAutoencoder: the encoder has a head for {self.encoder.num_classes} classes, which nothing "
                "would train; create it with num_classes=None."
            )


class MaeDecoder(nnx.Module):
    """Predicts the pixels of every patch from the rows that an encoder made of some.

    The rows before the patches, the class token or the J rows of a Jumbo token, take part as ordinary tokens without a
    position; places without a row hold the mask token.

    Shapes: rows [*B, P + K, D], keep int [*B, K], grid (h, w) -> [*B, h w, ph pw C], pixels in `patchify`'s order.
    """

    def __init__(self, config: MaskedAutoencoderConfig, *, rngs: nnx.Rngs):
        encoder, width = config.encoder, config.decoder_width
        ph, pw = encoder.patch_size
        self.embed = dense.Linear(encoder.width, width, rngs=rngs)
        self.mask_token = token(True, (width,), 0.02, rngs)
        self.position = SinCos(width, inclusive=encoder.position == "sincos_inclusive")
        runs = [(config.decoder_depth, lambda rngs: _block(config, rngs))]
        self.blocks = Stack(runs, remat=encoder.remat, unroll=encoder.unroll, rngs=rngs)
        self.norm = dense.LayerNorm(width, eps=encoder.norm_eps)
        self.pixels = dense.Linear(width, ph * pw * encoder.in_channels, rngs=rngs)

    def __call__(self, rows: jax.Array, keep: jax.Array, grid: tuple[int, int]) -> jax.Array:
        decoder = jax.tree.map(lambda a: a.astype(rows.dtype), self)
        tokens, prefix = decoder.tokens(rows, keep, grid), rows.shape[-2] - keep.shape[-1]
        return decoder.pixels(tokens[..., prefix:, :])

    def tokens(self, rows: jax.Array, keep: jax.Array, grid: tuple[int, int]) -> jax.Array:
        """All tokens after the final norm, [*B, P + h w, width]."""
        rows, prefix = self.embed(rows), rows.shape[-2] - keep.shape[-1]
        position = self.position(grid).astype(rows.dtype)
        empty = jnp.broadcast_to(self.mask_token[...], (*rows.shape[:-2], *position.shape))
        patches = _put(empty, keep, rows[..., prefix:, :]) + position
        x, _ = self.blocks(jnp.concatenate([rows[..., :prefix, :], patches], axis=-2))
        return self.norm(x)


class MaskedAutoencoder(nnx.Module):
    """An encoder, of any family and kind of ViT, and a decoder.

    Args:
      encoder: a model of `config.encoder`.
      rngs: draws the decoder.
    """

    def __init__(self, config: MaskedAutoencoderConfig, encoder: ViT, *, rngs: nnx.Rngs):
        self.config, self.encoder = config, encoder
        self.decoder = MaeDecoder(config, rngs=rngs)

    def __call__(self, images: jax.Array, keep: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Predicted pixels of all patches, [*B, N, ph pw C], of images [*B, H, W, C] of any size.

        Args:
          keep: int [*B, K], the patches that the encoder sees, row by row over the grid.
          key: drives drop path and dropout of the encoder; None means neither.

        Raises:
          ValueError: the patch does not divide the image.
        """
        grid = check_images(images, self.config.encoder.in_channels, self.config.encoder.patch_size)
        return self.decoder(self.encoder.tokens(images, key=key, keep=keep), keep, grid)


def _block(config: MaskedAutoencoderConfig, rngs: nnx.Rngs) -> Block:
    width, eps = config.decoder_width, config.encoder.norm_eps
    return Block(
        norm1=dense.LayerNorm(width, eps=eps),
        attention=dense.Attention(width, config.decoder_heads, rngs=rngs),
        scale1=None,
        norm2=dense.LayerNorm(width, eps=eps),
        mlp=mlp(config.encoder.mlp, width, 4 * width, None, rngs),
        scale2=None,
        drop_path=0.0,
        dropout=0.0,
        drop=dense.dropout,
    )


def _put(tokens: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    """`tokens` [*B, N, C] with `rows` [*B, K, C] at `places` [*B, K], which differ from one another."""

    def put(tokens, places, rows):
        return tokens.at[places].set(rows, unique_indices=True, mode="promise_in_bounds")

    for _ in places.shape[:-1]:
        put = jax.vmap(put)
    return put(tokens, places, rows)
