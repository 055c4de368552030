"""Targets and cross-entropies over so many prototypes that no array of logits is held whole.

A stream is a set of rows that meet K prototypes.  Rows go through a few at a time, and their logits are computed again
wherever they are needed, also in the backward pass: what is kept is small beside [rows, K].

Rows have three axes: G groups of images, which may lie on different devices; M items (images or patches) of a group;
V views of an item.  Each step takes a few items of every group, so no row leaves its device.

Both kinds of targets of DINOv2 are softmax(logits / temperature + shift) with one shift [K] for all rows: the last
step of Sinkhorn and Knopp normalises rows, which leaves the factors of the columns to be found, and a centre c is the
shift -c / temperature.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit.layers.dino_head import logits


class Stream(NamedTuple):
    """Rows and what they are compared with.

    Attributes:
      features: [G, M, V, d], unit vectors.
      prototypes: [K, d].
      temperature: divides the logits.
    """

    features: jax.Array
    prototypes: jax.Array
    temperature: float | jax.Array


class Counts(NamedTuple):
    """Sums over the rows of targets: their number, their entropy, the rows themselves, and how often each k leads."""

    number: jax.Array  # []
    entropy: jax.Array  # []
    targets: jax.Array  # [K]
    leads: jax.Array  # [K]


def sinkhorn_shift(stream: Stream, present: jax.Array, *, iterations: int, rows: int) -> jax.Array:
    """The shift [K] at which softmax(logits / temperature + shift) is what Sinkhorn and Knopp's iterations end with.

    Args:
      present: bool [G, M]; the other items are padding.
      iterations: of a normalisation of all columns, then of all rows.
      rows: of a group that are worked on at a time.
    """
    stream = jax.lax.stop_gradient(stream)
    parts = _parts((stream.features, present), rows)
    groups, shift = len(present), None
    for _ in range(iterations):

        def add(total, part, shift=shift):
            features, present = part
            z = logits(features, stream.prototypes) / stream.temperature
            if shift is not None:
                z = z - jax.nn.logsumexp(z + shift, axis=-1, keepdims=True)
            column = jax.nn.logsumexp(jnp.where(present[..., None, None], z, -jnp.inf), axis=(1, 2))
            return jnp.logaddexp(total, column), None

        # Summed within each group first, so that devices speak once an iteration.
        total, _ = jax.lax.scan(add, jnp.full((groups, len(stream.prototypes)), -jnp.inf), parts)
        total = jax.nn.logsumexp(total, axis=0)
        shift = jnp.where(jnp.isneginf(total), 0.0, -total)  # without any row there is nothing to balance
    return jnp.zeros(len(stream.prototypes)) if shift is None else shift


def cross_entropies(
    teacher: Stream, shift: jax.Array, student: Stream, present: jax.Array, *, rows: int
) -> tuple[jax.Array, Counts]:
    """The cross-entropy of every view of the student against the targets of every view of the teacher.

    Only the student gets gradients.

    Args:
      teacher: with T views of each item; its targets are softmax(logits / temperature + shift).
      student: with S views.
      present: bool [G, M]; the other items are padding, and what they get has no meaning.
      rows: of a group that are worked on at a time.

    Returns:
      -sum_k t_k log softmax(s / temperature)_k, [G, M, T, S], and sums over the rows of targets.
    """
    teacher, shift = jax.lax.stop_gradient((teacher, shift))

    def step(sums, part):
        targets, spread = _targets(logits(part[0], teacher.prototypes) / teacher.temperature + shift, part[2])
        z = logits(part[1], student.prototypes) / student.temperature
        # Products of so few rows are no work for the units that round them.
        agreement = jnp.einsum("gmtk,gmsk->gmts", targets, z, precision=jax.lax.Precision.HIGHEST)
        losses = jax.nn.logsumexp(z, axis=-1)[:, :, None] - agreement
        return jax.tree.map(jnp.add, sums, spread), losses

    groups, items = present.shape
    zero = Counts(*(jnp.zeros((groups, *shape)) for shape in ((), (), shift.shape, shift.shape)))
    sums, losses = jax.lax.scan(
        jax.checkpoint(step, prevent_cse=False),
        zero,
        _parts((teacher.features, student.features, present), max(rows // student.features.shape[2], 1)),
    )
    losses = jnp.moveaxis(losses, 0, 1).reshape(groups, -1, *losses.shape[3:])[:, :items]
    return losses, jax.tree.map(lambda leaf: leaf.sum(0), sums)


def _targets(x: jax.Array, present: jax.Array) -> tuple[jax.Array, Counts]:
    """softmax(x) of [G, M, T, K], and its sums within each group."""
    log = jax.nn.log_softmax(x)
    targets, present = jnp.exp(log), present[..., None].astype(jnp.float32)
    number = jnp.broadcast_to(present, x.shape[:-1]).sum((1, 2))
    entropy = (-(targets * log).sum(-1) * present).sum((1, 2))
    leads = (jax.nn.one_hot(x.argmax(-1), x.shape[-1]) * present[..., None]).sum((1, 2))
    return targets, Counts(number, entropy, (targets * present[..., None]).sum((1, 2)), leads)


def _parts(arrays, rows: int):
    """Arrays [G, M, ...] as [n, G, m, ...] with m <= rows, filled up with zeros."""
    items = arrays[-1].shape[1]
    number = max(math.ceil(items / rows), 1)
    each = math.ceil(items / number)

    def split(a):
        a = jnp.pad(a, [(0, 0), (0, number * each - items)] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(len(a), number, each, *a.shape[2:]), 1, 0)

    return jax.tree.map(split, arrays)
