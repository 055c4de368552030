"""Test-time adaptation by SAR: sharpness-aware and reliable entropy minimisation (Niu et al. 2023).

A classifier gets a stream of unlabelled batches from another distribution.  It predicts each batch, then takes one
gradient step on the mean entropy of its low-entropy predictions.  The gradient is taken at the sharper point that a
first gradient leads to (SAM).  Only scales and biases of LayerNorms change.  A very low average entropy suggests
collapse, and resets the model to its original parameters.

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

from equivit import constraints, logical
from equivit.constraints import NonNegativeFloat, Share
from equivit.data.pixels import normalize
from equivit.evaluation import classification
from equivit.evaluation.predictions import Batch, by_example, predictor
from equivit.precision import cast

REFERENCE_BATCH = 64  # the batch size of `Sar.lr`


@jax.tree_util.register_dataclass  # traced, so that other settings do not recompile
@dataclasses.dataclass(frozen=True)
class Sar:
    """Settings of SAR; the defaults are its authors'.

    The public code differs from the paper, probably by bugs.  The defaults here:
      a batch without images after the filters changes nothing; the public code still applies momentum;
      a reset also clears momentum and average entropy; the public code keeps both, so the old average resets the model
        again on the next batches, and the old momentum moves the restored parameters;
      `reset_below` is used; the public code always uses 0.2.
    Dropout and drop path are off; the public code adapts in training mode and needs a model without them.

    Raises ValueError for an invalid value.
    """

    # For batches of 64 images.  A batch of B images uses lr B / 64, a single image twice that.
    lr: NonNegativeFloat = 1e-3
    momentum: Share = 0.9  # v = momentum v + gradient, not Nesterov
    rho: NonNegativeFloat = 0.05  # distance to the sharper point
    margin: Share = 0.4  # images are used if their entropy is below this fraction of the maximum, log(classes)
    decay: Share = 0.9  # decay of the moving average of the entropy, per batch
    reset_below: NonNegativeFloat = 0.2  # the model is reset if the average entropy, in nats, falls below this
    official: bool = False  # follow the public code in all of the above

    def __post_init__(self):
        if any(isinstance(getattr(self, field.name), jax.Array | np.ndarray) for field in dataclasses.fields(self)):
            return  # traced
        constraints.check_fields(self, "SAR")
        if self.official and self.reset_below != Sar.reset_below:
            raise ValueError(
                f"sar: reset_below={self.reset_below} with official=True; the public code always uses "
                f"{Sar.reset_below}: leave it at that, or set official=False."
            )

    def rate(self, batch_size: int) -> float:
        """The learning rate for batches of `batch_size` images."""
        return self.lr * batch_size / REFERENCE_BATCH * (2 if batch_size == 1 else 1)


class State(NamedTuple):
    """The state of SAR between batches, for leaves with adapted tensors."""

    parameters: logical.Arrays  # float32 at any precision: bfloat16 would lose steps this small
    velocity: logical.Arrays
    entropy: jax.Array  # moving average over batches; NaN before the first


def adapted(model: nnx.Module) -> dict[str, np.ndarray]:
    """Masks of the adapted logical tensors: {leaf: bool, which broadcasts against it}, for leaves with any.

    These are the scales and biases of all norms inside the blocks, Jumbo's included, except in the last depth // 4
    blocks (9 to 11 of 12), whose features should keep their meaning.  The final norm is not adapted.  The public code
    excludes blocks 9, 10 and 11 by name, at any depth.

    Raises ValueError if the blocks have no layer norms, for example only batch norms.
    """
    tables = logical.tensors(model)
    if not any(tensor.norm and tensor.block is not None for table in tables.values() for tensor in table.flat):
        raise ValueError(
            f"sar: {type(model).__name__} has no layer norm inside its blocks, and SAR adapts nothing else; use a ViT."
        )

    def moves(tensor):
        depth = tensor.last - 1
        return tensor.norm and tensor.block is not None and tensor.block < depth - depth // 4

    leaves = jax.eval_shape(logical.take, model)
    masks = {leaf: logical.per_tensor(table, leaves[leaf], moves) for leaf, table in tables.items()}
    return {leaf: mask for leaf, mask in masks.items() if mask.any()}


def check_precision(precision: str) -> None:
    """ValueError for "float16", in which gradients need a scaled loss (`training/loss_scale.py`)."""
    if precision == "float16":
        raise ValueError(
            "sar: precision='float16' would lose its gradients, as its loss has no scale; evaluate sar after training, "
            "with --config.precision=mixed."
        )


@jax.jit
def start(model: nnx.Module) -> State:
    """The state before the first batch."""
    initial = _initial(model)
    return State(initial, jax.tree.map(jnp.zeros_like, initial), jnp.full((), jnp.nan, jnp.float32))


@functools.partial(jax.jit, static_argnames="precision")
def step(
    settings: Sar,
    model: nnx.Module,
    state: State,
    images: jax.Array,
    weight: jax.Array | None = None,
    *,
    precision: str = "float32",
) -> tuple[State, jax.Array, dict[str, Any]]:
    """Predict one batch, then adapt to it.

    Args:
      model: called as `model(images)`; it has its original parameters.
      state: from `start` or the previous batch.
      images: [B, H, W, C], normalised.
      weight: [B]; images of weight 0 (padding) are ignored.  None: all count.
      precision: the precision of the model, not "float16"; the step casts all but the adapted parameters to it.

    Returns the next state; the logits float32 [B, classes] before the step; and a dict: "entropy" [B] of these
    predictions, "kept" [B], whether an image passed the first filter, and "reset", whether the step ended in a reset.
    """
    check_precision(precision)
    masks = adapted(model)

    def confident_entropy(arrays, candidates):
        logits = logical.put(cast(model, precision), arrays)(images)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
        confident = candidates & (entropy < settings.margin * math.log(logits.shape[-1]))
        return jnp.where(confident, entropy, 0).sum() / jnp.maximum(confident.sum(), 1), (logits, entropy, confident)

    def gradient(arrays, candidates):
        (value, seen), grads = jax.value_and_grad(confident_entropy, has_aux=True)(arrays, candidates)
        return value, seen, {leaf: jnp.where(masks[leaf], g, 0) for leaf, g in grads.items()}

    candidates = jnp.ones(len(images), bool) if weight is None else weight > 0
    _, (logits, entropy, confident), grads = gradient(state.parameters, candidates)
    length = settings.rho / (optax.tree.norm(grads) + 1e-12)
    sharper = jax.tree.map(lambda w, g: w + length * g, state.parameters, grads)
    value, (*_, confident_again), grads = gradient(sharper, confident)
    state, reset = _update(settings, len(images), _initial(model), state, grads, value, confident_again.any())
    return state, logits, {"entropy": entropy, "kept": confident, "reset": reset}


def adaptation(
    model: nnx.Module,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    settings: Sar = Sar(),
    precision: str = "float32",
) -> dict[str, float]:
    """Measure accuracy with and without SAR; every image is predicted before the model adapts to it.

    Args:
      model: called as `model(images)`.
      batches: with "image", "label", "weight" as in `classification.accuracy`, in the order of the stream.
      mean, std: per channel (or one for all), of pixel values in 0..1.
      precision: as in `step`.

    Returns "top1", "top5" with SAR, "unadapted_top1", "unadapted_top5" without, "examples"; "kept", the fraction of
    images that pass the first filter, and "resets", the number of resets.  Raises ValueError if there are no examples,
    logits are not finite, or the model has nothing to adapt.
    """
    predict, prepare = predictor(model, mean, std, precision), jax.jit(functools.partial(normalize, mean=mean, std=std))
    state, resets = start(model), 0

    def measure(batch):
        nonlocal state, resets
        images = prepare(batch["image"])
        state, logits, info = step(settings, model, state, images, batch["weight"], precision=precision)
        resets += info["reset"]
        after, before = (classification.correct(each, batch["label"]) for each in (logits, predict(batch["image"])))
        unadapted = {f"unadapted_{name}": before[name] for name in ("top1", "top5")}
        return after | unadapted | {"kept": info["kept"], "finite": after["finite"] & before["finite"]}

    found = by_example(measure, batches)
    shares = {name: float(rows.mean()) for name, rows in found.items()}
    return shares | {"examples": len(found["kept"]), "resets": int(resets)}


def _initial(model) -> logical.Arrays:
    leaves = logical.take(model)
    return {leaf: leaves[leaf].astype(jnp.promote_types(leaves[leaf].dtype, jnp.float32)) for leaf in adapted(model)}


def _update(settings, batch_size, initial, state, grads, value, counts):
    """Update momentum and average entropy, or reset; `counts`: whether any image was left for the gradient."""
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
