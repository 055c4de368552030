"""Stochastic depth: drop a residual branch for some of the images.

`drop_path` computes a branch for all images and zeroes some results.  `on_subset` computes it for a `subset` only: at a
rate of 0.3 a block costs about 0.7.  The number of images is fixed, so shapes are static.

Source: Huang et al. 2016; for subsets DINOv2 (arXiv 2304.07193), Section 5, "Efficient stochastic depth".
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode as Mode

from equivit import errors
from equivit.kernels import mesh
from equivit.layers.dropout import Key, Rate, is_zero, rescaled
from equivit.symmetry.fields import TokensT


def drop_path(x: TokensT, rate: Rate, key: Key, *, axes: int = 2) -> TokensT:
    """Zero x for each sample with probability `rate`, and divide the others by 1 - rate; `key=None` returns x.

    One draw per sample covers all tokens, channels and irreps.

    Args:
      axes: number of axes of a sample: 2 for tokens [*B, N, C], 3 for maps [*B, h, w, C].
    """
    if key is None or is_zero(rate):
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (*x.shape[:-axes], *(1,) * axes))
    return jax.tree.map(lambda leaf: rescaled(leaf, kept, rate), x)


def subset(key: jax.Array, images: int, rate: float, groups: int = 1) -> jax.Array:
    """Draw the images to compute a branch for: max(int(b (1 - rate)), 1) of every b, without replacement.

    Args:
      images: number of images in the batch.
      rate: the share of dropped images.
      groups: number of groups of b consecutive images, drawn independently.

    Returns:
      int [groups, s], indices within the group.

    Raises:
      ValueError: `rate` is not in [0, 1), or `groups` does not divide the images.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"subset: {rate=} must be at least 0 and below 1.")
    errors.divides("subset: groups", groups, images, f"the batch of {images} images")
    size = images // groups
    noise = jax.random.uniform(key, (groups, size))
    return jnp.argsort(noise, axis=-1)[:, : max(int(size * (1 - rate)), 1)]


def on_subset(branch: Callable[[TokensT], TokensT], x: TokensT, kept: jax.Array) -> TokensT:
    """Add b/s times the branch of the s kept of b images to these images.

    The expectation is x + branch(x), if the branch treats images independently.  If the number of groups is a multiple
    of the devices that share the batch, no token leaves its device.  If it divides the number of devices, tokens move
    between the devices of their group.

    Args:
      branch: maps the s images, or the concatenated images of all groups.
      x: dense [*B, b, N, C], or a field; images on axis -3.
      kept: int [s], or [groups, s] with indices within groups of consecutive images, from `subset`.
    """
    kept = jnp.atleast_2d(kept)
    groups, size = kept.shape
    scale, images = x.shape[-3] / (groups * size), x.shape[-3] // groups
    kept, mode = _split_evenly(kept, images)

    def grouped(leaf, each):
        return leaf.reshape(*leaf.shape[:-3], groups, each, *leaf.shape[-2:])

    def joined(leaf):
        return leaf.reshape(*leaf.shape[:-4], -1, *leaf.shape[-2:])

    def take(leaf):
        return mesh.split_images(joined(_take(grouped(leaf, images), kept, mode)))

    def add(leaf, part):
        rows = grouped(leaf, images).astype(jnp.result_type(leaf, part))
        part = grouped(mesh.split_images(scale * part), kept.shape[1])
        return joined(_add(rows, kept, part.astype(rows.dtype), mode))

    return jax.tree.map(add, x, branch(jax.tree.map(take, x)))


def _split_evenly(kept: jax.Array, images: int) -> tuple[jax.Array, Mode]:
    """Indices [G, s], with some past the end of a group if s images of each do not split evenly over the devices.

    XLA would gather the tokens of an uneven split on every device.  Images past the end are read as 0, and what is
    added to them is dropped.
    """
    groups, size = kept.shape
    more = mesh.even(size, groups) - size
    if not more:
        return kept, Mode.PROMISE_IN_BOUNDS
    past = jnp.broadcast_to(images + jnp.arange(more), (groups, more))
    return jnp.concatenate([kept, past], axis=1), Mode.FILL_OR_DROP


def _take(rows: jax.Array, kept: jax.Array, mode: Mode) -> jax.Array:
    """Rows [..., G, b, N, C] at kept [G, s]: [..., G, s, N, C]."""
    *leading, groups, images, tokens, channels = range(rows.ndim)
    # With plain index arrays the compiler could not see that groups, and so devices, are independent.
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(*leading, tokens, channels),
        collapsed_slice_dims=(images,),
        start_index_map=(images,),
        operand_batching_dims=(groups,),
        start_indices_batching_dims=(0,),
    )
    sizes = [1 if axis in (groups, images) else size for axis, size in enumerate(rows.shape)]
    return jax.lax.gather(rows, kept[..., None], numbers, sizes, unique_indices=True, mode=mode, fill_value=0)


def _add(rows: jax.Array, kept: jax.Array, part: jax.Array, mode: Mode) -> jax.Array:
    """Rows [..., G, b, N, C] with part [..., G, s, N, C] added at kept [G, s]."""
    *leading, groups, images, tokens, channels = range(rows.ndim)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(*leading, tokens, channels),
        inserted_window_dims=(images,),
        scatter_dims_to_operand_dims=(images,),
        operand_batching_dims=(groups,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter_add(rows, kept[..., None], part, numbers, unique_indices=True, mode=mode)
