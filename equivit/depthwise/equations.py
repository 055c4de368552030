"""Normal equations of taps and output maps: sums over any number of images, in constant memory."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from equivit.data.devices import check_like_first, padded
from equivit.depthwise.selection import aligned
from equivit.kernels.attention import attend
from equivit.layers import dense, isotypic
from equivit.layers.depthwise import ReplacedAttention, channels_of_heads
from equivit.layers.grid import Layout
from equivit.layers.parts import identity
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic

_product = functools.partial(jnp.einsum, precision="highest")


def projection(mean: jax.Array, grid: tuple[int, ...], kernel_size: int) -> jax.Array:
    """The taps of the zero-padded convolution nearest to a mean attention.

    A tap is the mean over all pairs of tokens with its offset, or 0 if there are none.

    Shapes: [*B, N, N], query and key, -> [*B, k, k].
    """
    whole, p = aligned(mean, grid), kernel_size // 2
    beyond = [(max(p - (size - 1), 0),) * 2 for size in grid]
    whole = jnp.pad(whole, [(0, 0)] * (whole.ndim - 2) + beyond)
    top, left = (size // 2 - p for size in whole.shape[-2:])
    return whole[..., top : top + kernel_size, left : left + kernel_size]


class Equations(NamedTuple):
    """The normal equations of n independent systems with m unknowns each."""

    gram: Any  # [n, m, m], the sum of products of regressors
    moment: Any  # [n, m], the sum of products of regressors and target
    energy: Any  # [n], the sum of squares of the target

    def solved(self, ridge: float | np.ndarray) -> np.ndarray:
        """The solutions [n, m], in float64; `ridge`, or [n], is added to the diagonal, relative to its mean."""
        gram, moment = np.asarray(self.gram, np.float64), np.asarray(self.moment, np.float64)
        size = gram.shape[-1]
        ridges = ridge * np.trace(gram, axis1=1, axis2=2) / size
        # A channel that is always 0 has the taps 0.
        gram = gram + np.maximum(ridges, np.finfo(float).tiny)[:, None, None] * np.eye(size)
        return np.linalg.solve(gram, moment[..., None])[..., 0]

    def by_head(self, num_heads: int) -> "Equations":
        """The equations of taps that all channels of a head share."""
        return jax.tree.map(lambda a: a.reshape(num_heads, -1, *a.shape[1:]).sum(1), self)


def neighbours(values: jax.Array, grid: tuple[int, ...], kernel_size: int) -> jax.Array:
    """The neighbour under each tap, in row-major order: [*B, h w, C] -> [*B, h w, k k, C]."""
    (h, w), p = grid, kernel_size // 2
    maps = values.reshape(*values.shape[:-2], h, w, values.shape[-1])
    maps = jnp.pad(maps, [(0, 0)] * (maps.ndim - 3) + [(p, p), (p, p), (0, 0)])
    views = [maps[..., r : r + h, s : s + w, :] for r in range(kernel_size) for s in range(kernel_size)]
    return jnp.stack(views, axis=-2).reshape(*values.shape[:-1], len(views), values.shape[-1])


def _with_one(near: jax.Array, weight: jax.Array) -> jax.Array:
    """The neighbours and, for a bias, 1, times the weight [*B, 1, 1] of an image."""
    one = jnp.broadcast_to(weight[..., None], (*near.shape[:-2], 1, near.shape[-1]))
    return jnp.concatenate([near, one.astype(near.dtype)], axis=-2)


def of_channels(near: jax.Array, targets: jax.Array) -> Equations:
    """The equations of the taps of each channel: near [*B, k k, C], targets [*B, C]; n = C, m = k k."""
    near, targets = near.reshape(-1, *near.shape[-2:]), targets.reshape(-1, targets.shape[-1])
    gram, moment = _product("tic,tjc->cij", near, near), _product("tic,tc->ci", near, targets)
    return Equations(gram, moment, jnp.square(targets).sum(0))


class Regression(NamedTuple):
    """The normal equations of a linear map with a bias, its last row."""

    gram: Any  # [C + 1, C + 1]
    moment: Any  # [C + 1, D]

    def solved(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        """Weight [C, D] and bias [D], in float64, with `ridge` on the weight's diagonal, relative to its mean."""
        gram, moment = np.asarray(self.gram, np.float64), np.asarray(self.moment, np.float64)
        size = len(gram) - 1
        ridge = ridge * np.trace(gram[:size, :size]) / size
        solution = np.linalg.solve(gram + np.diag([ridge] * size + [0.0]), moment)
        return solution[:-1], solution[-1]


def of_map(features: jax.Array, outputs: jax.Array, weight: jax.Array | float = 1.0) -> Regression:
    """The equations of the map from features [*B, C] to outputs [*B, D], with row weights [*B] of 0 or 1."""
    ones = jnp.ones((*features.shape[:-1], 1), features.dtype)
    rows = jnp.concatenate([features, ones], axis=-1) * jnp.asarray(weight, features.dtype)[..., None]
    rows = rows.reshape(-1, rows.shape[-1])
    outputs = outputs.reshape(len(rows), -1)
    return Regression(_product("ti,tj->ij", rows, rows), _product("ti,to->io", rows, outputs))


# ---- Sums over images, for the attention of one block and its replacement


def streamed(step: Callable, batches: Iterable[Any], *arguments: Any) -> Any:
    """The sum of `step(*arguments, images, weight)` over the batches, in float64.

    Raises ValueError if there are no images, they differ in size, or a batch is larger than the first.
    """
    total, first = None, None
    for images in map(np.asarray, batches):
        first = images.shape if first is None else first
        check_like_first("fit", images.shape, first)
        part = step(*arguments, **padded(images, first[0]))
        part = jax.tree.map(lambda a: np.asarray(a, np.float64), multihost_utils.process_allgather(part, tiled=True))
        total = part if total is None else jax.tree.map(np.add, total, part)
    if total is None:
        raise ValueError("fit: there are no images; give at least one batch, and a list rather than an iterator.")
    return total


def channels(attention: Any, new: Any, x: Any, layout: Layout, weight: jax.Array) -> Equations:
    """The equations of the taps of `new`, a replacement of `attention`; its bias is the last unknown of a channel.

    x are the inputs of both modules; the targets are the attention's outputs before the projection.  For fields, the
    values on each group element are samples of the same taps, transformed by the element.
    """
    values, targets = new.value(x), bare(attention)(x, layout)
    if isinstance(values, Isotypic):
        values, targets = fields.to_regular(values), fields.to_regular(targets)
    if isinstance(new, ReplacedAttention) and new.attending:
        values, targets = (channels_of_heads(a, new.heads, new.num_heads) for a in (values, targets))
    weight = weight[:, None, None]
    near = neighbours(values * weight, layout.grid, new.kernel_size)
    if isinstance(new, ReplacedAttention) and new.bias_follows:  # taps outside the grid meet it too
        bias = channels_of_heads(new.value.bias[...], new.heads, new.num_heads)
        near += bias * (1 - neighbours(jnp.ones(values.shape[-2:]), layout.grid, new.kernel_size)) * weight[..., None]
    if isinstance(x, Isotypic):
        order = [_unmoved(element, new.kernel_size) for element in x.group.regular_order]
        near = jnp.stack([part[..., taps, :] for part, taps in zip(near, order, strict=True)])
    near = near if new.bias is None else _with_one(near, weight)
    found = of_channels(near, targets * weight)
    return found.by_head(len(new.taps[...])) if new.kind == "conv" else found


def ensemble(attention: Any, new: Any, x: jax.Array, layout: Layout, weight: jax.Array) -> Equations:
    """The equations of an ensemble's taps and bias, in one system; the targets are the outputs of the module."""
    folded = new.folded()
    out = folded.proj.weight[...]
    targets = attention(x, layout) - (0.0 if folded.proj.bias is None else folded.proj.bias[...])
    weight = weight[:, None, None]
    targets = _product("...o,co->...c", targets * weight, out)
    near = neighbours(folded.values.value(x) * weight, layout.grid, new.kernel_size)
    near = near if new.bias is None else _with_one(near, weight)
    rows = near.reshape(-1, *near.shape[-2:])
    gram = _product("tic,tjd->icjd", rows, rows) * _product("co,do->cd", out, out)[:, None, :]
    moment = _product("tic,tc->ic", rows, targets.reshape(len(rows), -1))
    size = moment.size
    return Equations(gram.reshape(1, size, size), moment.reshape(1, size), jnp.zeros(1))


def outputs(attention: Any, new: Any, x: jax.Array, layout: Layout, weight: jax.Array) -> Regression:
    """The equations of the projection of `new`; the targets are the outputs of the attention."""
    features = bare(new)(x, layout)
    return of_map(features, attention(x, layout), jnp.broadcast_to(weight[:, None], features.shape[:-1]))


def projections(attention: Any, new: Any, x: Any, layout: Layout, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The projections of the attention of all heads, [H, k, k], summed over images; and the number of images."""
    total = (attention.weights(x, None, layout) * weight[:, None, None, None]).sum(0)
    return projection(total, layout.grid, new.kernel_size), weight.sum()


def distances(attention: Any, new: Any, x: Any, layout: Layout, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squared difference between the outputs of both modules, and the squared outputs of the attention, summed."""
    theirs = attention(x, layout)
    return squares(jax.tree.map(jnp.subtract, new(x, layout), theirs), weight), squares(theirs, weight)


def squares(x: Any, weight: jax.Array) -> jax.Array:
    """The sum of squares of tokens [B, N, C], or of all leaves of a field."""
    parts = [(jnp.square(leaf) * weight[:, None, None]).sum() for leaf in jax.tree.leaves(x)]
    return jnp.stack(parts).sum()


def bare(attention: Any) -> Callable[[Any, Layout], Any]:
    """The module without its projection."""
    module = jax.tree.map(lambda a: a, attention)
    module.proj = identity
    if type(module) is dense.Attention or isinstance(module, isotypic.Attention):
        return lambda x, layout: module.projected(attend(*module.heads(x)))
    return module


def _unmoved(element: str, kernel_size: int) -> np.ndarray:
    """For each tap, the index of the neighbour it multiplies in the channels of the element."""
    taps: Any = np.arange(kernel_size**2).reshape(kernel_size, kernel_size)
    return np.argsort(fields.act_on_grid(element, taps, (0, 1)).ravel())
