"""DINOv2's losses as functions of arrays: cross-entropies against two kinds of targets, KoLeo, and their sum.

K prototypes, R rows, B images, D channels; float32 throughout.  Logits are streamed (`streams.py`).

Source: DINOv2 (arXiv 2304.07193), Section 4; DINO (2104.14294); iBOT (2111.07832); KoLeo is Sablayrolles et al.'s
(1806.03198); Sinkhorn-Knopp as in SwAV (2006.09882), Section 3.1.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit import errors
from equivit.layers.dino_head import Bottleneck, DinoHead, Prototypes, unit
from equivit.objectives import streams
from equivit.objectives.streams import Stream, Sums

TARGETS = ("sinkhorn_knopp", "centering")
LOGITS = 2**23  # logits of a group computed at a time


def koleo(features: jax.Array, groups: int = 1) -> jax.Array:
    """-mean log |u_i - u_j|, u_j the nearest other unit vector in the group: spreads features over the sphere.

    Args:
      features: [B, D].
      groups: number of groups of consecutive images; neighbours are in the same group.

    Raises:
      ValueError: `groups` does not divide the batch, or a group holds one image.
    """
    images = len(features)
    errors.divides("koleo: groups", groups, images, f"the batch of {images} images")
    if images == groups:
        raise ValueError(f"koleo: {groups=} of {images} images hold one image each; neighbours need at least two.")
    u = unit(features, 1e-8).reshape(groups, images // groups, -1)
    difference = u - jnp.take_along_axis(u, neighbours(u)[..., None], axis=1) + 1e-8
    return -jnp.log(jnp.linalg.norm(difference, axis=-1) + 1e-8).mean()


def neighbours(u: jax.Array) -> jax.Array:
    """The index of the nearest other unit vector in each group: [G, b, D] -> int [G, b]."""
    u = jax.lax.stop_gradient(u)
    products = jnp.einsum("gid,gjd->gij", u, u, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(jnp.eye(u.shape[1], dtype=bool), -jnp.inf, products).argmax(-1)


class Spread(NamedTuple):
    """The use of prototypes by targets.  Uniform rows have `rows` 1; if one prototype takes all, `mean` is 0."""

    rows: jax.Array  # mean entropy of a row, over log K
    mean: jax.Array  # entropy of the mean row, over log K
    fullest: jax.Array  # the largest share of rows in which the same prototype has the largest entry


def _spread(sums: Sums) -> Spread:
    number, size = jnp.maximum(sums.number, 1), math.log(len(sums.targets))
    mean = jax.scipy.special.entr(sums.targets / number).sum()
    return Spread(sums.entropy / number / size, mean / size, sums.leads.max() / number)


class Outcome(NamedTuple):
    """The result of `dinov2`."""

    losses: dict[str, jax.Array]
    classes: Spread  # of the targets of class tokens
    patches: Spread
    centers: tuple[jax.Array | None, jax.Array | None]  # of both, for the next step: [K], or None without centering


Heads = tuple[DinoHead, DinoHead]


def dinov2(
    student_heads: Heads,
    teacher_heads: Heads,
    student: dict[str, jax.Array],
    teacher: dict[str, jax.Array],
    masks: jax.Array,
    *,
    teacher_temperature: float | jax.Array,
    targets: str = "sinkhorn_knopp",
    student_temperature: float | jax.Array = 0.1,
    iterations: int = 3,
    centers: tuple[jax.Array, jax.Array] | None = None,
    center_momentum: float | jax.Array = 0.9,
    koleo_weight: float = 0.1,
    groups: int = 1,
    capacity: int | None = None,
    at_once: int | None = None,
) -> Outcome:
    """DINOv2's objective on the tokens of one step.

    If `groups` is a multiple of the devices that share the batch, no token leaves its device.

    Args:
      student_heads, teacher_heads: (head of class tokens, head of patches); twice the same head if shared.
      student: "cls" [2, B, D] of the masked global views, optionally "local_cls" [L, B, D], "patches" [2, B, N, D].
      teacher: "cls" and "patches" of the same views, not masked.  It and its heads get no gradient.
      masks: bool [2, B, N], True where the student did not see the patch.
      targets: "sinkhorn_knopp" with its `iterations`, or "centering" with `centers` (class tokens, patches), each [K].
      groups: number of groups of consecutive images, for KoLeo's neighbours and for the rows of patches.
      capacity: patch rows per group, at least its number of masked patches: `masking.capacity` of its views; None: all
        its patches.
      at_once: rows of a group compared with the prototypes at a time, which changes memory, not values; None: 8 million
        logits, which is 128 rows of 65,536.

    Returns:
      losses: "global", "local", "koleo" (weighted, summed over both views), "ibot" and "total", the sum of the four.

    Raises:
      ValueError: unknown targets, centering without centres, or groups that do not divide the batch or hold one image.
    """
    errors.one_of("targets", targets, TARGETS)
    if (targets == "centering") != (centers is not None):
        raise ValueError(f"dinov2: {targets=} {'needs' if centers is None else 'takes no'} centers=(cls, patches).")
    views, images = masks.shape[:2]
    errors.divides("dinov2: groups", groups, images, f"the batch of {images} images")
    compare = functools.partial(
        _compare,
        teacher_temperature=teacher_temperature,
        student_temperature=student_temperature,
        iterations=iterations,
        momentum=center_momentum,
        at_once=at_once,
    )
    class_heads, patch_heads = zip(student_heads, teacher_heads, strict=True)
    class_center, patch_center = centers or (None, None)

    local = student.get("local_cls")
    every = student["cls"] if local is None else jnp.concatenate([student["cls"], local])
    tokens = [_items(views, groups) for views in (every, teacher["cls"])]
    present = jnp.ones((groups, images // groups), bool)
    # crosses [G, b, 2, 2 + L]
    crosses, classes, class_center = compare(class_heads, tokens, present, class_center)

    chosen, weights = masked_rows(masks, groups, capacity)
    tokens = [_take(patches, chosen) for patches in (student["patches"], teacher["patches"])]
    masked, patches, patch_center = compare(patch_heads, tokens, weights > 0, patch_center)

    pairs = 2 * every.shape[0] - 2
    losses = {
        "global": (crosses[..., 0, 1] + crosses[..., 1, 0]).mean() / pairs,
        "local": crosses[..., 2:].sum((-2, -1)).mean() / pairs,
        "koleo": koleo_weight * sum(koleo(view, groups) for view in student["cls"]),
        "ibot": (weights * masked[..., 0, 0]).sum() / (views * images),
    }
    losses["total"] = sum(losses.values())
    return Outcome(losses, _spread(classes), _spread(patches), (class_center, patch_center))


def masked_rows(masks: jax.Array, groups: int = 1, capacity: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Indices of the masked patches of each group, in a buffer of constant size.

    Args:
      masks: bool [V, B, N].
      capacity: rows of a group's buffer; None: all its patches.  Further masked patches are dropped.

    Returns:
      Indices into the group's patches, int [groups, capacity], masked ones first, by view, image and position; and
      their weights, one over the number of masked patches in the same view of the image, 0 for padding.
    """
    masks = jnp.asarray(masks, bool)
    weights = _grouped(masks / jnp.maximum(masks.sum(-1, keepdims=True), 1), groups)
    chosen = jnp.argsort(~_grouped(masks, groups), axis=-1, stable=True)[:, :capacity]
    return chosen, jnp.take_along_axis(weights, chosen, axis=1)


def _grouped(views: jax.Array, groups: int) -> jax.Array:
    """[V, B, N, ...] -> [groups, V B/groups N, ...]."""
    count, images, tokens, *rest = views.shape
    split = views.reshape(count, groups, images // groups, tokens, *rest)
    return jnp.moveaxis(split, 1, 0).reshape(groups, -1, *rest)


def _take(patches: jax.Array, chosen: jax.Array) -> jax.Array:
    """The chosen patches of each group, as items of one view: [V, B, N, D] -> [G, R, 1, D]."""
    return jnp.take_along_axis(_grouped(patches, len(chosen)), chosen[..., None], axis=1)[:, :, None]


def _items(views: jax.Array, groups: int) -> jax.Array:
    """The images of each group, as items of V views: [V, B, D] -> [groups, B/groups, V, D]."""
    count, images, width = views.shape
    return jnp.moveaxis(views, 0, 1).reshape(groups, images // groups, count, width)


def _compare(
    heads, tokens, present, center, *, teacher_temperature, student_temperature, iterations, momentum, at_once
) -> tuple[jax.Array, Sums, jax.Array | None]:
    """Cross-entropies [G, M, T, S] of tokens [G, M, S, D] against targets from [G, M, T, D], their sums and centre."""
    (student_head, teacher_head), (student, teacher) = heads, tokens
    guides = jax.lax.stop_gradient(teacher_head.prototypes())
    features = jax.lax.stop_gradient(streams.by_group(Bottleneck.__call__, teacher_head.mlp, teacher))
    guide = Stream(features, guides.over(teacher_temperature), Prototypes.logits)
    prototypes = student_head.prototypes().over(student_temperature)
    learner = Stream(student, (student_head.mlp, prototypes), lambda parts, x: parts[1].logits(parts[0](x)))
    size = len(guides.factors)
    at_once = at_once or max(LOGITS // size, 1)
    if center is None:
        shift = streams.sinkhorn_shift(guide, present, size, iterations=iterations, at_once=at_once)
    else:
        shift = -center / teacher_temperature
        # The mean of logits is the logits of the mean.
        weights = jnp.broadcast_to(present[..., None, None], (*features.shape[:-1], 1)).astype(jnp.float32)
        mean = (features * weights).sum((0, 1, 2)) / jnp.maximum(weights.sum(), 1)
        moved = momentum * center + (1 - momentum) * guides.logits(mean)
        center = jnp.where(present.any(), moved, center)
    losses, sums = streams.cross_entropies(guide, shift, learner, present, at_once=at_once)
    return losses, sums, center
