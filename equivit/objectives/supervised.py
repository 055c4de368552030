"""Supervised classification: mixed images, binary or soft cross-entropy, averaged weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit.data import mixing
from equivit.layers import parameters
from equivit.objectives.objective import Batch, Extra, Rule, Trainable

UNDECAYED = ("position", "class_token", "registers", "mask_token")  # beginnings of leaf names


class Supervised:
    """The classification objective of DeiT III (Touvron et al. 2022).

    `extra` holds "state", the model's arrays that are not trained, and with `ema` also "ema", the averaged parameters.

    Args:
      objective: the `objective` section of a config.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
      num_classes: entries of the logits.
    """

    def __init__(self, objective: ConfigDict, *, mean: tuple[float, ...], std: tuple[float, ...], num_classes: int):
        self._options, self._mean, self._std, self._num_classes = objective, mean, std, num_classes
        self._model = None

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The model's parameters, and its state and averages; `key` is not needed."""
        self._model = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), model)
        trainable, extra = parameters.take(model), {"state": parameters.take_state(model)}
        if self._options.ema is not None:
            extra["ema"] = jax.tree.map(jnp.copy, trainable)  # a copy: the step gives both buffers away
        return trainable, extra

    def names(self) -> dict[str, np.ndarray]:
        """Logical names of each parameter leaf."""
        return parameters.names(self._model)

    def rules(self) -> Callable[[str, tuple[int, ...]], Rule]:
        """No decay for vectors and scalars, position tables and tokens."""
        return lambda name, shape: Rule(decay=len(shape) > 1 and not _undecayed(name))

    def static(self, step: int) -> None:
        """One compiled step serves the whole run."""

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The whole batch, normalised and mixed; `target` [B, classes] joins it."""
        options = self._options
        images, targets = mixing.mix(
            key,
            normalize(batch["image"], self._mean, self._std),
            mixing.soft_targets(batch["label"], self._num_classes, options.label_smoothing),
            mixup=options.mixup,
            cutmix=options.cutmix,
            probability=options.mix_probability,
            switch_probability=options.switch_probability,
        )
        return {**batch, "image": images, "target": targets}

    def loss(self, trainable, extra, batch, key, step, static):
        """The loss over a prepared batch, and the share of images whose best class is the label of the larger part."""
        model = parameters.put(self._model, {**trainable, **extra["state"]})
        logits = model(batch["image"], key=key, train=True).astype(jnp.float32)
        if self._options.loss == "bce":
            loss = binary_cross_entropy(logits, batch["target"])
        else:
            loss = optax.softmax_cross_entropy(logits, batch["target"]).mean()
        accuracy = jnp.mean(logits.argmax(-1) == batch["target"].argmax(-1))
        return loss, ({"accuracy": accuracy}, {**extra, "state": parameters.take_state(model)})

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """Move the averaged weights towards the new ones."""
        if self._options.ema is None:
            return extra
        return {**extra, "ema": optax.incremental_update(trainable, extra["ema"], 1 - self._options.ema)}

    def exported(self, trainable: Trainable, extra: Extra) -> nnx.Module:
        """The model with the trained weights, as DeiT III reports them; pass `extra["ema"]` for the averaged ones."""
        return parameters.put(self._model, {**trainable, **extra["state"]})


def normalize(images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Pixel values 0..255 [B, H, W, C] as float32 of mean 0 and deviation 1.

    Raises ValueError unless mean and std have one entry, or one for each channel.
    """
    if len(mean) not in (1, images.shape[-1]):
        raise ValueError(f"data.mean={mean} has {len(mean)} entries for images of {images.shape[-1]} channels.")
    return (images.astype(jnp.float32) / 255 - jnp.asarray(mean)) / jnp.asarray(std)


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Every class a yes or no: yes wherever the target [B, classes] is above 0.  Mean over batch and classes."""
    return optax.sigmoid_binary_cross_entropy(logits, targets > 0).mean()


def _undecayed(name: str) -> bool:
    return any(part.startswith(UNDECAYED) for part in name.split("."))
