"""Top-1 and top-5 accuracy."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from equivit.evaluation.predictions import Batch, Predict, all_finite, measured


def accuracy(predict: Predict, batches: Iterable[Batch]) -> dict[str, float]:
    """The share of examples whose label is the best class, or one of the best five.

    Args:
      predict: uint8 images [B, H, W, C] to logits [B, classes] (`predictions.predictor`).
      batches: with "image", "label" [B], and "weight" [B]: 1 for examples, 0 for padding.

    Returns:
      "top1", "top5" (of all classes where there are fewer than five), "examples".

    Raises:
      ValueError: there is no example, or logits are not finite.
    """
    totals = {"top1": 0.0, "top5": 0.0, "examples": 0.0}
    for counts in measured(lambda batch: _count(predict(batch["image"]), batch["label"], batch["weight"]), batches):
        totals = {name: total + float(counts[name]) for name, total in totals.items()}
    examples = totals["examples"]
    if not examples:
        raise ValueError("accuracy: the evaluation split holds no readable example.")
    return {"top1": totals["top1"] / examples, "top5": totals["top5"] / examples, "examples": int(examples)}


@jax.jit
def _count(logits, label, weight):
    best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
    hits = (best == label[:, None]) * weight[:, None]
    return {
        "top1": hits[:, 0].sum(),
        "top5": hits.sum(),
        "examples": jnp.sum(weight),
        "finite": all_finite(logits, weight),
    }
