"""Count correct predictions."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from equivit.evaluation.predictions import Batch, Predict, by_example


def accuracy(predict: Predict, batches: Iterable[Batch]) -> dict[str, float]:
    """Measure top-1 and top-5 accuracy.

    Args:
      predict: uint8 images [B, H, W, C] to logits [B, classes] (`predictions.predictor`).
      batches: with "image", "label" and "weight" [B]: 1 for examples, 0 for padding.  Labels are int [B]; with several
        per example, bool [B, classes], any of which is correct (ReaL, Beyer et al. 2020).

    Returns "top1", "top5" (of all classes if there are fewer than five), "examples", and with one label per example
    "loss", the mean cross-entropy.  Raises ValueError if there are no examples, or logits are not finite.
    """

    def measure(batch):
        logits, label = predict(batch["image"]), batch["label"]
        return correct(logits, label) | ({"loss": cross_entropy(logits, label)} if label.ndim == 1 else {})

    found = by_example(measure, batches)
    return {name: float(value.mean()) for name, value in found.items()} | {"examples": len(found["top1"])}


def hits(classes: jax.Array, label: jax.Array) -> jax.Array:
    """Whether `classes` [*, B, K] are correct, given labels int [B] or bool [B, classes]."""
    if label.ndim == 1:
        return classes == label[:, None]
    return jnp.take_along_axis(jnp.broadcast_to(label, (*classes.shape[:-1], label.shape[-1])), classes, axis=-1)


@jax.jit
def correct(logits: jax.Array, label: jax.Array) -> dict[str, jax.Array]:
    """Whether the "top1" and "top5" predictions of each example are correct, and its logits "finite", bool [B]."""
    right = hits(jax.lax.top_k(logits, min(5, logits.shape[-1]))[1], label)
    return {"top1": right[:, 0], "top5": right.any(-1), "finite": jnp.isfinite(logits).all(-1)}


cross_entropy = jax.jit(optax.softmax_cross_entropy_with_integer_labels)  # of each example, [B]
