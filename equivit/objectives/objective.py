"""The interface between an objective and the training loop.

The loop knows nothing of models: it holds `trainable` (a flat dict of arrays that is optimised), `extra` (everything
else that lives from step to step: EMA weights, running statistics, teachers) and calls the functions below.
"""

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit.logical import Tensor

Trainable = dict[str, jax.Array]
Extra = dict[str, Any]  # what the loop puts under "frozen", a teacher, is neither optimised nor checkpointed
Batch = dict[str, jax.Array]  # every leaf has the example axis first


class Rule(NamedTuple):
    """How one logical tensor is optimised."""

    lr: float = 1.0  # multiplies the schedule
    decay: bool = True  # weight decay, and with LAMB the trust ratio
    clip: str = "all"  # gradients of one clip group share one global norm
    frozen: bool = False


def usual_rule(tensor: Tensor) -> Rule:
    """No decay for vectors and scalars, nor for what declares it, such as positions and tokens."""
    return Rule(decay=tensor.decay and len(tensor.shape) > 1)


class Objective(Protocol):
    """What is minimised.  All functions but `init` are pure and run under `jax.jit`, except `static` and `rules`.

    Attributes:
      DEFAULTS: the keys that the `objective` section of a config has beside `name`, with their defaults.
    """

    DEFAULTS: ClassVar[dict[str, Any]]

    @classmethod
    def create(cls, config: ConfigDict) -> "Objective":
        """The objective of a checked config; `model.num_classes` is known where the data have classes.

        An objective with a teacher takes it as `teacher=`, and can do all but `prepare` and `loss` without one.
        """

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for a value of the `objective` section that is impossible, or does not go with the others."""

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The arrays to train and the arrays that go along; may run under `jax.eval_shape`."""

    def names(self) -> dict[str, np.ndarray]:
        """The logical tensors of each trainable leaf (`logical.py`); known after `init`."""

    def rules(self) -> Callable[[Tensor], Rule]:
        """The rule for each logical tensor, from what is known of it."""

    def static(self, progress: float) -> Hashable:
        """What the compiled step depends on, such as a token-drop phase; a new value compiles a new step.

        `progress` in [0, 1) is the share of all steps that is done.  A value that is not None is logged when it is new.
        """

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The whole global batch, normalised and mixed or masked, before it is cut into micro-batches."""

    def loss(
        self, trainable: Trainable, extra: Extra, batch: Batch, key: jax.Array, step: jax.Array, static: Hashable
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Extra]]:
        """The scalar loss over a prepared batch, scalar metrics, and `extra` after the forward pass."""

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """`extra` after the parameters changed; EMA weights are updated here.  `step` counts finished steps."""

    def exported(self, trainable: Trainable, extra: Extra) -> nnx.Module:
        """The model that evaluation and other programs use."""
