"""How near the features of a model stay when blocks are replaced: for models without a head, in place of a metric."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit.depthwise.equations import streamed
from equivit.models.vit.model import ViT


class Nearness(NamedTuple):
    """The nearness of the patch tokens after each block and the final norm; the last entries are of the features.

    Attributes:
      cosine: [depth], the mean over tokens of the cosine between the tokens of both models.
      error: [depth], the squared distance between both, relative to the squared norm of the first model's tokens.
    """

    cosine: np.ndarray
    error: np.ndarray


def measure(before: ViT, after: ViT, batches: Iterable[Any]) -> Nearness:
    """Compare two models of the same depth and width; the batches are as for `depthwise.fit.fit`.

    Raises ValueError if there are no images, they differ in size, or a batch is larger than the first.
    """
    cosines, distances, squares, tokens = streamed(_sums, batches, before, after)
    return Nearness(cosines / tokens, distances / squares)


@jax.jit
def _sums(before, after, images, weight):
    """By block, the sums over tokens of cosines, squared distances and squares; and the number of tokens."""
    x, y = (_tokens(model, images) for model in (before, after))
    weight = jnp.broadcast_to(weight[:, None, None], x.shape[1:-1])
    product, ours, theirs = ((a * b).sum(-1) for a, b in ((x, y), (x, x), (y, y)))
    cosine = product / jnp.maximum(jnp.sqrt(ours * theirs), jnp.finfo(ours.dtype).tiny)
    sums = (cosine, jnp.square(x - y).sum(-1), ours)
    return *((part * weight).sum((1, 2, 3)) for part in sums), weight.sum()


def _tokens(model: ViT, images: jax.Array) -> jax.Array:
    """The patch tokens after each block and the final norm: [depth, B, h, w, D], in float32."""
    blocks = tuple(range(model.config.depth))
    found = model.features(images, blocks=blocks).blocks
    return jnp.stack([found[block].patches.values for block in blocks]).astype(jnp.float32)
