"""What every objective is made of: the module it trains, its loss, and defaults for everything else.

The training loop builds the module, differentiates the loss, keeps running statistics and moves the parameters
(`training/state.py`); an objective says what is trained and what is minimised.
"""

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import logical, precision
from equivit.data.transforms import Train
from equivit.logical import Arrays, Tensor
from equivit.models.model import Config, check_input
from equivit.objectives.clock import Clock

Extra = dict[str, Any]  # arrays in nested dicts
Batch = dict[str, jax.Array]  # every leaf has the example axis first


class Rule(NamedTuple):
    """How one logical tensor is optimised."""

    lr: float = 1.0  # multiplies the schedule
    decay: bool = True  # weight decay, and with LAMB the trust ratio
    clip: str = "all"  # gradients of one clip group share one global norm
    frozen: bool = False
    starts: int = 0  # the first step that moves it; moments are gathered from step 0


def usual_rule(tensor: Tensor) -> Rule:
    """No decay for vectors and scalars, nor for what declares it, such as positions and tokens."""
    return Rule(decay=tensor.decay and len(tensor.shape) > 1)


class Step(NamedTuple):
    """What a loss may depend on beside the module and the batch.

    Attributes:
      key: drives what is random.
      clock: where the run stands.
      static: what `Objective.static` returned.
      extra: the arrays of `Objective.extra` as they are now.
      given: models that the run uses and does not train, by name, such as a teacher.
    """

    key: jax.Array
    clock: Clock
    static: Hashable
    extra: Extra
    given: dict[str, nnx.Module]


class Loss(NamedTuple):
    """What a loss returns: a scalar, scalar metrics to log, and `extra` where it changed (None: it did not)."""

    value: jax.Array
    metrics: dict[str, jax.Array]
    extra: Extra | None = None


class Objective:
    """What is minimised.  A subclass has a `loss` and overrides the defaults that do not fit.

    All methods are pure: nothing is stored on the objective after it is made.  `loss` and `after_step` are traced.

    Args:
      config: a checked config; `config.model.num_classes` is known where the data have classes.

    Attributes:
      DEFAULTS: the keys that the `objective` section of a config has beside `name`, with their defaults.
      TYPES: their types (`constraints.py`).
      FIXED: those of them that say what is trained, and so cannot change when a run goes on.
      transform: makes rows of a batch from examples (`data/batches.py`); entries: what examples must have.
      options: the `objective` section.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    TYPES: ClassVar[dict[str, Any]] = {}
    FIXED: ClassVar[tuple[str, ...]] = ()
    transform: ClassVar[type] = Train
    entries: ClassVar[tuple[str, ...]] = ("image", "label")

    def __init__(self, config: ConfigDict):
        self.config, self.options = config, config.get("objective")

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for values of the `objective` section, each of its type, that do not go together."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images that the model is trained on."""
        data = self.config.data
        return tuple(data.train_image_size or data.image_size)

    def check_model(self, model: Config, given: Mapping[str, nnx.Module]) -> None:
        """ValueError for a model, or one that is given (`Step.given`), that the images do not fit.

        A run calls it before anything is compiled; `config.model.in_channels` is that of the data.
        """
        check_input(model, "training images", self.image_size, self.config.model.in_channels)

    def module(self, model: nnx.Module, key: jax.Array) -> nnx.Module:
        """What is trained: the model, and what this objective adds to it, drawn with `key`."""
        return model

    def rule(self, tensor: Tensor) -> Rule:
        """How a logical tensor of the module is optimised."""
        return usual_rule(tensor)

    def extra(self, trainable: Arrays) -> Extra:
        """Arrays that live from step to step beside the module, such as averages, as they are before the first step."""
        return {}

    def static(self, module: nnx.Module, progress: float) -> Hashable:
        """What the compiled step depends on, such as a number of tokens; a new value compiles a new step.

        Args:
          module: with shapes in place of arrays.
          progress: the share of all steps that is done, in [0, 1).

        Returns:
          The value, logged when it is new; None: one compiled step serves the whole run.
        """
        return None

    def prepare(self, module: nnx.Module, batch: Batch, key: jax.Array) -> Batch:
        """The whole global batch, normalised and mixed or masked, before it is cut into micro-batches.

        `module` has shapes in place of arrays.
        """
        return batch

    def loss(self, module: nnx.Module, batch: Batch, step: Step) -> Loss:
        """The loss over a prepared batch.  Running statistics are those that `module` has afterwards."""
        raise NotImplementedError(f"{type(self).__name__} has no loss.")

    def after_step(self, trainable: Arrays, extra: Extra, clock: Clock) -> Extra:
        """`extra` after the parameters changed; averages move here.  The clock is that of the loss."""
        return extra

    def holding(self, module: nnx.Module, arrays: Arrays) -> nnx.Module:
        """A copy of `module`, which may be abstract, with `arrays` in it, at the precision of the run.

        A loss calls it for what it computes with other parameters than the trained ones, such as their averages.
        """
        return precision.cast(logical.put(module, arrays), self.config.get("precision", "float32"))

    def exported(self, module: nnx.Module, extra: Extra) -> nnx.Module:
        """The model that evaluation and other programs use."""
        return module


def check_head(config: ConfigDict) -> None:
    """ValueError unless the model of the config has a head."""
    if config.model.num_classes is None:
        raise ValueError(
            f"config.model.num_classes=None: {config.model.name} has no head, which "
            f"objective.name={config.objective.name!r} trains; set num_classes."
        )
