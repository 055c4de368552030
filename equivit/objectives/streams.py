"""Targets and cross-entropies over many prototypes, without storing all logits.

A few rows at a time are compared with the K prototypes, and logits are recomputed whenever needed, also in the backward
pass: all stored arrays are small compared with [rows, K].

Rows have three axes: G groups of images, possibly on different devices; M items (images or patches) of a group; V views
of an item.  Each step takes a few items of every group, so no row leaves its device.

Both kinds of DINOv2 targets are softmax(logits / temperature + shift) with one shift [K] for all rows.  Sinkhorn-Knopp
iterations end with a normalisation of rows, so only the factors of columns, the shift, are unknown; a centre c is the
shift -c / temperature.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


class Stream(NamedTuple):
    """Rows and the function that computes their logits."""

    rows: jax.Array  # [G, M, V, D]
    weights: Any  # arrays shared by all rows
    logits: Callable[
        [Any, jax.Array], jax.Array
    ]  # of weights and rows [..., D], over the temperature: float32 [..., K]


class Sums(NamedTuple):
    """Sums over rows of targets."""

    number: jax.Array  # of rows, []
    entropy: jax.Array  # the sum of their entropies, []
    targets: jax.Array  # the sum of the rows, [K]
    leads: jax.Array  # for each entry, the number of rows where it is the largest, [K]


def sinkhorn_shift(stream: Stream, present: jax.Array, size: int, *, iterations: int, at_once: int) -> jax.Array:
    """The shift [K] for which softmax(logits + shift) equals the result of Sinkhorn-Knopp iterations.

    Args:
      present: bool [G, M]; the other items are padding.
      size: K.
      iterations: normalisations of all columns, then of all rows; at least 1.
      at_once: rows of a group processed at a time.
    """

    def columns(weights, arrays):
        """The log of the sum of each column within each group, [G, K]."""
        given, shift = weights

        def add(total, part):
            rows, present = part
            z = stream.logits(given, rows)
            if shift is not None:
                z = z - jax.nn.logsumexp(z + shift, axis=-1, keepdims=True)
            z = jnp.where(present[..., None, None], z, -jnp.inf)
            return jnp.logaddexp(total, jax.nn.logsumexp(z, axis=(1, 2))), None

        start = jnp.full((len(arrays[1]), size), -jnp.inf)
        return jax.lax.scan(add, start, _parts(arrays, at_once // stream.rows.shape[2]))[0]

    def balanced(shift):
        total = jax.nn.logsumexp(by_group(columns, (stream.weights, shift), (stream.rows, present)), axis=0)
        return jnp.where(jnp.isneginf(total), 0.0, -total)  # no rows: nothing to balance

    shift = balanced(None)
    for _ in range(iterations - 1):
        shift = balanced(shift)
    return shift


def cross_entropies(
    teacher: Stream, shift: jax.Array, student: Stream, present: jax.Array, *, at_once: int
) -> tuple[jax.Array, Sums]:
    """The cross-entropy of every view of the student against the targets of every view of the teacher.

    Args:
      teacher: T views of each item; its targets are softmax(logits + shift).
      student: S views.
      present: bool [G, M]; the other items are padding, with meaningless results.
      at_once: rows of the student in a group processed at a time.

    Returns:
      -sum_k t_k log softmax(s)_k, [G, M, T, S], and sums over the rows of targets.
    """

    def compare(weights, arrays):
        theirs, wide, shift = weights

        def step(sums, part):
            guides, rows, present = part
            targets, added = _targets(teacher.logits(theirs, guides) + shift, present)
            ours = jax.tree.map(lambda a, like: a.astype(like.dtype), wide, student.weights)
            z = student.logits(ours, rows)
            agreement = jnp.einsum("gmtk,gmsk->gmts", targets, z, precision=jax.lax.Precision.HIGHEST)
            losses = jax.nn.logsumexp(z, axis=-1)[:, :, None] - agreement
            return jax.tree.map(jnp.add, sums, added), losses

        groups, items = arrays[-1].shape
        zeros = Sums(*(jnp.zeros((groups, *shape)) for shape in ((), (), shift.shape, shift.shape)))
        parts = _parts(arrays, at_once // student.rows.shape[2])
        sums, losses = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), zeros, parts)
        return jnp.moveaxis(losses, 0, 1).reshape(groups, -1, *losses.shape[3:])[:, :items], sums

    # Each step computes in the dtype of the weights, but gradients accumulate in float32.
    weights = (teacher.weights, jax.tree.map(lambda a: a.astype(jnp.float32), student.weights), shift)
    losses, sums = by_group(compare, weights, (teacher.rows, student.rows, present))
    return losses, jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf.sum(0)), sums)


def by_group(function: Callable[[Any, Any], Any], weights: Any, arrays: Any) -> Any:
    """`function(weights, arrays)`, where arrays and results [G, ...] are sharded by group and weights are replicated.

    If the number of devices in the mesh divides G, each device works on its groups alone, and the gradient of the
    weights is summed over devices once at the end; the compiler would sum after every few rows.  A single device skips
    this, which would only add a copy.
    """
    mesh, groups = jax.sharding.get_abstract_mesh(), len(jax.tree.leaves(arrays)[0])
    if mesh.empty or mesh.size == 1 or groups % mesh.size or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return function(weights, arrays)
    lying = PartitionSpec(mesh.axis_names)
    run = jax.shard_map(function, in_specs=(PartitionSpec(), lying), out_specs=lying, check_vma=False)
    return run(weights, arrays)


def _targets(x: jax.Array, present: jax.Array) -> tuple[jax.Array, Sums]:
    """softmax(x) of [G, m, T, K], and its sums within each group."""
    log = jax.nn.log_softmax(x)
    targets, counts = jnp.exp(log), present[..., None].astype(x.dtype)
    leads = jax.nn.one_hot(x.argmax(-1), x.shape[-1])
    return targets, Sums(
        number=counts.sum((1, 2)) * x.shape[2],
        entropy=-((targets * log).sum(-1) * counts).sum((1, 2)),
        targets=(targets * counts[..., None]).sum((1, 2)),
        leads=(leads * counts[..., None]).sum((1, 2)),
    )


def _parts(arrays: Any, most: int) -> Any:
    """Arrays [G, M, ...] as [n, G, m, ...] with m <= most, padded with zeros; at least one item, even if M is 0."""
    items = max(arrays[-1].shape[1], 1)
    number = math.ceil(items / max(most, 1))
    each = math.ceil(items / number)

    def split(a):
        a = jnp.pad(a, [(0, 0), (0, number * each - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(len(a), number, each, *a.shape[2:]), 1, 0)

    return jax.tree.map(split, arrays)
