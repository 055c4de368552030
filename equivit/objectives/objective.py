"""The interface of objectives: the module to train, the loss, and defaults for everything else.

An objective defines the module to train and the loss.  The training step differentiates the loss, keeps running
statistics and updates the parameters (`training/state.py`).
"""

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical, precision
from equivit.data.batches import MakeTransform
from equivit.data.pixels import normalize
from equivit.data.transforms import Train
from equivit.layers.stack import used
from equivit.logical import Arrays, Tensor
from equivit.models import zoo
from equivit.models.model import Config, check_input
from equivit.models.vit.config import ViTConfig
from equivit.objectives.clock import Clock

Extra = dict[str, Any]  # arrays in nested dicts
Batch = dict[str, jax.Array]  # the first axis of every array is the batch


class Rule(NamedTuple):
    """How one logical tensor is optimised."""

    lr: float = 1.0  # multiplies the schedule
    decay: bool = True  # weight decay, and with LAMB the trust ratio
    clip: str = "all"  # clip group; its gradients share one global norm
    frozen: bool = False
    starts: int = 0  # the first step that updates it; moments are accumulated from step 0


def usual_rule(tensor: Tensor) -> Rule:
    """No decay for vectors, scalars, and tensors declared without it, such as positions and tokens."""
    return Rule(decay=tensor.decay and len(tensor.shape) > 1)


class Step(NamedTuple):
    """The inputs of a loss besides the module and the batch."""

    key: jax.Array  # the source of all randomness
    clock: Clock  # the progress of the run
    static: Hashable  # the value of `Objective.static`
    extra: Extra  # the current arrays of `Objective.extra`
    teachers: dict[str, nnx.Module]  # models the run uses but does not train, by name, such as "teacher"


class Loss(NamedTuple):
    """The result of a loss: a scalar, scalar metrics to log, and the new `extra` (None: unchanged)."""

    value: jax.Array
    metrics: dict[str, jax.Array]
    extra: Extra | None = None


class Objective:
    """The base of all objectives.  A subclass defines `loss` and overrides the defaults that do not fit.

    All methods are pure: the objective never changes after its construction.  `loss` and `after_step` are traced.

    Args:
      config: a checked config; `config.model.num_classes` is set if the data have classes.

    Raises:
      ValueError: the objective trains a head (`has_head`), and the model has none.
    """

    Options: ClassVar[type]  # the keys of the `objective` section of a config, without `name` (`sections.py`)
    FIXED: ClassVar[tuple[str, ...]] = ()  # those that determine the trained module: they cannot change on resuming
    entries: ClassVar[tuple[str, ...]] = ("image", "label")  # of every example
    weights: ClassVar[tuple[str, ...]] = ("trained",)  # that a run keeps and can export; the first is the default
    has_head: ClassVar[bool] = False
    decodes: ClassVar[bool] = False  # the exported model has the objective's additions, takes images, and is counted
    prefix: ClassVar[str] = ""  # of the exported model's parts in the names of the module

    def __init__(self, config: ConfigDict):
        self.config, self.options = config, config.get("objective")
        if self.has_head and config.model.get("num_classes") is None:
            raise ValueError(
                f"config.model.num_classes=None: {config.model.name} has no head, which "
                f"objective.name={config.objective.name!r} trains; set num_classes, or set data.source to existing "
                "data."
            )

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for values of the `objective` section that are incompatible."""

    @classmethod
    def transform_of(cls, config: ConfigDict) -> MakeTransform:
        """A factory of the transform from an example to a row of a batch (`data/batches.py`)."""
        return Train

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the training images for the model."""
        data = self.config.data
        return tuple(data.train_image_size or data.image_size)

    def check_model(self, model: Config, teachers: Mapping[str, nnx.Module]) -> None:
        """ValueError if the images or the batch do not fit the model or a teacher (`Step.teachers`).

        A run calls this before compiling anything; `config.model.in_channels` is set from the data.
        """
        check_input(model, "training images", self.image_size, self.config.model.in_channels)
        groups = getattr(model, "statistics_groups", 1)  # of batch norms
        images = self.config.batch_size // self.config.optimizer.accumulation
        errors.divides("config.model.statistics_groups", groups, images, f"the {images} images of a micro-batch")

    def module(self, model: nnx.Module, key: jax.Array) -> nnx.Module:
        """The module to train: the model and this objective's additions, initialised with `key`."""
        return model

    def rule(self, tensor: Tensor) -> Rule:
        """The optimisation rule of a logical tensor of the module."""
        return usual_rule(tensor)

    def extra(self, trainable: Arrays) -> Extra:
        """The initial values of further arrays carried from step to step, such as averages."""
        return {}

    def static(self, module: nnx.Module, progress: float) -> Hashable:
        """A value that the compiled step depends on, such as a number of tokens; each new value compiles a new step.

        Args:
          module: has shapes instead of arrays.
          progress: the finished fraction of all steps, in [0, 1).

        Returns:
          The value, logged when it changes; None: one compiled step serves the whole run.
        """
        return None

    def prepare(self, module: nnx.Module, batch: Batch, key: jax.Array) -> Batch:
        """Normalise, and mix or mask, the whole global batch before it is split into micro-batches.

        `module` has shapes instead of arrays.  By default, images are normalised.
        """
        return {**batch, "image": normalize(batch["image"], self.config.data.mean, self.config.data.std)}

    def loss(self, module: nnx.Module, batch: Batch, step: Step) -> Loss:
        """The loss of a prepared batch; it updates the running statistics in `module`."""
        raise NotImplementedError(f"{type(self).__name__} has no loss.")

    def after_step(self, trainable: Arrays, extra: Extra, clock: Clock) -> Extra:
        """`extra` after the update of the parameters, such as new averages; the clock is as in the loss."""
        return extra

    def holding(self, module: nnx.Module, arrays: Arrays) -> nnx.Module:
        """A copy of `module`, which may be abstract, with `arrays` at the precision of the run, to compute with.

        A loss uses it to compute with other parameters, such as averages.
        """
        return used(logical.put(module, arrays), precision.AtUse(self.config.get("precision", "float32")))

    def remarks(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings about the mean metrics since the last call, such as failed training."""
        return []

    def exported(self, module: nnx.Module, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The model for evaluation and other programs.

        Args:
          weights: one of `weights`; None for the first.

        Raises:
          ValueError: the run does not keep these weights.
        """
        return module


def averaged(new: Arrays, old: Arrays, share: float | jax.Array) -> Arrays:
    """Move averages by a share towards the new values; averages of frozen slices keep every bit.

    Only parameters are averaged; running statistics are copied from the trained model, as in PyTorch's `AveragedModel`.
    """
    moved: Any = optax.incremental_update(new, old, share)
    return {k: jnp.where(new[k] == old[k], old[k], moved[k]) for k in old}


def classification(logits: jax.Array, labels: jax.Array) -> Loss:
    """The mean cross-entropy of logits [B, classes] and labels [B], and the accuracy."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return Loss(loss, {"accuracy": jnp.mean(logits.argmax(-1) == labels)})


def check_masking(config: ConfigDict) -> None:
    """ValueError unless the config's model has a fixed grid of patches (a ViT or Jumbo ViT) and no head."""
    name, adaptive = config.model.get("name"), config.model.get("adaptive", False)
    if name in zoo.NAMES and not issubclass(zoo.NAMES[name].config, ViTConfig):
        raise ValueError(
            f"config.model.name={name!r}: objective.name={config.objective.name!r} drops or masks patches or compares "
            "their tokens, which only ViTs support; use one, such as vit_s16."
        )
    if adaptive is True or isinstance(adaptive, tuple | list) and "token" in adaptive:
        raise ValueError(
            f"config.model.adaptive={errors.shown(adaptive)}: the content determines its patch grid, but "
            f"objective.name={config.objective.name!r} compares patches on a fixed grid; set it to False."
        )
    if (classes := config.model.get("num_classes", "not set")) is not None:
        raise ValueError(
            f"config.model.num_classes={classes}: objective.name={config.objective.name!r} has no head to train; set "
            "num_classes=None."
        )
