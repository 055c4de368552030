"""Test-time adaptation by SAR: sharpness-aware and reliable entropy minimisation (Niu et al. 2023).

A classifier meets a stream of batches from another distribution, without labels.  On each batch it predicts, and then
takes one step that makes its confident predictions more confident: down the gradient of the entropy, averaged over
images of low entropy, at the sharper point to which a first such gradient leads (SAM).  Only scales and biases of
LayerNorms move.  When the average entropy is so low that the model may have collapsed, it starts again from where it
was.

    state = adaptation.start(model)
    step = functools.partial(adaptation.step, adaptation.Sar(), model)
    for images in stream:
        state, logits, info = step(state, images)

Sources: arXiv 2302.12400; Jumbo, Section 4.4.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from equivit import logical
from equivit.data.pixels import normalize
from equivit.evaluation import classification
from equivit.evaluation.predictions import Batch, all_finite, measured, predictor

REFERENCE_BATCH = 64  # images in the batches that `Sar.lr` is stated for


@jax.tree_util.register_dataclass  # so that other settings compile nothing again
@dataclasses.dataclass(frozen=True)
class Sar:
    """Settings of SAR; the defaults are its authors'.

    The public code does some things that its paper does not say, and that cannot have been meant.  By default:
      a batch of which no image is left after the filters changes nothing: the public code moves on by momentum alone;
      after a reset momentum and average entropy are forgotten too: the public code keeps both, so that the old average
        resets the model again on the batches that follow, and the old momentum moves the fresh parameters;
      `reset_below` counts: the public code always takes 0.2.
    Dropout and drop path are off: the public code adapts in training mode, and must be given a model without them.

    Attributes:
      lr: learning rate for batches of 64 images.  A batch of B images takes lr B / 64, a single image twice that.
      momentum: of the plain (not Nesterov) momentum, v = momentum v + gradient.
      rho: length of the way to the sharper point.
      margin: images count whose entropy is below this share of that of the uniform distribution, log(classes).
      decay: of the average entropy, over batches.
      reset_below: the average entropy, in nats, below which the model is reset.
      official: do as the public code does in all of the above.

    Raises:
      ValueError: an impossible value.
    """

    lr: float = 1e-3
    momentum: float = 0.9
    rho: float = 0.05
    margin: float = 0.4
    decay: float = 0.9
    reset_below: float = 0.2
    official: bool = False

    def __post_init__(self):
        if not all(isinstance(getattr(self, field.name), int | float) for field in dataclasses.fields(self)):
            return  # traced
        for name in ("lr", "momentum", "rho", "margin", "decay", "reset_below"):
            value, high = getattr(self, name), 1 if name in ("momentum", "margin", "decay") else math.inf
            if not 0 <= value <= high:
                raise ValueError(f"sar: {name}={value} must lie in 0..{high}.")
        if self.official and self.reset_below != Sar.reset_below:
            raise ValueError(
                f"sar: reset_below={self.reset_below} with official=True; the public code always takes "
                f"{Sar.reset_below}: leave it, or set official=False."
            )

    def rate(self, batch_size: int) -> float:
        """The learning rate for batches of so many images."""
        return self.lr * batch_size / REFERENCE_BATCH * (2 if batch_size == 1 else 1)


class State(NamedTuple):
    """What SAR carries from batch to batch, for the leaves of the model that hold adapted tensors."""

    parameters: logical.Arrays
    velocity: logical.Arrays
    entropy: jax.Array  # average over batches; NaN while there is none


def adapted(model: nnx.Module) -> dict[str, np.ndarray]:
    """Which logical tensors are adapted: {leaf: bool, of a shape that broadcasts against it}, for leaves with any.

    Those are scales and biases of all norms inside the blocks, Jumbo's own too, except in the last quarter of the
    blocks (depth // 4 of them, 9 to 11 of 12), whose features should keep their meaning.  The final norm is none.  The
    public code leaves blocks 9, 10 and 11 out by name, at any depth.

    Raises:
      ValueError: the model has no norm in its blocks.
    """
    tables = logical.tensors(model)
    if not any(tensor.norm and tensor.block is not None for table in tables.values() for tensor in table.flat):
        raise ValueError(f"sar: {type(model).__name__} has no norm inside its blocks, and nothing else is adapted.")

    def moves(tensor):
        depth = tensor.last - 1
        return tensor.norm and tensor.block is not None and tensor.block < depth - depth // 4

    leaves = jax.eval_shape(logical.take, model)
    masks = {leaf: logical.per_tensor(table, leaves[leaf], moves) for leaf, table in tables.items()}
    return {leaf: mask for leaf, mask in masks.items() if mask.any()}


@jax.jit
def start(model: nnx.Module) -> State:
    """The state before the first batch."""
    initial = _initial(model)
    return State(initial, jax.tree.map(jnp.zeros_like, initial), jnp.full((), jnp.nan, jnp.float32))


@jax.jit
def step(
    settings: Sar, model: nnx.Module, state: State, images: jax.Array, weight: jax.Array | None = None
) -> tuple[State, jax.Array, dict[str, Any]]:
    """Predict one batch, then adapt to it.

    Args:
      settings: what is adapted how.
      model: as it was before adaptation; called as `model(images)`.
      state: from `start`, or from the batch before.
      images: [B, H, W, C], normalised.
      weight: [B]; images of weight 0 (padding) adapt nothing.  None: all count.

    Returns:
      The next state; the logits float32 [B, classes] from before the step; "entropy" [B] of these predictions, "kept"
      [B], whether an image has passed the first filter, and "reset", whether the step ended in a reset.
    """
    masks = adapted(model)

    def entropy_of_kept(arrays, candidates):
        logits = logical.put(model, arrays)(images)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
        kept = candidates & (entropy < settings.margin * math.log(logits.shape[-1]))
        return jnp.where(kept, entropy, 0).sum() / jnp.maximum(kept.sum(), 1), (logits, entropy, kept)

    def gradient(arrays, candidates):
        (value, seen), grads = jax.value_and_grad(entropy_of_kept, has_aux=True)(arrays, candidates)
        return value, seen, {leaf: jnp.where(masks[leaf], g, 0) for leaf, g in grads.items()}

    candidates = jnp.ones(len(images), bool) if weight is None else weight > 0
    _, (logits, entropy, kept), grads = gradient(state.parameters, candidates)
    length = settings.rho / (optax.tree.norm(grads) + 1e-12)
    sharper = jax.tree.map(lambda w, g: w + length * g, state.parameters, grads)
    value, (*_, kept_again), grads = gradient(sharper, kept)
    state, reset = _update(settings, len(images), _initial(model), state, grads, value, kept_again.any())
    return state, logits, {"entropy": entropy, "kept": kept, "reset": reset}


def adaptation(
    model: nnx.Module,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    settings: Sar = Sar(),
) -> dict[str, float]:
    """Accuracy on a stream of batches with and without SAR; every image is predicted before the model adapts to it.

    Args:
      model: called as `model(images)`.
      batches: with "image", "label", "weight" as `classification.accuracy` takes them, in the order of the stream.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
      settings: of SAR.

    Returns:
      "top1", "top5" with SAR, "unadapted_top1", "unadapted_top5" without, "examples"; "kept", the share of images that
      pass the first filter, and "resets", the number of resets.

    Raises:
      ValueError: there is no example, logits are not finite, or the model has nothing to adapt.
    """
    predict, prepare = predictor(model, mean, std), jax.jit(functools.partial(normalize, mean=mean, std=std))
    state = start(model)

    def measure(batch):
        nonlocal state
        state, logits, info = step(settings, model, state, prepare(batch["image"]), batch["weight"])
        counts = classification.count(logits, batch["label"], batch["weight"])
        before = classification.count(predict(batch["image"]), batch["label"], batch["weight"])
        counts |= {"unadapted_top1": before["top1"], "unadapted_top5": before["top5"]}
        finite = all_finite(logits, batch["weight"]) & before["finite"]
        return counts | {"kept": info["kept"].sum(), "resets": info["reset"], "finite": finite}

    totals = classification.total(measured(measure, batches))
    resets = totals.pop("resets", 0)
    return classification.shares(totals) | {"resets": int(resets)}


def _initial(model) -> logical.Arrays:
    leaves = logical.take(model)
    return {leaf: leaves[leaf] for leaf in adapted(model)}


def _update(settings, batch_size, initial, state, grads, value, counts):
    """Momentum, average entropy and reset; `counts` says whether any image was left to take the gradient of."""
    keep = counts | settings.official
    velocity = jax.tree.map(lambda v, g: jnp.where(keep, settings.momentum * v + g, v), state.velocity, grads)
    rate = settings.rate(batch_size)
    moved = jax.tree.map(lambda w, v: jnp.where(keep, w - rate * v, w), state.parameters, velocity)
    average = settings.decay * state.entropy + (1 - settings.decay) * value
    average = jnp.where(jnp.isnan(state.entropy), value, average)
    average = jnp.where(counts, average, state.entropy)
    reset = average < settings.reset_below
    moved = jax.tree.map(lambda w, first: jnp.where(reset, first, w), moved, initial)
    forget = reset & jnp.logical_not(settings.official)
    velocity = jax.tree.map(lambda v: jnp.where(forget, 0, v), velocity)
    return State(moved, velocity, jnp.where(forget, jnp.nan, average)), reset
