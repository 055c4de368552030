"""Select the blocks and heads to replace by Sigma, which measures how much attention depends on the image.

sigma[q, p] is the standard deviation over images of the attention from token q to token p.  Sigma of a head is its sum
over all q and p, Sigma of a block the mean over its heads.  A head of low Sigma attends by position alone, like a
convolution.  A head that averages over all tokens also has a low Sigma, although it is not local.

The released code takes the sample deviation, which multiplies every Sigma by one factor, and rounds Sigma to two
digits.  Neither changes an order, except that rounding makes ties of values that almost agree.  `published.py` has the
blocks and heads that the authors selected.

Source: depthwise attention, Section 2.3.1, Eq. 15 and 16; Figures A.1, A.2 and A.4; github.com/cscribano/DWConv_VFM.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from equivit import errors
from equivit.data.devices import check_like_first, padded, scattered
from equivit.layers.depthwise import IsotypicReplacedAttention, LinearAttention, ReplacedAttention
from equivit.layers.grid import Layout, check_grid
from equivit.models.vit.model import ViT

ORDERS = ("lowest", "highest", "random")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """Mean and squared deviations of samples of any shape, from batches in any order (Chan et al. 1979).

    A difference of sums of squares would lose all digits of a deviation much smaller than the mean.
    """

    count: jax.Array  # number of samples, []
    mean: jax.Array  # the mean, with the shape of a sample
    squares: jax.Array  # the sum of squared deviations from the mean

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Moments":
        """The moments of no samples."""
        return cls(jnp.zeros(()), jnp.zeros(shape), jnp.zeros(shape))

    def update(self, batch: jax.Array, weight: jax.Array | None = None) -> "Moments":
        """Add the samples of a batch [B, *shape]; samples with `weight` [B] 0 are ignored."""
        batch = batch.astype(jnp.promote_types(batch.dtype, jnp.float32))
        weight = jnp.ones(len(batch)) if weight is None else weight
        count, weight = weight.sum(), weight.reshape(-1, *(1,) * (batch.ndim - 1))
        mean = (weight * batch).sum(0) / jnp.maximum(count, 1)
        return self.merge(Moments(count, mean, (weight * jnp.square(batch - mean)).sum(0)))

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both sets of samples."""
        count = self.count + other.count
        share, delta = other.count / jnp.maximum(count, 1), other.mean - self.mean
        squares = self.squares + other.squares + jnp.square(delta) * (self.count * share)
        return Moments(count, self.mean + delta * share, squares)

    def deviation(self) -> jax.Array:
        """The population standard deviation; NaN without samples."""
        return jnp.sqrt(self.squares / self.count)


class Sigma(NamedTuple):
    """Sigma of heads, [depth, heads], and of blocks, [depth]; NaN for blocks that are fully or partly replaced."""

    heads: np.ndarray
    blocks: np.ndarray

    @classmethod
    def from_moments(cls, moments: Moments) -> "Sigma":
        """Sigma from the moments of all blocks, as `moments` returns them."""
        heads = np.asarray(_summed_deviations(moments))
        return cls(heads, heads.mean(1))


def sigma(model: ViT, batches: Iterable[Any]) -> Sigma:
    """Sigma of all heads and blocks, in one pass over the images; arguments and errors as in `moments`."""
    return Sigma.from_moments(moments(model, batches))


def moments(model: ViT, batches: Iterable[Any]) -> Moments:
    """The moments of the attention of all blocks: count [depth], mean and squares [depth, heads, N, N], in float32.

    Each batch passes through the model once; memory holds the attention of one block at a time.

    Args:
      model: a ViT without tokens before the patches, of any family.
      batches: images [B, H, W, C], normalised for the model and all of one size; the first batch is the largest.  Under
        a mesh, only the rows of this process.

    Raises ValueError if there are no images, they differ in size, a batch is larger than the first, or the model has
    tokens before the patches.
    """
    if model.config.prefix:
        raise ValueError(
            f"sigma: the model has {model.config.prefix} tokens before the patches; take "
            "replacement.patches_only(model)."
        )
    found: Any = None
    shape: Any = None
    for images in batches:
        if found is None:
            found, shape = _no_moments(model, images.shape), images.shape
        check_like_first("sigma", images.shape, shape)
        found = step(model, found, **padded(images, shape[0]))
    if found is None:
        raise ValueError("sigma: there are no images; give at least one batch.")
    return found


def aligned(deviation: jax.Array, grid: tuple[int, ...]) -> jax.Array:
    """The mean over queries by offset of the key, 0 in the centre: [*B, N, N] -> [*B, 2 h - 1, 2 w - 1].

    The input has axes query and key.  Offsets far from the centre average fewer pairs of tokens.
    """
    (h, w), rows = grid, np.indices(grid).reshape(2, -1)
    down, right = rows[:, None, :] - rows[:, :, None] + np.array([h - 1, w - 1])[:, None, None]
    cells = (down * (2 * w - 1) + right).reshape(-1)
    number = np.bincount(cells, minlength=(2 * h - 1) * (2 * w - 1))
    flat = deviation.reshape(*deviation.shape[:-2], -1)
    total = jnp.zeros((*flat.shape[:-1], len(number)), flat.dtype).at[..., cells].add(flat)
    return (total / number.astype(flat.dtype)).reshape(*flat.shape[:-1], 2 * h - 1, 2 * w - 1)


def select(scores: np.ndarray, number: int, order: str = "lowest", seed: int = 0) -> tuple[Any, ...]:
    """Select blocks, or (block, head) pairs, by score; return them in ascending order.

    Args:
      scores: [depth] for blocks, [depth, heads] for pairs; NaN is never selected.
      number: of blocks or pairs.
      order: "lowest", "highest" or "random"; equal scores are taken in ascending order of blocks.
      seed: seed of the random selection.

    Raises ValueError for an unknown order, or fewer finite scores than `number`.
    """
    errors.one_of("select: order", order, ORDERS)
    scores = np.asarray(scores, np.float64)
    finite = np.argwhere(np.isfinite(scores))
    if not 0 <= number <= len(finite):
        raise ValueError(
            f"select: {number=} must be at most {len(finite)}, the number of finite scores, and at least 0."
        )
    if order == "random":
        selected = np.random.default_rng(seed).permutation(len(finite))[:number]
    else:
        values = scores[tuple(finite.T)]
        selected = np.argsort(values if order == "lowest" else -values, kind="stable")[:number]
    places = [tuple(map(int, finite[i])) for i in sorted(selected)]
    return tuple(place[0] for place in places) if scores.ndim == 1 else tuple(places)


def by_block(selected: Sequence[Any]) -> dict[int, tuple[int, ...] | None]:
    """The selected blocks or (block, head) pairs as `replacement.replace` takes them: {block: None or heads}."""
    if not all(isinstance(place, tuple) for place in selected):
        return dict.fromkeys(selected)
    return {block: tuple(h for b, h in selected if b == block) for block in sorted({b for b, _ in selected})}


def _no_moments(model: ViT, shape: tuple[int, ...]) -> Moments:
    """The moments of all blocks before the first image."""
    config = model.config
    tokens = math.prod(check_grid(shape[1:3], config.patch_size, "images"))
    one = jax.eval_shape(lambda: Moments.zeros((config.num_heads, tokens, tokens)))
    return jax.tree.map(lambda a: scattered(np.zeros((config.depth, *a.shape), a.dtype), PartitionSpec()), one)


@functools.partial(jax.jit, donate_argnums=1)
def step(model: ViT, found: Moments, images: jax.Array, weight: jax.Array) -> Moments:
    """Add a batch to the moments `found`, whose memory is reused; `weight` [B] is 0 or 1 per image."""
    found = model.folded(images, functools.partial(_add_block, weight), found)
    inside = not jax.sharding.get_abstract_mesh().empty
    return jax.lax.with_sharding_constraint(found, PartitionSpec()) if inside else found


def _add_block(weight, found, index, block, x, layout: Layout):
    """Add the attention of one block to the moments."""
    if isinstance(block.attention, ReplacedAttention | IsotypicReplacedAttention | LinearAttention):
        return found
    attention = block.attention_weights(x, None, layout)
    new = jax.tree.map(lambda a: a[index], found).update(attention, weight)
    return jax.tree.map(lambda a, row: a.at[index].set(row), found, new)


@jax.jit
def _summed_deviations(moments: Moments) -> jax.Array:
    return jax.vmap(Moments.deviation)(moments).sum((-2, -1))
