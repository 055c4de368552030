"""Classification of time series: cross-entropy against labels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from equivit import logical
from equivit.logical import Tensor
from equivit.objectives.objective import Batch, Extra, Rule, Trainable, usual_rule


class SeriesClassification:
    """The objective of the time series experiments (Jumbo, Appendix A.3.2).

    A batch has "series" [B, T, channels] and "label" [B]; `extra` holds "state", the running statistics.

    Args:
      model: the model to train, which may be abstract.
      dropout: probability, in place of the model's own; may be traced, so that runs that differ in it are one program.
    """

    def __init__(self, model: nnx.Module, *, dropout: float | jax.Array):
        self._model, self._dropout = model, dropout

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The model's parameters and state; `key` is not needed."""
        return logical.take(model), {"state": logical.take_state(model)}

    def names(self) -> dict[str, np.ndarray]:
        """The logical tensors of each parameter leaf."""
        return logical.tensors(self._model)

    def rules(self) -> Callable[[Tensor], Rule]:
        """No decay for vectors, position tables and tokens."""
        return usual_rule

    def static(self, progress: float) -> None:
        """One compiled step serves the whole run."""

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """Series are prepared once, before training (`data/series.py`)."""
        return batch

    def loss(self, trainable, extra, batch, key, step, static):
        """The cross-entropy over a batch, and the share of series whose best class is the label."""
        model = self.exported(trainable, extra)
        logits = model(batch["series"], key=key, train=True, dropout=self._dropout).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return loss, ({"accuracy": accuracy}, {**extra, "state": logical.take_state(model)})

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """Nothing is averaged."""
        return extra

    def exported(self, trainable: Trainable, extra: Extra) -> nnx.Module:
        """The model with the trained weights."""
        return logical.put(self._model, {**trainable, **extra["state"]})
