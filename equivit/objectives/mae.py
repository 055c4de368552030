"""Masked autoencoding: the pixels of removed patches are predicted from the patches that are left.

Source: MAE (He et al. 2022, arXiv 2111.06377), Section 3; with a Jumbo token: Jumbo (arXiv 2502.15021), Section 4.3.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.data.pixels import normalize
from equivit.layers.dense import patchify
from equivit.layers.grid import check_grid
from equivit.logical import Tensor
from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.objectives import masking
from equivit.objectives.objective import Batch, Extra, Rule, Trainable, usual_rule

TARGETS = ("normalised_pixels", "pixels")
VARIANCES = ("unbiased", "biased")


class Mae:
    """The model of the config is the encoder; the decoder is drawn by `init` and trained with it.

    `extra` holds "state", the model's arrays that are not trained.

    Args:
      objective: the `objective` section of a config.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
    """

    DEFAULTS = dict(
        ratio=0.75,  # share of the patches that is removed
        target="normalised_pixels",  # each patch with mean 0 and variance 1; or "pixels", normalised by the data's
        variance="unbiased",  # of a patch; "biased" in the JAX version of MAE
        groups=None,  # the batch is cut into so many runs of images that share a mask; None: each image has its own
        decoder_width=512,
        decoder_depth=8,
        decoder_heads=16,
    )

    @classmethod
    def create(cls, config: ConfigDict) -> "Mae":
        """The objective of a config."""
        return cls(config.objective, mean=config.data.mean, std=config.data.std)

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for impossible values, and for a model with a head."""
        section = config.objective
        errors.number("config.objective.ratio", section.ratio, "in (0, 1)")
        errors.one_of("config.objective.target", section.target, TARGETS)
        errors.one_of("config.objective.variance", section.variance, VARIANCES)
        for key in ("decoder_width", "decoder_depth", "decoder_heads"):
            errors.whole(f"config.objective.{key}", section[key])
        if section.groups is not None:
            errors.whole("config.objective.groups", section.groups)
            if config.batch_size % section.groups:
                raise ValueError(
                    f"config.objective.groups={section.groups} must divide config.batch_size={config.batch_size}."
                )
        if config.model.get("num_classes", "not set") is not None:
            raise ValueError(
                f"config.model.num_classes={config.model.get('num_classes', 'not set')}: a masked autoencoder has no "
                "head to train; say num_classes=None."
            )

    def __init__(self, objective: ConfigDict, *, mean: tuple[float, ...], std: tuple[float, ...]):
        self._options, self._mean, self._std = objective, mean, std
        self._model = None

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The parameters of the encoder `model` and of a decoder drawn with `key`, and the state."""
        sizes = {name: self._options[name] for name in ("decoder_width", "decoder_depth", "decoder_heads")}
        config = MaskedAutoencoderConfig(model.config, **sizes)
        whole = MaskedAutoencoder(config, model, rngs=nnx.Rngs(params=key))
        self._model = logical.abstract(whole)
        return logical.take(whole), {"state": logical.take_state(whole)}

    def names(self) -> dict[str, np.ndarray]:
        """The logical tensors of each parameter leaf, beginning with "encoder." or "decoder."."""
        return logical.tensors(self._model)

    def rules(self) -> Callable[[Tensor], Rule]:
        """No decay for vectors, position tables and tokens."""
        return usual_rule

    def static(self, progress: float) -> None:
        """One compiled step serves the whole run."""

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The whole batch, normalised; `keep` [B, K] and `mask` [B, N] join it."""
        images = normalize(batch["image"], self._mean, self._std)
        h, w = check_grid(images.shape[1:3], self._model.config.encoder.patch_size, "image")
        kept = masking.number_kept(h * w, self._options.ratio)
        keep, mask = masking.random_keep(key, len(images), h * w, kept, self._options.groups)
        return {**batch, "image": images, "keep": keep, "mask": mask}

    def loss(self, trainable, extra, batch, key, step, static):
        """The mean squared error over removed patches, and the share of their variation that is predicted."""
        model = self.exported(trainable, extra)
        predictions = model(batch["image"], batch["keep"], key=key)
        wanted = targets(batch["image"], model.config.encoder.patch_size, self._options.target, self._options.variance)
        loss = removed_errors(predictions, wanted, batch["mask"]).mean()
        explained = 1 - loss / removed_errors(jnp.zeros_like(wanted), wanted, batch["mask"]).mean()
        return loss, ({"explained": explained}, {**extra, "state": logical.take_state(model)})

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """Nothing is averaged."""
        return extra

    def exported(self, trainable: Trainable, extra: Extra) -> MaskedAutoencoder:
        """The masked autoencoder with the trained weights; its `encoder` is what other programs use."""
        return logical.put(self._model, {**trainable, **extra["state"]})


def targets(images: jax.Array, patch_size: tuple[int, int], target: str, variance: str) -> jax.Array:
    """What is to be predicted of normalised images [*B, H, W, C]: float32 [*B, N, ph pw C].

    Args:
      target: one of TARGETS.
      variance: one of VARIANCES, for "normalised_pixels".
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
