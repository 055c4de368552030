"""Classification of time series: cross-entropy against labels."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit.objectives.objective import Batch, Loss, Objective, Step


class SeriesClassification(Objective):
    """The objective of the time series experiments (Jumbo, Appendix A.3.2).

    A batch has "series" [B, T, channels], preprocessed before training (`data/series.py`), and "label" [B].

    Args:
      config: the configuration of a sweep (`training/sweep_config.py`).
      dropout: probability, which overrides the model's; may be traced, so that one program serves many values.
    """

    def __init__(self, config: ConfigDict, *, dropout: float | jax.Array):
        super().__init__(config)
        self._dropout = dropout

    def loss(self, module: nnx.Module, batch: Batch, step: Step) -> Loss:
        """The cross-entropy and the accuracy."""
        logits = module(batch["series"], key=step.key, train=True, dropout=self._dropout).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return Loss(loss, {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])})
