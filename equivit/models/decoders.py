"""Masked autoencoders: an encoder of some patches, and a light decoder that predicts the pixels of all patches.

Source: MAE (He et al. 2022, arXiv 2111.06377), Section 3; with a Jumbo token: Jumbo (arXiv 2502.15021), Section 4.3.

With decoder="equivariant", which is ours, the reconstruction of a turned image under the turned mask is the turned
reconstruction.  What the decoder reads decides for which encoders that is possible:

| family | the encoder's last tokens            | the decoder begins with              |
|--------|--------------------------------------|--------------------------------------|
| D8, D2 | fields                               | an isotypic linear map               |
| I8, I2 | invariant: the group only moves them | `Lift`: invariants times positions   |
| H8, H2 | dense, without a symmetry            | no equivariant map exists: refused   |
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints, errors
from equivit.constraints import Depth, PositiveInt
from equivit.layers.block import Block
from equivit.layers.dropout import Key
from equivit.layers.grid import Layout, check_grid, check_images
from equivit.layers.isotypic import Unpatchify, channels
from equivit.layers.lift import Lift
from equivit.layers.parts import Parts
from equivit.layers.position import IsotypicPosition, SinCos, add_positions
from equivit.layers.prefix import token
from equivit.layers.stack import Stack
from equivit.models.features import Features
from equivit.models.model import check_headless
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT
from equivit.symmetry import fields
from equivit.symmetry.fields import join, rows
from equivit.symmetry.groups import Group


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoderConfig:
    """The configuration of a masked autoencoder.

    Attributes:
      encoder: the configuration of the encoder, which has no head.  The decoder uses its `mlp`, `norm_eps`, `init`,
        `remat`, `unroll` and version of the sin-cos table; an equivariant one its isotypic norms and its grid.
      decoder_width, decoder_depth, decoder_heads: embedding width, number of blocks, and heads per block.
      decoder: "dense", or "equivariant" under the group of the encoder, of family D or I.
    """

    encoder: ViTConfig
    decoder_width: PositiveInt = 512
    decoder_depth: Depth = 8
    decoder_heads: PositiveInt = 16
    decoder: Literal["dense", "equivariant"] = "dense"

    def __post_init__(self):
        constraints.check_fields(self, "MaskedAutoencoder")
        check_headless("MaskedAutoencoder", "the encoder", self.encoder)
        if "token" in self.encoder.parts:
            raise ValueError(
                "MaskedAutoencoder: the patches of this adaptive encoder begin where the content decides, away from "
                "those whose pixels are predicted; create it with adaptive=False."
            )
        if self.encoder.position == "rotary" or "position" in self.encoder.parts:
            raise ValueError(
                f"MaskedAutoencoder: attention with position={self.encoder.position!r} and "
                f"adaptive={self.encoder.adaptive} reads the whole grid of patches, of which this encoder sees some; "
                "create it with position='learned' or 'sincos', and adaptive=False."
            )
        if self.encoder.replaced:
            raise ValueError(
                "MaskedAutoencoder: replaced blocks convolve the whole grid of patches, of which this encoder sees "
                "some; create it with replaced=(), and replace blocks after the training."
            )
        if self.decoder == "equivariant":
            self._check_symmetry()

    def _check_symmetry(self):
        family, where = self.encoder.family, "MaskedAutoencoder: decoder='equivariant'"
        if self.encoder.group is None:
            raise ValueError(f"{where} needs an encoder with a symmetry, such as family D8 or I8, not {family}.")
        if self.encoder.leaves == "dropped":
            others = f"I{family[1]} or D{family[1]}"
            raise ValueError(
                f"{where}: the dense blocks of family {family} end its symmetry, and no decoder restores it; take "
                f"family {others}, or decoder='dense'."
            )
        unit = self.decoder_heads * self.encoder.group.order
        if self.decoder_width % unit:
            raise ValueError(
                f"{where}: decoder_width={self.decoder_width} must be divisible by decoder_heads={self.decoder_heads} "
                f"times {self.encoder.group.order}, the order of its group; "
                f"{errors.multiples(self.decoder_width, unit)}."
            )

    num_classes: ClassVar = None

    @property
    def group(self) -> Group | None:
        """The symmetry group of the decoder; None if it is dense."""
        return self.encoder.group if self.decoder == "equivariant" else None

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
    position.  Removed patches are replaced by the mask token, which is invariant in an equivariant decoder.

    Shapes: tokens [*B, P + K, D], keep int [*B, K], grid (h, w) -> [*B, h w, ph pw C], pixels in `patchify`'s order.
    """

    def __init__(self, config: MaskedAutoencoderConfig, *, rngs: nnx.Rngs):
        encoder, width, group = config.encoder, config.decoder_width, config.group
        (ph, pw), colours = encoder.patch_size, encoder.in_channels
        isotypic: dict[str, Any] = dict(isotypic_eps=encoder.isotypic_eps, isotypic_norm=encoder.isotypic_norm)

        def parts(rngs):
            return Parts(group, rngs, norm_eps=encoder.norm_eps, activation=encoder.mlp, init=encoder.init, **isotypic)

        def block(rngs):
            return Block(**parts(rngs).branches(width, config.decoder_heads, 4 * width))

        learned = check_grid(encoder.image_size, encoder.patch_size, "image_size")
        self.group, self.reads_fields = group, encoder.ends_with_fields
        if group is None or self.reads_fields:
            self.embed: Any = parts(rngs).linear(encoder.width, width)
        else:
            linear = parts(rngs).of(None).linear
            self.embed = Lift(encoder.width, width, learned, linear=linear, group=group, rngs=rngs)
        self.mask_token = token((width if group is None else channels("MaeDecoder", width, group),), 0.02, rngs)
        if group is None:
            self.position: Any = SinCos(width, inclusive=encoder.position == "sincos_inclusive")
        else:
            self.position = IsotypicPosition(learned, width, group=group, std=encoder.position_std, rngs=rngs)
        options: dict[str, Any] = dict(remat=encoder.remat, unroll=encoder.unroll, rngs=rngs)
        self.blocks = Stack([(config.decoder_depth, block)], **options)
        self.norm = parts(rngs).norm(width)
        if group is None:
            self.pixels: Any = parts(rngs).linear(width, ph * pw * colours)
        else:
            self.pixels = Unpatchify(width, (ph, pw), colours, group=group, init=parts(rngs).weight_init, rngs=rngs)

    def __call__(self, tokens: jax.Array, keep: jax.Array, grid: tuple[int, int], *, train: bool = False) -> jax.Array:
        prefix = tokens.shape[-2] - keep.shape[-1]
        patches = rows(self.tokens(tokens, keep, grid, train=train), prefix)
        return self.pixels(patches) if self.group is None else self.pixels.patches(patches)

    def tokens(self, tokens: jax.Array, keep: jax.Array, grid: tuple[int, int], *, train: bool = False) -> Any:
        """All tokens after the final norm, [*B, P + h w, width] or a field of that shape."""
        empty, prefix = self.mask_token[...], tokens.shape[-2] - keep.shape[-1]
        x = self._embedded(tokens, keep, grid).astype(empty.dtype)
        empty = jnp.broadcast_to(empty, (*tokens.shape[:-2], math.prod(grid), *empty.shape))
        if self.group is not None:
            empty = fields.invariant_part(empty, self.group)
        patches = jax.tree.map(lambda leaf, seen: _put(leaf, keep, seen), empty, rows(x, prefix))
        x = join(rows(x, 0, prefix), add_positions(patches, self.position(grid)))
        x, _ = self.blocks(x, Layout(grid, prefix), train=train)
        return self.norm(x)

    def _embedded(self, tokens: jax.Array, keep: jax.Array, grid: tuple[int, int]) -> Any:
        if self.group is None:
            return self.embed(tokens)
        if self.reads_fields:
            return self.embed(fields.from_dense(tokens, self.group))
        return self.embed(tokens, keep, grid)


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
          keep: int [*B, K], indices of the patches that the encoder sees, row by row over the grid.  They must be
            distinct and lie between 0 and N - 1, which is not checked.
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
    """`tokens` [..., *B, N, C], replaced by `rows` [..., *B, K, C] at `places` [*B, K], which are distinct."""

    def put(tokens, places, rows):
        return tokens.at[places].set(rows, unique_indices=True, mode="promise_in_bounds")

    places = jnp.broadcast_to(places, (*rows.shape[:-2], places.shape[-1]))
    for _ in places.shape[:-1]:
        put = jax.vmap(put)
    return put(tokens, places, rows)
