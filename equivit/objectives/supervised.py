"""Supervised classification: mixed images, binary or soft cross-entropy, averaged weights."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit import logical
from equivit.constraints import Below1, Inside, NonNegativeFloat, PositiveInt, Share, Words
from equivit.layers.grid import check_grid
from equivit.logical import Arrays
from equivit.models.model import Config, ModelModule
from equivit.models.vit.config import ViTConfig
from equivit.objectives import masking, mixing
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Batch, Extra, Loss, Objective, Step, averaged

Decay = Annotated[Inside, Words("a decay in (0, 1)")]
Rates = Annotated[tuple[Below1, Below1], Words("two shares in [0, 1), dropped at the start and at the end")]


@dataclasses.dataclass(frozen=True)
class MixingOptions:
    """The options of all objectives on mixed images: mixing, averaged weights, dropped tokens."""

    mixup: NonNegativeFloat = 0.0  # alpha of the Beta distribution; 0: never
    cutmix: NonNegativeFloat = 0.0
    mix_probability: Share = 1.0
    switch_probability: Share = 0.5  # probability of cutmix if both are on
    mix_groups: PositiveInt = 1  # groups of the batch mixed separately; each GPU in the original runs
    ema: Decay | None = None  # decay of the averaged weights
    token_drop: Rates | None = None  # fractions of patch tokens dropped at the start and the end, as (0.9, 0.1)
    token_drop_phases: PositiveInt = 10  # each phase compiles a training step


class Supervised(Objective):
    """The classification objective of DeiT III (Touvron et al. 2022).

    With `ema`, `extra["ema"]` holds the averaged parameters; running statistics are not averaged but copied.
    """

    @dataclasses.dataclass(frozen=True)
    class Options(MixingOptions):
        """The `objective` section of a config."""

        loss: Literal["bce", "cross_entropy"] = "bce"
        label_smoothing: Below1 = 0.0

    weights = ("trained", "averaged")
    has_head = True

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for incompatible values."""
        objective = config.objective
        if objective.mixup or objective.cutmix:
            mixing.check_groups("config.objective.mix_groups", objective.mix_groups, config.batch_size)
        if objective.get("loss") == "bce" and objective.label_smoothing:  # distillation has neither
            raise ValueError(
                f"config.objective.label_smoothing={objective.label_smoothing} with loss='bce' makes every target 1; "
                "set label_smoothing=0.0 or loss='cross_entropy'."
            )

    def check_model(self, model: Config, teachers: Mapping[str, nnx.Module]) -> None:
        """As in `Objective`; also ValueError if `token_drop` is set for a model without tokens that can be dropped."""
        super().check_model(model, teachers)
        if self.options.token_drop is not None:
            self._tokens(model)
            self._check_drop(model)

    def extra(self, trainable: Arrays) -> Extra:
        """The averages, which start as the parameters."""
        # A copy, since the compiled step donates the buffers of both.
        return {} if self.options.ema is None else {"ema": jax.tree.map(jnp.copy, trainable)}

    def static(self, module: ModelModule, progress: float) -> masking.Tokens | None:
        """The number of patch tokens used; None for all."""
        options = self.options
        if options.token_drop is None:
            return None
        return masking.tokens_at(progress, options.token_drop, options.token_drop_phases, self._tokens(module.config))

    def _tokens(self, model: Config) -> int:
        """The number of patch tokens of a training image."""
        if not isinstance(model, ViTConfig):
            raise ValueError(
                f"config.objective.token_drop={self.options.token_drop}: {type(model).__name__} has no patch tokens "
                "to drop; set it to None, or train a ViT."
            )
        return math.prod(check_grid(self.image_size, model.patch_size, "training images"))

    def _check_drop(self, model: Any) -> None:
        """ValueError if a part of the ViT needs the whole grid of patches."""
        convolved = ", ".join(str(one.block) for one in model.replaced if one.kind != "identity")
        ordinary = "adaptive=False" if model.keeps_symmetry else "adaptive=('token',)"
        for needs, is_set, fix in (
            (f"position={model.position!r}", model.position == "rotary", "position='learned'"),
            (f"adaptive={model.adaptive!r}", "position" in model.parts, ordinary),
            (f"replaced (convolutions in blocks {convolved})", bool(convolved), "replaced=()"),
        ):
            if is_set:
                raise ValueError(
                    f"config.objective.token_drop={self.options.token_drop}: config.model.{needs} needs the whole grid "
                    f"of patches; set token_drop=None, or config.model.{fix}."
                )

    def prepare(self, module: nnx.Module, batch: Batch, key: jax.Array) -> Batch:
        """Normalise and mix the whole batch and add `target` [B, classes]."""
        options = self.options
        images, targets = mixing.mix(
            key,
            super().prepare(module, batch, key)["image"],
            mixing.soft_targets(batch["label"], self.config.model.num_classes, options.get("label_smoothing", 0.0)),
            mixup=options.mixup,
            cutmix=options.cutmix,
            probability=options.mix_probability,
            switch_probability=options.switch_probability,
            groups=options.mix_groups,
        )
        return {**batch, "image": images, "target": targets}

    def loss(self, module: nnx.Module, batch: Batch, step: Step) -> Loss:
        """The loss, and the accuracy for the label with the largest weight in the mix."""
        key, chosen = step.key, {}
        if isinstance(step.static, masking.Tokens):
            key, keep_key = jax.random.split(key)
            tokens = step.static
            chosen["keep"], _ = masking.random_keep(keep_key, len(batch["image"]), tokens.all, tokens.kept)
        logits = module(batch["image"], key=key, train=True, **chosen).astype(jnp.float32)
        accuracy = jnp.mean(logits.argmax(-1) == batch["target"].argmax(-1))
        return Loss(self.compare(logits, batch, step), {"accuracy": accuracy})

    def compare(self, logits: jax.Array, batch: Batch, step: Step) -> jax.Array:
        """The loss of logits [B, classes]."""
        if self.options.loss == "bce":
            return binary_cross_entropy(logits, batch["target"])
        return optax.softmax_cross_entropy(logits, batch["target"]).mean()

    def after_step(self, trainable: Arrays, extra: Extra, clock: Clock) -> Extra:
        """Update the averages of the weights."""
        if self.options.ema is None:
            return extra
        return {**extra, "ema": averaged(trainable, extra["ema"], 1 - self.options.ema)}

    def exported(self, module: nnx.Module, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The trained model, or the model with averaged parameters."""
        if weights != "averaged":
            return module
        if self.options.ema is None:
            raise ValueError("the run keeps no averaged weights: its config.objective.ema is None.")
        return logical.put(module, extra["ema"])


def binary_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Binary cross-entropy per class, positive if its target [B, classes] is above 0; mean over batch and classes."""
    return optax.sigmoid_binary_cross_entropy(logits, targets > 0).mean()
