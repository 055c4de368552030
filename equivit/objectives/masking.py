"""Random choice of visible patches, for a whole batch, on the device: for a masked autoencoder and token dropping.

Token dropping trains on a subset of the patch tokens that grows over the run.  The fraction of dropped tokens falls
linearly over the run; each number of tokens needs a compiled step, so it is constant within each of a few phases.

Source of token dropping: Jumbo (arXiv 2502.15021), Section 4.2; its code of 2025 for the rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit import errors


def random_keep(
    key: jax.Array, batch: int, tokens: int, kept: int, groups: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """A random choice of tokens for each image.

    Args:
      batch: B, number of images.
      tokens: N, number of patch tokens per image.
      kept: K, number of tokens that are kept.
      groups: number of groups of consecutive images that share a choice; None: one choice per image.

    Returns:
      The indices of the kept tokens, int [B, K], in random order, and a mask, float [B, N], 1 where a token is removed.

    Raises:
      ValueError: `kept` is not between 1 and `tokens`, or `groups` does not divide `batch`.
    """
    if not 1 <= kept <= tokens:
        raise ValueError(f"random_keep: {kept=} must lie between 1 and the number of tokens, {tokens}.")
    if groups is not None:
        errors.divides("random_keep: groups", groups, batch, f"the batch of {batch} images")
    noise = jax.random.uniform(key, (batch if groups is None else groups, tokens))
    keep, mask = from_noise(noise, kept)
    copies = batch // len(noise)
    return jnp.repeat(keep, copies, axis=0), jnp.repeat(mask, copies, axis=0)


def from_noise(noise: jax.Array, kept: int) -> tuple[jax.Array, jax.Array]:
    """The `kept` tokens of lowest noise, and the mask of the others.  [*B, N] -> int [*B, K], float [*B, N]."""
    order = jnp.argsort(noise, axis=-1)
    rank = jnp.argsort(order, axis=-1)
    return order[..., :kept], (rank >= kept).astype(jnp.float32)


def number_kept(tokens: int, ratio: float) -> int:
    """The number of tokens kept when a fraction `ratio` is removed, rounded down as in MAE.

    Raises ValueError if none would be kept or none removed.
    """
    kept = int(tokens * (1 - ratio) + 1e-6)  # 10 * (1 - 0.9) is a little less than 1
    if not 1 <= kept < tokens:
        raise ValueError(
            f"masking: {ratio=} of {tokens} patches keeps {kept}; some must be kept and some removed, as with a ratio "
            f"from {1 / tokens:.3g} to {1 - 1 / tokens:.3g}."
        )
    return kept


class Tokens(NamedTuple):
    """The number of used patch tokens of an image."""

    kept: int
    all: int

    def __str__(self) -> str:
        return f"tokens: {self.kept} of {self.all}"


def tokens_at(progress: float, rates: tuple[float, float], phases: int, tokens: int) -> Tokens:
    """The number of tokens used at a point of the run.

    Args:
      progress: the finished fraction of all steps, in [0, 1].
      rates: the dropped fractions in the first and last phase.
      phases: number of phases of equal length.
      tokens: N, the number of patch tokens of an image; int(rate N) of them are dropped.
    """
    phase = min(int(progress * phases), phases - 1)
    done = phase / max(phases - 1, 1)
    rate = rates[0] * (1 - done) + rates[1] * done
    return Tokens(tokens - int(rate * tokens), tokens)
