"""Taps that begin where the attention was, in place of a random start, and what replacing each block would damage.

The attention of a head is a matrix E(x) of tokens by tokens, which acts on its values V.  Two kinds of taps come near:

- `projection`: the convolution nearest to E in the mean over images, by the diagonal averages of the mean of E;
- `least_squares`: the one whose outputs are nearest to E V, which also knows which values go together.

`fit` replaces blocks one by one, from the first to the last, each in the model whose earlier blocks are replaced
already.  All sums over images are of a fixed size, so that there may be any number of images.

The paper begins with normal taps; these starts are ours.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from equivit import errors
from equivit.evaluation.predictions import filled
from equivit.evaluation.sigma import aligned
from equivit.layers.depthwise import BY_HEAD, ScatteredAttention, replace_attention
from equivit.layers.grid import Layout
from equivit.models import replacement
from equivit.models.vit import ViT
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic


METHODS = ("normal", "projection", "least_squares")
RIDGE = 1e-4  # of the mean of the diagonal
SHARE = 0.9  # of the head that an ensemble begins with


class Equations(NamedTuple):
    """The normal equations of taps: sums over images and tokens of products of neighbours and targets.

    Attributes:
      gram: [n, k k, k k], of each channel or head.
      moment: [n, k k].
      energy: [n], of the targets.
    """

    gram: Any
    moment: Any
    energy: Any


def projection(mean: jax.Array, grid: tuple[int, int], kernel_size: int) -> jax.Array:
    """The taps of the convolution, zeros outside of the grid, that is nearest to a mean attention.

    A tap is the mean over all pairs of tokens of its offset; 0 where there is none.

    Shapes: [*B, N, N], query and key, -> [*B, k, k].
    """
    whole, p = aligned(mean, grid), kernel_size // 2
    beyond = [max(p - (size - 1), 0) for size in grid]
    whole = jnp.pad(whole, [(0, 0)] * (whole.ndim - 2) + [(b, b) for b in beyond])
    top, left = (size // 2 - p for size in whole.shape[-2:])
    return whole[..., top : top + kernel_size, left : left + kernel_size]


def least_squares(
    values: jax.Array,
    targets: jax.Array,
    grid: tuple[int, int],
    kernel_size: int,
    *,
    ridge: float,
    num_heads: int | None = None,
) -> np.ndarray:
    """The taps with which values come nearest to targets, zeros outside of the grid.

    Shapes: values and targets [*B, h w, C] -> [k, k, C], or with `num_heads` one kernel for all channels of each head,
    [heads, k, k].

    Args:
      ridge: added to the diagonal of the normal equations, which are sums over images and tokens.
    """
    found = equations(neighbours(values, grid, kernel_size), targets, num_heads)
    return as_taps(solved(found, ridge), kernel_size, num_heads).astype(values.dtype)


def refit_output(features: jax.Array, outputs: jax.Array, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight [C, D] and bias [D] of the linear map from features [*B, C] to outputs [*B, D], by ridge regression.

    Args:
      ridge: added to the diagonal of the normal equations, but not for the bias.
    """
    return _output(regression(features, outputs, jnp.ones(features.shape[:-1])), ridge)


def fit(
    model: ViT,
    where: Mapping[int, tuple[int, ...] | None],
    batches: Iterable[Any],
    *,
    kind: str = "dw",
    method: str = "least_squares",
    kernel_size: int = 3,
    refit: bool = False,
    ridge: float = RIDGE,
    rngs: nnx.Rngs | None = None,
) -> tuple[ViT, dict[int, float]]:
    """The model with attention replaced and taps fitted, and the relative error of each block's attention module.

    The error is the squared distance of the module's outputs from those of the attention for the same inputs, as a
    share of the squares of these.

    Args:
      where: {block: None for all heads, or the heads}.
      batches: images [B, H, W, C] as the model takes them, of one size, the first batch the largest; they are gone
        through several times.  Under a mesh these are the rows of this process.
      kind: of the replacement.  An ensemble ("ens_dw") begins with 0.9 of the head whose own fit is the best, and its
        taps are fitted to the output of the module.
      method: "normal" (random taps, the paper's), "projection" ("dw" and "conv") or "least_squares" (all but "spvit").
      refit: the output projection is fitted too, to the outputs of the attention ("dw" and "conv" of dense blocks).
      ridge: of all fits, times the mean of the diagonal of the normal equations.
      rngs: draws normal taps; seed 0 if None.

    Raises:
      ValueError: an unknown method, one that does not go with the kind or the model, or no images.
    """
    errors.one_of("fit: method", method, METHODS)
    _check_kind(kind, method, refit)
    found, rngs = {}, nnx.Rngs(params=0) if rngs is None else rngs
    for index in sorted(where):
        attention, heads = model.blocks[index].attention, where[index]
        new = replace_attention(attention, kind, kernel_size=kernel_size, heads=heads, rngs=rngs)
        sums = functools.partial(_streamed, batches=batches, index=index, model=model)
        if method != "normal":
            new = _with_taps(attention, new, method, sums, ridge)
        if refit:
            new = _with_output(new, sums, ridge)
        found[index] = float(np.divide(*sums(_distances, new=new)))
        model = replacement.replace(model, {index: heads}, kind=kind, kernel_size=kernel_size)
        model = _with_attention(model, index, new)
    return model, found


# ---- Normal equations


def neighbours(values: jax.Array, grid: tuple[int, int], kernel_size: int) -> jax.Array:
    """What each tap meets, row by row of the taps: [*B, h w, C] -> [*B, h w, k k, C]."""
    (h, w), p = grid, kernel_size // 2
    maps = values.reshape(*values.shape[:-2], h, w, values.shape[-1])
    maps = jnp.pad(maps, [(0, 0)] * (maps.ndim - 3) + [(p, p), (p, p), (0, 0)])
    views = [maps[..., r : r + h, s : s + w, :] for r in range(kernel_size) for s in range(kernel_size)]
    return jnp.stack(views, axis=-2).reshape(*values.shape[:-1], len(views), values.shape[-1])


def equations(near: jax.Array, targets: jax.Array, num_heads: int | None = None) -> Equations:
    """Those of each channel, or of each head: near [*B, N, k k, C], targets [*B, N, C]."""
    near, targets = near.reshape(-1, *near.shape[-2:]), targets.reshape(-1, targets.shape[-1])
    product = functools.partial(jnp.einsum, precision="highest")
    found = Equations(
        product("tic,tjc->cij", near, near), product("tic,tc->ci", near, targets), jnp.square(targets).sum(0)
    )
    if num_heads is None:
        return found
    return jax.tree.map(lambda a: a.reshape(num_heads, -1, *a.shape[1:]).sum(1), found)


def solved(found: Equations, ridge: float | np.ndarray) -> np.ndarray:
    """The solutions [n, k k], in float64; `ridge` is one for all, or one for each."""
    gram, moment = (np.asarray(a, np.float64) for a in found[:2])
    diagonal = np.broadcast_to(ridge, len(gram))[:, None, None] * np.eye(gram.shape[-1])
    return np.linalg.solve(gram + diagonal, moment[..., None])[..., 0]


def as_taps(solutions: np.ndarray, kernel_size: int, num_heads: int | None = None) -> np.ndarray:
    """[C, k k] -> [k, k, C], or [heads, k k] -> [heads, k, k]."""
    taps = solutions.reshape(len(solutions), kernel_size, kernel_size)
    return np.moveaxis(taps, 0, -1) if num_heads is None else taps


def regression(features: jax.Array, outputs: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The normal equations of `refit_output`, the bias last: [C + 1, C + 1] and [C + 1, D]; rows count by `weight`."""
    ones = jnp.ones((*features.shape[:-1], 1), features.dtype)
    features = jnp.concatenate([features, ones], axis=-1) * weight[..., None].astype(features.dtype)
    rows = features.reshape(-1, features.shape[-1])
    product = functools.partial(jnp.matmul, precision="highest")
    return product(rows.T, rows), product(rows.T, outputs.reshape(len(rows), -1))


def _output(found: tuple[Any, Any], ridge: float) -> tuple[np.ndarray, np.ndarray]:
    gram, moment = (np.asarray(a, np.float64) for a in found)
    penalty = np.diag([ridge] * (len(gram) - 1) + [0.0])
    solution = np.linalg.solve(gram + penalty, moment).astype(np.asarray(found[1]).dtype)
    return solution[:-1], solution[-1]


# ---- One block


def _check_kind(kind: str, method: str, refit: bool) -> None:
    if method == "least_squares" and kind == "spvit":
        raise ValueError("fit: method='least_squares' needs outputs that are linear in the taps; 'spvit' takes 'normal'.")
    if method == "projection" and kind not in BY_HEAD:
        raise ValueError(f"fit: method='projection' has taps for each head, which {kind!r} has not; take 'dw' or 'conv'.")
    if refit and kind not in BY_HEAD:
        raise ValueError(f"fit: refit=True needs one output weight a head; {kind!r} mixes them; take 'dw' or 'conv'.")


def _with_taps(attention: Any, new: Any, method: str, sums: Callable, ridge: float) -> Any:
    """The replacement with fitted taps."""
    if method == "projection":
        mean, grid = sums(_attention, new=new)
    elif new.kind == "ens_dw":
        own = replace_attention(attention, "dw", kernel_size=new.kernel_size)
        new.gamma.set_value(jnp.asarray(_gamma(sums(_equations, new=own), new.num_heads, ridge)))
        found = sums(_ensemble, new=new)
        solutions = solved(found, scaled(found, ridge)).reshape(new.kernel_size**2, -1).T
    else:
        found = sums(_equations, new=new)
        solutions = solved(found, scaled(found, ridge))
    return new
