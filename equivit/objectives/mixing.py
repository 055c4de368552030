"""Mixup and cutmix of a whole batch, on the device, with one mode and one lambda for each group of examples.

Rows g, g + G, g + 2 G, ... of a batch are group g of G.  timm's recipes mix on each GPU by itself, and samplers deal
rows to GPUs in this way; here G is an option, so that results do not depend on the number of devices.  Rows that follow
each other lie in different groups, so the copies of repeated augmentation never meet, as long as there are no more of
them than groups.

The partner of an example is its mirror image in the group, and with one group in the batch: example b goes with example
B - 1 - b.  Both are the blend `w x + (1 - w) x[::-1]` of a group, with w a constant for mixup (Zhang et al. 2018) and
the outside of a box for cutmix (Yun et al. 2019).  Lambda is the share of an example in its own mixture.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Box(NamedTuple):
    """Rows top..bottom - 1 and columns left..right - 1; integers, all of one shape [*G]."""

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
    """The box around (row, column) whose sides are sqrt(1 - lam) of the image's, clipped to the image.

    Shapes: lam, row and column [*G] -> each side [*G].
    """
    half_height = (jnp.sqrt(1 - lam) * height).astype(jnp.int32) // 2
    half_width = (jnp.sqrt(1 - lam) * width).astype(jnp.int32) // 2
    return Box(
        jnp.clip(row - half_height, 0, height),
        jnp.clip(row + half_height, 0, height),
        jnp.clip(column - half_width, 0, width),
        jnp.clip(column + half_width, 0, width),
    )


def cutmix_lambda(box: Box, height: int, width: int) -> jax.Array:
    """The share of the image outside of the box: after clipping not the lambda that was drawn.   Shapes: -> [*G]."""
    return 1 - (box.bottom - box.top) * (box.right - box.left) / (height * width)


def cutmix_weights(box: Box, height: int, width: int) -> jax.Array:
    """0 in the box, 1 outside.   Shapes: -> [*G, H, W]."""
    top, bottom, left, right = (jnp.asarray(side)[..., None, None] for side in box)
    rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
    return 1.0 - ((top <= rows) & (rows < bottom) & (left <= columns) & (columns < right))


def blend(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Each example with its partner: w x + (1 - w) x[::-1] of every group.

    Shapes: values [B, ...], weights [G, ...] such that the rest broadcasts against that of values -> [B, ...].
    """
    weights = jnp.asarray(weights, values.dtype)
    groups = values.reshape(-1, len(weights), *values.shape[1:])  # [B / G, G, ...]
    return (weights * groups + (1 - weights) * groups[::-1]).reshape(values.shape)


def draw(
    key: jax.Array,
    groups: int,
    height: int,
    width: int,
    mixup: float,
    cutmix: float,
    probability: float,
    switch_probability: float,
) -> tuple[jax.Array, jax.Array]:
    """Lambda [G] and the weights [G, H, W] of the images, for one batch.  The arguments are those of `mix`."""
    mix_key, switch_key, beta_key, row_key, column_key = jax.random.split(key, 5)
    shape = (groups,)
    switch = switch_probability if mixup and cutmix else float(cutmix > 0)
    use_cutmix = jax.random.uniform(switch_key, shape) < switch
    alpha = jnp.where(use_cutmix, cutmix, mixup)
    lam = jnp.where(jax.random.uniform(mix_key, shape) < probability, jax.random.beta(beta_key, alpha, alpha), 1.0)
    row = jax.random.randint(row_key, shape, 0, height)
    column = jax.random.randint(column_key, shape, 0, width)
    box = cutmix_box(lam, row, column, height, width)
    constant = lam[:, None, None]
    weights = jnp.where(use_cutmix[:, None, None], cutmix_weights(box, height, width), constant)
    return jnp.where(use_cutmix, cutmix_lambda(box, height, width), lam), weights


def check_groups(thing: str, groups: int, batch: int) -> None:
    """ValueError unless a batch can be cut into so many equal groups of two examples or more; one group always can."""
    if groups == 1 or (groups > 1 and batch % groups == 0 and batch >= 2 * groups):
        return
    possible = [1, *(g for g in range(2, batch // 2 + 1) if batch % g == 0)]
    nearest = min(possible, key=lambda g: abs(g - groups))
    raise ValueError(
        f"{thing}={groups} must divide the batch of {batch} examples into groups of two or more; the nearest that does "
        f"is {nearest}."
    )


def mix(
    key: jax.Array,
    images: jax.Array,
    targets: jax.Array,
    *,
    mixup: float,
    cutmix: float,
    probability: float = 1.0,
    switch_probability: float = 0.5,
    groups: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Mixes a batch of images and their targets.

    Args:
      key: decides whether, how and how much.
      images: float [B, H, W, C].
      targets: float [B, K].
      mixup: alpha of mixup's Beta(alpha, alpha); 0 switches it off.
      cutmix: the same for cutmix.
      probability: share of the groups that are mixed.
      switch_probability: share of the mixed groups that cutmix gets, if both are on.
      groups: G, how many groups of the batch have a mode and a lambda of their own, and partners inside.

    Returns:
      Mixed images [B, H, W, C] and targets [B, K].

    Raises:
      ValueError: `groups` does not divide the batch into groups of two examples or more.
    """
    if not (mixup or cutmix):
        return images, targets
    check_groups("mix: groups", groups, len(images))
    height, width = images.shape[1:3]
    lam, weights = draw(key, groups, height, width, mixup, cutmix, probability, switch_probability)
    return blend(images, weights[..., None]), blend(targets, lam[:, None])
