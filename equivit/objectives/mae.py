"""Masked autoencoding: predict the pixels of removed patches from the other patches.

Source: MAE (He et al. 2022, arXiv 2111.06377), Section 3; with a Jumbo token: Jumbo (arXiv 2502.15021), Section 4.3.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors
from equivit.constraints import Depth, Inside, OneOf, PositiveInt
from equivit.layers.dense import patchify
from equivit.layers.grid import check_grid
from equivit.layers.rngs import Keys
from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT
from equivit.objectives import masking
from equivit.objectives.objective import Batch, Loss, Objective, Step, check_masking

TARGETS = ("normalised_pixels", "pixels")
VARIANCES = ("unbiased", "biased")


class Mae(Objective):
    """Trains a `MaskedAutoencoder`, whose encoder is the model of the config, with a new decoder."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The `objective` section of a config."""

        ratio: Inside = 0.75  # fraction of removed patches
        # "normalised_pixels": normalised patch by patch; "pixels": normalised only by `data`
        target: Annotated[str, OneOf(TARGETS)] = "normalised_pixels"
        variance: Annotated[str, OneOf(VARIANCES)] = "unbiased"  # per patch; "biased" in the JAX version of MAE
        groups: PositiveInt | None = None  # number of groups that share a mask; None: a mask per image
        decoder_width: PositiveInt = 512
        decoder_depth: Depth = 8
        decoder_heads: PositiveInt = 16
        # "equivariant": reconstructions turn with image and mask, for encoders of family I or D (`models/decoders.py`)
        decoder: Literal["dense", "equivariant"] = "dense"

    FIXED = ("decoder_width", "decoder_depth", "decoder_heads", "decoder")

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for incompatible values, or a model that has a head or is not a ViT."""
        section = config.objective
        check_masking(config)
        if section.groups is not None:
            batch = f"config.batch_size={config.batch_size}"
            errors.divides("config.objective.groups", section.groups, config.batch_size, batch)

    def check_model(self, model: ViTConfig, teachers: Mapping[str, nnx.Module]) -> None:
        """As in `Objective`; also ValueError for an impossible decoder, or if no patch would be kept or removed."""
        super().check_model(model, teachers)
        for size in {self.image_size, tuple(self.config.data.image_size)}:  # the second is for evaluation
            masking.number_kept(math.prod(check_grid(size, model.patch_size, "image")), self.options.ratio)
        self._whole(model)

    def module(self, model: ViT, key: jax.Array) -> MaskedAutoencoder:
        """A masked autoencoder with the model as its encoder."""
        return MaskedAutoencoder(self._whole(model.config), model, rngs=Keys(key))

    def _whole(self, encoder: ViTConfig) -> MaskedAutoencoderConfig:
        return MaskedAutoencoderConfig(encoder, **{name: self.options[name] for name in self.FIXED})

    def prepare(self, module: MaskedAutoencoder, batch: Batch, key: jax.Array) -> Batch:
        """Normalise the whole batch and add `keep` [B, K] and `mask` [B, N]."""
        images = batch["image"]
        tokens = math.prod(check_grid(images.shape[1:3], module.config.encoder.patch_size, "image"))
        kept = masking.number_kept(tokens, self.options.ratio)
        keep, mask = masking.random_keep(key, len(images), tokens, kept, self.options.groups)
        return {**super().prepare(module, batch, key), "keep": keep, "mask": mask}

    def loss(self, module: MaskedAutoencoder, batch: Batch, step: Step) -> Loss:
        """The mean squared error over removed patches, and the explained fraction of their variance."""
        predictions = module(batch["image"], keep=batch["keep"], key=step.key, train=True)
        patch_size = module.config.encoder.patch_size
        wanted = targets(batch["image"], patch_size, self.options.target, self.options.variance)
        loss = removed_errors(predictions, wanted, batch["mask"]).mean()
        explained = 1 - loss / removed_errors(jnp.zeros_like(wanted), wanted, batch["mask"]).mean()
        return Loss(loss, {"explained": explained})


def targets(images: jax.Array, patch_size: tuple[int, int], target: str, variance: str) -> jax.Array:
    """The targets of the prediction, float32 [*B, N, ph pw C], for normalised images [*B, H, W, C].

    `target` is one of TARGETS; `variance`, for "normalised_pixels", one of VARIANCES.
    """
    patches = patchify(images.astype(jnp.float32), patch_size)
    if target == "pixels":
        return patches
    spread = patches.var(-1, keepdims=True, ddof=int(variance == "unbiased"))
    return (patches - patches.mean(-1, keepdims=True)) * jax.lax.rsqrt(spread + 1e-6)


def removed_errors(predictions: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean squared error over the removed patches of each image, in float32.

    Shapes: predictions and targets [*B, N, P], mask [*B, N], 1 where a patch is removed -> [*B].
    """
    error = jnp.square(predictions.astype(jnp.float32) - targets).mean(-1)
    return (error * mask).sum(-1) / mask.sum(-1)
