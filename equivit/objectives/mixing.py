"""Mixup and cutmix of a whole batch, on the device, with one mode and one lambda per group of examples.

Group g of G consists of rows g, g + G, g + 2 G, ... of the batch.  timm mixes on each GPU separately, and its samplers
distribute rows over GPUs like this.  Here G is an option, so results do not depend on the number of devices.
Consecutive rows belong to different groups, so repeated augmentation never mixes up to G copies with each other.

An example is mixed with the one at the mirrored position in its group; with one group, example b is mixed with example
B - 1 - b.  Both methods compute `w x + (1 - w) x[::-1]` within a group, where w is constant for mixup (Zhang et al.
2018), and 0 inside a box and 1 outside for cutmix (Yun et al. 2019).  Lambda is the weight of an example in its
mixture.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Box(NamedTuple):
    """Rows top..bottom - 1 and columns left..right - 1; integer arrays of the same shape [*G]."""

    top: jax.Array
    bottom: jax.Array
    left: jax.Array
    right: jax.Array


def soft_targets(labels: jax.Array, num_classes: int, smoothing: float = 0.0) -> jax.Array:
    """One-hot labels, smoothed: 1 - s + s/K for the label and s/K for the others.

    Any smoothing makes all targets positive, so the test `targets > 0` of the binary cross-entropy is always true.

    Shapes: labels int [B] -> float32 [B, K].
    """
    return jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def cutmix_box(lam: jax.Array, row: jax.Array, column: jax.Array, height: int, width: int) -> Box:
    """The box around (row, column) with sides sqrt(1 - lam) times the image's, clipped to the image.

    Shapes: lam, row and column [*G] -> each side [*G].
    """

    def sides(middle, size):
        half = (jnp.sqrt(1 - lam) * size).astype(jnp.int32) // 2
        return jnp.clip(middle - half, 0, size), jnp.clip(middle + half, 0, size)

    return Box(*sides(row, height), *sides(column, width))


def cutmix_lambda(box: Box, height: int, width: int) -> jax.Array:
    """The fraction of the image outside the box; clipping makes it differ from the drawn lambda.   Shapes: -> [*G]."""
    return 1 - (box.bottom - box.top) * (box.right - box.left) / (height * width)


def cutmix_weights(box: Box, height: int, width: int) -> jax.Array:
    """0 inside the box, 1 outside.   Shapes: -> [*G, H, W]."""
    top, bottom, left, right = (jnp.asarray(side)[..., None, None] for side in box)
    rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
    return 1.0 - ((top <= rows) & (rows < bottom) & (left <= columns) & (columns < right))


def blend(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mix each example with its partner: w x + (1 - w) x[::-1] within every group.

    Shapes: values [B, ...], weights [G, ...], where the remaining axes broadcast against those of values -> [B, ...].
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
    """Draw lambda [G] and the weights of the pixels [G, H, W] for one batch.  Arguments as in `mix`."""
    mix_key, switch_key, beta_key, row_key, column_key = jax.random.split(key, 5)
    shape = (groups,)
    switch = switch_probability if mixup and cutmix else float(cutmix > 0)
    use_cutmix = jax.random.uniform(switch_key, shape) < switch
    alpha = jnp.where(use_cutmix, cutmix, mixup)
    lam = jnp.where(jax.random.uniform(mix_key, shape) < probability, jax.random.beta(beta_key, alpha, alpha), 1.0)
    row = jax.random.randint(row_key, shape, 0, height)
    column = jax.random.randint(column_key, shape, 0, width)
    box = cutmix_box(lam, row, column, height, width)
    weights = jnp.where(use_cutmix[:, None, None], cutmix_weights(box, height, width), lam[:, None, None])
    return jnp.where(use_cutmix, cutmix_lambda(box, height, width), lam), weights


def check_groups(thing: str, groups: int, batch: int) -> None:
    """ValueError unless the batch splits into this number of equal groups of at least two."""
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
    """Mix a batch of images and their targets.

    Args:
      images: float [B, H, W, C].
      targets: float [B, K].
      mixup, cutmix: alpha of the Beta(alpha, alpha) of each method; 0 switches it off.
      probability: probability that a group is mixed.
      switch_probability: probability that a mixed group uses cutmix, if both are on.
      groups: G, the number of groups; each has one mode and one lambda and is mixed within itself.

    Returns:
      Mixed images [B, H, W, C] and targets [B, K].

    Raises:
      ValueError: the batch does not split into that number of groups of at least two examples.
    """
    if not (mixup or cutmix):
        return images, targets
    check_groups("mix: groups", groups, len(images))
    height, width = images.shape[1:3]
    lam, weights = draw(key, groups, height, width, mixup, cutmix, probability, switch_probability)
    return blend(images, weights[..., None]), blend(targets, lam[:, None])
