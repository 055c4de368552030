"""Dynamic scale of the loss, for gradients in float16 (Micikevicius et al. 2018, arXiv 1710.03740, Sections 3.2, 5).

float16 has no numbers below 6e-8, and many gradients of activations are smaller.  So the loss is multiplied by a scale,
and the gradients of parameters, in float32, are divided by it.  If one of them is not finite, the step is skipped and
the scale halved.  After `INTERVAL` steps without a change, the scale is doubled.

`flax.training.dynamic_scale` would adjust the scale after each micro-batch, and halve it without end.

A scale of None is for precisions that need none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

START, FACTOR, INTERVAL = 2.0**16, 2.0, 2000  # as in PyTorch's GradScaler
SMALLEST = 1.0  # gradients that overflow at this scale overflow without one
LARGEST = 2.0**24  # a model that trains no products would double its scale to infinity


class LossScale(NamedTuple):
    """The factor of the loss, and the number of steps since it last changed."""

    value: jax.Array  # float32; a power of two, so that scaling does not round
    steps: jax.Array  # int32


def start(precision: str) -> LossScale | None:
    """The scale of the first step."""
    return LossScale(jnp.float32(START), jnp.int32(0)) if precision == "float16" else None


def multiply(scale: LossScale | None, loss: jax.Array) -> jax.Array:
    """The scaled loss."""
    return loss if scale is None else loss * scale.value


def divide(scale: LossScale | None, tree: Any) -> Any:
    """The loss and its gradients without the scale."""
    return tree if scale is None else jax.tree.map(lambda a: a / scale.value, tree)


def may_fall(scale: LossScale | None) -> bool | jax.Array:
    """Whether a smaller scale may make gradients finite."""
    return scale is not None and scale.value > SMALLEST


def after(scale: LossScale | None, good: jax.Array, finite: jax.Array) -> LossScale | None:
    """The scale of the next step.

    Args:
      good: whether training goes on; otherwise the scale stays.
      finite: whether the gradients are finite.
    """
    if scale is None:
        return None
    due = scale.steps + 1 >= INTERVAL
    grown = jnp.where(due, jnp.minimum(scale.value * FACTOR, LARGEST), scale.value)
    value = jnp.where(finite, grown, scale.value / FACTOR)
    steps = jnp.where(finite & ~due, scale.steps + 1, 0)
    return LossScale(jnp.where(good, value, scale.value), jnp.where(good, steps, scale.steps))
