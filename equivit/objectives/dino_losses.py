"""DINOv2's losses as functions of arrays: targets, cross-entropies, KoLeo, and their combination.

K prototypes, R rows, B images, D channels; float32 throughout.  `dinov2` is the whole objective; the functions before
it are simple references for its streamed parts (`streams.py`).

Source: DINOv2 (arXiv 2304.07193), Section 4; DINO (2104.14294); iBOT (2111.07832); KoLeo is Sablayrolles et al.'s
(1806.03198); Sinkhorn-Knopp as in SwAV (2006.09882), Section 3.1.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from equivit import errors
from equivit.layers.dino_head import Bottleneck, DinoHead, Prototypes, unit
from equivit.objectives import streams
from equivit.objectives.streams import Stream, Sums

TARGETS = ("sinkhorn_knopp", "centering")
LOGITS = 2**23  # logits of a group computed at a time


def sinkhorn_knopp(
    logits: jax.Array, temperature: float | jax.Array, weights: jax.Array | None = None, iterations: int = 3
) -> jax.Array:
    """Targets that use all prototypes equally: exp(logits / temperature), scaled until all columns have the same sum.

    Each iteration normalises all columns to the same sum, then every row to 1.  It works in the log domain, so that no
    logit overflows.  Sums are over all rows; under `jax.jit`, over all devices.

    Args:
      logits: [R, K].
      weights: [R]; rows of weight 0 are padding and get zeros.  All other weights count equally.

    Returns:
      [R, K], no gradient.
    """
    x = jax.lax.stop_gradient(logits.astype(jnp.float32) / temperature)
    if weights is not None:
        present = weights[:, None] > 0
        x = jnp.where(present, x, -jnp.inf)

    def balance(_, x):
        for axis in (0, 1):
            total = jax.nn.logsumexp(x, axis=axis, keepdims=True)
            x = x - jnp.where(jnp.isneginf(total), 0.0, total)  # only padding: no sum to divide by
        return x

    return jnp.exp(jax.lax.fori_loop(0, iterations, balance, x))


def centred_targets(logits: jax.Array, center: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """softmax((logits - center) / temperature), no gradient.  Shapes: [*B, K], [K] -> [*B, K]."""
    return jax.lax.stop_gradient(jax.nn.softmax((logits.astype(jnp.float32) - center) / temperature))


def moved_center(
    center: jax.Array, logits: jax.Array, weights: jax.Array | None = None, momentum: float | jax.Array = 0.9
) -> jax.Array:
    """Move the centre [K] towards the mean of logits [*B, K], without rows of weight [*B] 0.

    The result is for the next step: the targets of a step use the centre of the steps before it.
    """
    rows = jax.lax.stop_gradient(logits.astype(jnp.float32))
    present = jnp.ones(rows.shape[:-1]) if weights is None else (weights > 0).astype(jnp.float32)
    axes = tuple(range(present.ndim))
    number = present.sum()
    mean = (rows * present[..., None]).sum(axes) / jnp.maximum(number, 1)
    return jnp.where(number > 0, momentum * center + (1 - momentum) * mean, center)


def dino(
    targets: jax.Array, global_logits: jax.Array, local_logits: jax.Array, temperature: float | jax.Array = 0.1
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropies between views of the same image, averaged over images and summed over pairs of views.

    A global view of the student is compared with the other global target, a local view with both.

    Args:
      targets: [2, B, K], from the teacher's global views.
      global_logits, local_logits: [2, B, K] and [L, B, K], from the student; L may be 0.

    Returns:
      The sums over global and over local pairs, both divided by the number of all pairs, 2 + 2 L.
    """
    pairs = 2 + 2 * len(local_logits)
    crossed = cross_entropy(targets[::-1], global_logits, temperature).mean(-1).sum()
    local = cross_entropy(targets[:, None], local_logits, temperature).mean(-1).sum()
    return crossed / pairs, local / pairs


def ibot(
    targets: jax.Array, logits: jax.Array, weights: jax.Array, views: int, temperature: float | jax.Array = 0.1
) -> jax.Array:
    """The weighted sum of the cross-entropies of masked patches, divided by the number of views, masked or not.

    Shapes: targets and logits [R, K], weights [R]: 1 over the masked patches of the row's view, 0 for padding.
    """
    return (weights * cross_entropy(targets, logits, temperature)).sum() / views


def cross_entropy(targets: jax.Array, logits: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """-sum_k targets_k log softmax(logits / temperature)_k.  Shapes: [*B, K] twice -> [*B]."""
    log = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    return -(targets * log).sum(-1)


def koleo(features: jax.Array, groups: int = 1) -> jax.Array:
    """-mean log |u_i - u_j|, u_j the nearest other unit vector in the group: spreads features over the sphere.

    Args:
      features: [B, D].
      groups: number of groups of consecutive images; neighbours are in the same group.

    Raises:
      ValueError: `groups` does not divide the batch, or a group holds one image.
    """
    images = len(features)
    check_groups("koleo", images, groups)
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


def check_groups(name: str, images: int, groups: int) -> None:
    """ValueError unless `groups` divides the images."""
    errors.divides(f"{name}: groups", groups, images, f"the batch of {images} images")


class Spread(NamedTuple):
    """The use of prototypes by targets.  Uniform rows have `rows` 1; if one prototype takes all, `mean` is 0.

    Attributes:
      rows: mean entropy of a row, over log K.
      mean: entropy of the mean row, over log K.
      fullest: the largest share of rows in which the same prototype has the largest entry.
    """

    rows: jax.Array
    mean: jax.Array
    fullest: jax.Array


def spread(targets: jax.Array, weights: jax.Array | None = None) -> Spread:
    """`Spread` of targets [R, K]; rows of weight [R] 0 do not count."""
    present = jnp.ones(len(targets)) if weights is None else (weights > 0).astype(jnp.float32)
    leads = jax.nn.one_hot(targets.argmax(-1), targets.shape[-1])
    entropy = jax.scipy.special.entr(targets).sum(-1) @ present
    return _spread(Sums(present.sum(), entropy, present @ targets, present @ leads))


def _spread(sums: Sums) -> Spread:
    number, size = jnp.maximum(sums.number, 1), math.log(len(sums.targets))
    mean = jax.scipy.special.entr(sums.targets / number).sum()
    return Spread(sums.entropy / number / size, mean / size, sums.leads.max() / number)


class Outcome(NamedTuple):
    """The result of `dinov2_outcome`: the losses, the spread of class and patch targets, and the new centres.

    `centers` is (class tokens, patches), for the next step; each [K], or None without centering.
    """

    losses: dict[str, jax.Array]
    classes: Spread
    patches: Spread
    centers: tuple[jax.Array | None, jax.Array | None]


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
    **options: Any,
) -> dict[str, jax.Array]:
    """The losses of `dinov2_outcome`, with the same arguments."""
    options |= dict(teacher_temperature=teacher_temperature, targets=targets)
    return dinov2_outcome(student_heads, teacher_heads, student, teacher, masks, **options).losses


def dinov2_outcome(
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
    check_groups("dinov2", images, groups)
    settings = _Settings(teacher_temperature, student_temperature, iterations, center_momentum, at_once)
    center = (None, None) if centers is None else centers

    local = student.get("local_cls")
    every = student["cls"] if local is None else jnp.concatenate([student["cls"], local])
    ours, theirs = (_items(views, groups) for views in (every, teacher["cls"]))
    present = jnp.ones((groups, images // groups), bool)
    classes = _compare(student_heads[0], teacher_heads[0], ours, theirs, present, center[0], settings)

    chosen, weights = masked_rows(masks, groups, capacity)
    ours, theirs = (_take(patches, chosen) for patches in (student["patches"], teacher["patches"]))
    patches = _compare(student_heads[1], teacher_heads[1], ours, theirs, weights > 0, center[1], settings)

    crossed, local = _dino(classes.losses)
    apart = koleo_weight * sum(koleo(view, groups) for view in student["cls"])
    masked = (weights * patches.losses[..., 0, 0]).sum() / (views * images)
    losses = {"global": crossed, "local": local, "koleo": apart, "ibot": masked}
    losses["total"] = crossed + local + apart + masked
    moved = (classes.center, patches.center)
    return Outcome(losses, _spread(classes.sums), _spread(patches.sums), moved)


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


class _Settings(NamedTuple):
    teacher_temperature: float | jax.Array
    student_temperature: float | jax.Array
    iterations: int
    momentum: float | jax.Array
    at_once: int | None


class _Compared(NamedTuple):
    losses: jax.Array  # [G, M, T, S]
    sums: Sums
    center: jax.Array | None


def _compare(student_head, teacher_head, student, teacher, present, center, settings) -> _Compared:
    """Cross-entropies of tokens [G, M, S, D] against targets from [G, M, T, D]."""
    guides = jax.lax.stop_gradient(teacher_head.prototypes())
    features = jax.lax.stop_gradient(streams.by_group(Bottleneck.__call__, teacher_head.mlp, teacher))
    guide = Stream(features, guides.over(settings.teacher_temperature), Prototypes.logits)
    prototypes = student_head.prototypes().over(settings.student_temperature)
    learner = Stream(student, (student_head.mlp, prototypes), lambda parts, x: parts[1].logits(parts[0](x)))
    size = len(guides.factors)
    at_once = settings.at_once or max(LOGITS // size, 1)
    if center is None:
        shift = streams.sinkhorn_shift(guide, present, size, iterations=settings.iterations, at_once=at_once)
    else:
        shift = -center / settings.teacher_temperature
        # The mean of logits is the logits of the mean.
        weights = jnp.broadcast_to(present[..., None, None], (*features.shape[:-1], 1)).astype(jnp.float32)
        mean = (features * weights).sum((0, 1, 2)) / jnp.maximum(weights.sum(), 1)
        center = moved_center(center, guides.logits(mean)[None], present.any()[None], settings.momentum)
    losses, sums = streams.cross_entropies(guide, shift, learner, present, at_once=at_once)
    return _Compared(losses, sums, center)


def _dino(losses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`dino` of cross-entropies [G, b, 2, 2 + L]."""
    pairs = 2 * losses.shape[-1] - 2
    crossed = (losses[..., 0, 1] + losses[..., 1, 0]).mean()
    local = losses[..., 2:].sum((-2, -1)).mean()
    return crossed / pairs, local / pairs
