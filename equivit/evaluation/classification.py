"""Count correct predictions."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from equivit.evaluation.predictions import Batch, Predict, all_finite, measured


def accuracy(predict: Predict, batches: Iterable[Batch]) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy.

    Args:
      predict: uint8 images [B, H, W, C] to logits [B, classes] (`predictions.predictor`).
      batches: with "image", "label" and "weight" [B]: 1 for examples, 0 for padding.  Labels are int [B]; with several
        per example, bool [B, classes], any of which is correct (ReaL, Beyer et al. 2020).

    Returns:
      "top1", "top5" (of all classes if there are fewer than five), "examples".

    Raises:
      ValueError: there are no examples, or logits are not finite.
    """

    def measure(batch):
        return count(predict(batch["image"]), batch["label"], batch["weight"])

    return shares(total(measured(measure, batches)))


def hits(classes: jax.Array, label: jax.Array) -> jax.Array:
    """Whether `classes` [*, B, K] are correct, given labels int [B] or bool [B, classes]."""
    if label.ndim == 1:
        return classes == label[:, None]
    return jnp.take_along_axis(jnp.broadcast_to(label, (*classes.shape[:-1], label.shape[-1])), classes, axis=-1)


@jax.jit
def count(logits: jax.Array, label: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
    """Count correct "top1" and "top5" predictions and "examples" in a batch; "finite": whether the logits are."""
    best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
    right = hits(best, label) & (weight > 0)[:, None]
    return {
        "top1": right[:, 0].sum(),
        "top5": right.any(-1).sum(),
        "examples": jnp.sum(weight > 0),
        "finite": all_finite(logits, weight),
    }


def total(counts: Iterable[Mapping[str, jax.Array]]) -> dict[str, float]:
    """The sum over batches of each count."""
    totals = {}
    for batch in counts:
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in batch.items() if name != "finite"}
    return totals


def shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Each total divided by "examples", which stays a count; ValueError if there are none."""
    examples = totals.get("examples", 0)
    if not examples:
        raise ValueError("accuracy: the evaluation split has no readable examples.")
    return {name: int(value) if name == "examples" else value / examples for name, value in totals.items()}
