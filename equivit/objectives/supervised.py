"""Supervised classification: mixed images, binary or soft cross-entropy, averaged weights."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.data.pixels import normalize
from equivit.layers.grid import check_grid
from equivit.logical import Tensor
from equivit.objectives import masking, mixing, token_drop
from equivit.objectives.objective import Batch, Extra, Rule, Trainable, usual_rule

LOSSES = ("bce", "cross_entropy")


class Supervised:
    """The classification objective of DeiT III (Touvron et al. 2022).

    `extra` holds "state", the model's arrays that are not trained, and with `ema` also "ema", the averaged parameters.

    Args:
      objective: the `objective` section of a config.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
      num_classes: entries of the logits.
      image_size: (height, width) of the images that the model is trained on.
    """

    DEFAULTS = dict(
        loss="bce",
        mixup=0.0,  # alpha of the Beta distribution; 0: never
        cutmix=0.0,
        mix_probability=1.0,
        switch_probability=0.5,  # of cutmix where both are on
        label_smoothing=0.0,
        ema=None,  # decay of the averaged weights
        token_drop=None,  # share of the patch tokens left out, at the beginning and at the end, such as (0.9, 0.1)
        token_drop_phases=10,  # each compiles a step of its own
    )

    @classmethod
    def create(cls, config: ConfigDict) -> "Supervised":
        """The objective of a config."""
        data = config.data
        return cls(
            config.objective,
            mean=data.mean,
            std=data.std,
            num_classes=config.model.num_classes,
            image_size=tuple(data.train_image_size or data.image_size),
        )

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for impossible values."""
        objective = config.objective
        Supervised.check_mixing(objective)
        errors.one_of("config.objective.loss", objective.loss, LOSSES)
        errors.number("config.objective.label_smoothing", objective.label_smoothing, "in [0, 1)")
        if objective.loss == "bce" and objective.label_smoothing:
            raise ValueError(
                f"config.objective.label_smoothing={objective.label_smoothing} with loss='bce' makes every target 1; "
                "set label_smoothing=0.0 or loss='cross_entropy'."
            )

    @staticmethod
    def check_mixing(objective: ConfigDict) -> None:
        """ValueError for impossible values of the keys that do not belong to the loss."""
        for key in ("mix_probability", "switch_probability"):
            errors.number(f"config.objective.{key}", objective[key], "in [0, 1]")
        for key in ("mixup", "cutmix"):
            errors.number(f"config.objective.{key}", objective[key], "zero or more")
        if objective.ema is not None and not (errors.is_number(objective.ema) and 0 < objective.ema < 1):
            raise ValueError(f"config.objective.ema={objective.ema!r} must be a decay in (0, 1), or None.")
        token_drop.check(objective.token_drop, objective.token_drop_phases)

    def __init__(
        self,
        objective: ConfigDict,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_classes: int,
        image_size: tuple[int, int],
    ):
        self._options, self._mean, self._std = objective, mean, std
        self._num_classes, self._image_size = num_classes, image_size
        self._model = None

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The model's parameters, and its state and averages; `key` is not needed."""
        self._model = logical.abstract(model)
        trainable, extra = logical.take(model), {"state": logical.take_state(model)}
        if self._options.ema is not None:
            extra["ema"] = jax.tree.map(jnp.copy, trainable)  # a copy: the step gives both buffers away
        return trainable, extra

    def names(self) -> dict[str, np.ndarray]:
        """The logical tensors of each parameter leaf."""
        return logical.tensors(self._model)

    def rules(self) -> Callable[[Tensor], Rule]:
        """No decay for vectors and scalars, position tables and tokens."""
        return usual_rule

    def static(self, progress: float) -> token_drop.Tokens | None:
        """How many patch tokens are used; None: all, and one compiled step serves the whole run."""
        section = self._options
        if section.token_drop is None:
            return None
        tokens = math.prod(check_grid(self._image_size, self._model.config.patch_size, "data.image_size"))
        return token_drop.tokens_at(progress, section.token_drop, section.token_drop_phases, tokens)

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The whole batch, normalised and mixed; `target` [B, classes] joins it."""
        section = self._options
        images, targets = mixing.mix(
            key,
            normalize(batch["image"], self._mean, self._std),
            mixing.soft_targets(batch["label"], self._num_classes, section.get("label_smoothing", 0.0)),
            mixup=section.mixup,
            cutmix=section.cutmix,
            probability=section.mix_probability,
            switch_probability=section.switch_probability,
        )
        return {**batch, "image": images, "target": targets}

    def loss(self, trainable, extra, batch, key, step, static):
        """The loss over a prepared batch, and the share of images whose best class is the label of the larger part."""
        model, chosen = logical.put(self._model, {**trainable, **extra["state"]}), {}
        if static is not None:
            key, keep_key = jax.random.split(key)
            chosen["keep"], _ = masking.random_keep(keep_key, len(batch["image"]), static.all, static.kept)
        logits = model(batch["image"], key=key, train=True, **chosen).astype(jnp.float32)
        accuracy = jnp.mean(logits.argmax(-1) == batch["target"].argmax(-1))
        metrics = {"accuracy": accuracy}
        return self._compare(logits, batch, extra), (metrics, {**extra, "state": logical.take_state(model)})

    def _compare(self, logits, batch, extra):
        """The loss of logits [B, classes]."""
        if self._options.loss == "bce":
            return binary_cross_entropy(logits, batch["target"])
        return optax.softmax_cross_entropy(logits, batch["target"]).mean()

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """Move the averaged weights towards the new ones."""
        if self._options.ema is None:
            return extra
        return {**extra, "ema": optax.incremental_update(trainable, extra["ema"], 1 - self._options.ema)}

    def exported(self, trainable: Trainable, extra: Extra) -> nnx.Module:
        """The model with the trained weights, as DeiT III reports them; pass `extra["ema"]` for the averaged ones."""
        return logical.put(self._model, {**trainable, **extra["state"]})


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Every class a yes or no: yes wherever the target [B, classes] is above 0.  Mean over batch and classes."""
    return optax.sigmoid_binary_cross_entropy(logits, targets > 0).mean()
