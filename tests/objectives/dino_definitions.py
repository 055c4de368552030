"""The plain definitions of DINOv2's targets and cross-entropies, on whole arrays of logits."""

import math

import jax
import jax.numpy as jnp

from equivit.objectives.dino_losses import Spread


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


def spread(targets: jax.Array, weights: jax.Array | None = None) -> Spread:
    """`Spread` of targets [R, K]; rows of weight [R] 0 do not count."""
    present = jnp.ones(len(targets)) if weights is None else (weights > 0).astype(jnp.float32)
    number, size = jnp.maximum(present.sum(), 1), math.log(targets.shape[-1])
    leads = present @ jax.nn.one_hot(targets.argmax(-1), targets.shape[-1])
    rows = jax.scipy.special.entr(targets).sum(-1) @ present / number
    mean = jax.scipy.special.entr(present @ targets / number).sum()
    return Spread(rows / size, mean / size, leads.max() / number)
