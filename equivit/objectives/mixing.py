"""Mixup and cutmix of a whole batch, on the device, with one lambda per batch.

The partner of an example is its mirror image in the batch: example b goes with example B - 1 - b.  Both are the blend
`w x + (1 - w) x[::-1]`, with w a constant for mixup (Zhang et al. 2018) and the outside of a box for cutmix (Yun et al.
2019).  Lambda is the share of an example in its own mixture.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Box(NamedTuple):
    """Rows top..bottom - 1 and columns left..right - 1; integer scalars."""

    top: jax.Array
    bottom: jax.Array
    left: jax.Array
    right: jax.Array


def soft_targets(labels: jax.Array, num_classes: int, smoothing: float = 0.0) -> jax.Array:
    """One-hot labels, smoothed: 1 - s + s/K for the label and s/K for the others.

    Any smoothing makes every target positive, so that `targets > 0`, as binary cross-entropy asks, is all true.

    Shapes: labels int [B] -> float32 [B, K].
    """
    return jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def cutmix_box(lam: jax.Array, row: jax.Array, column: jax.Array, height: int, width: int) -> Box:
    """The box around (row, column) whose sides are sqrt(1 - lam) of the image's, clipped to the image."""
    half_height = (jnp.sqrt(1 - lam) * height).astype(jnp.int32) // 2
    half_width = (jnp.sqrt(1 - lam) * width).astype(jnp.int32) // 2
    return Box(
        jnp.clip(row - half_height, 0, height),
        jnp.clip(row + half_height, 0, height),
        jnp.clip(column - half_width, 0, width),
        jnp.clip(column + half_width, 0, width),
    )


def cutmix_lambda(box: Box, height: int, width: int) -> jax.Array:
    """The share of the image outside of the box: after clipping not the lambda that was drawn."""
    return 1 - (box.bottom - box.top) * (box.right - box.left) / (height * width)


def cutmix_weights(box: Box, height: int, width: int) -> jax.Array:
    """0 in the box, 1 outside.   Shapes: -> [H, W]."""
    rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
    inside = (box.top <= rows) & (rows < box.bottom) & (box.left <= columns) & (columns < box.right)
    return 1.0 - inside


def blend(values: jax.Array, weights: jax.Array | float) -> jax.Array:
    """Each example with its partner: w x + (1 - w) x[::-1].

    Shapes: values [B, ...], weights scalar or such that it broadcasts against [...] -> [B, ...].
    """
    weights = jnp.asarray(weights, values.dtype)
    return weights * values + (1 - weights) * values[::-1]


def draw(
    key: jax.Array,
    height: int,
    width: int,
    mixup: float,
    cutmix: float,
    probability: float,
    switch_probability: float,
) -> tuple[jax.Array, jax.Array]:
    """Lambda, a scalar, and the weights [H, W] of the images for one batch.  The arguments are those of `mix`."""
    mix_key, switch_key, beta_key, row_key, column_key = jax.random.split(key, 5)
    switch = switch_probability if mixup and cutmix else float(cutmix > 0)
    use_cutmix = jax.random.uniform(switch_key) < switch
    alpha = jnp.where(use_cutmix, cutmix, mixup)
    lam = jnp.where(jax.random.uniform(mix_key) < probability, jax.random.beta(beta_key, alpha, alpha), 1.0)
    row = jax.random.randint(row_key, (), 0, height)
    column = jax.random.randint(column_key, (), 0, width)
    box = cutmix_box(lam, row, column, height, width)
    weights = jnp.where(use_cutmix, cutmix_weights(box, height, width), lam)
    return jnp.where(use_cutmix, cutmix_lambda(box, height, width), lam), weights


def mix(
    key: jax.Array,
    images: jax.Array,
    targets: jax.Array,
    *,
    mixup: float,
    cutmix: float,
    probability: float = 1.0,
    switch_probability: float = 0.5,
) -> tuple[jax.Array, jax.Array]:
    """Mixes a batch of images and their targets.

    Args:
      key: decides whether, how and how much.
      images: float [B, H, W, C].
      targets: float [B, K].
      mixup: alpha of mixup's Beta(alpha, alpha); 0 switches it off.
      cutmix: the same for cutmix.
      probability: share of the batches that are mixed.
      switch_probability: share of the mixed batches that cutmix gets, if both are on.

    Returns:
      Mixed images [B, H, W, C] and targets [B, K].
    """
    if not (mixup or cutmix):
        return images, targets
    height, width = images.shape[1:3]
    lam, weights = draw(key, height, width, mixup, cutmix, probability, switch_probability)
    return blend(images, weights[..., None]), blend(targets, lam)
