"""Taps that begin where the attention was, in place of random ones, and what the replacement of a block would damage.

The attention of a head is a matrix E(x) of tokens by tokens, which acts on its values V.  Two sorts of taps come near:

- `projection`: of the convolution that is nearest to E in the mean over images, the diagonal averages of E's mean;
- `least_squares`: of the one whose outputs are nearest to E V, which also knows the values.

`fit` replaces blocks from the first to the last, each in the model whose earlier blocks are replaced already.  `damage`
is that of each block alone, and ranks blocks as Sigma does.  The paper has random taps and Sigma; these are ours.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors, logical
from equivit.depthwise import equations, replacement
from equivit.depthwise.equations import Equations, projection, streamed
from equivit.layers.depthwise import BY_HEAD, IsotypicReplacedAttention, replace_attention
from equivit.layers.rngs import Keys
from equivit.models.vit.model import ViT
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

__all__ = ["METHODS", "damage", "fit", "least_squares", "projection", "refit_output"]

METHODS = ("normal", "projection", "least_squares")
RIDGE = 1e-4  # of the mean of the diagonal
SHARE = 0.9  # of the best head in an ensemble


def least_squares(
    values: jax.Array,
    targets: jax.Array,
    grid: tuple[int, int],
    kernel_size: int,
    *,
    ridge: float,
    num_heads: int | None = None,
) -> np.ndarray:
    """The taps with which values come nearest to targets, with zeros outside of the grid.

    Shapes: values and targets [*B, h w, C] -> [k, k, C], or with `num_heads` one kernel for all channels of a head,
    [heads, k, k].

    Args:
      ridge: added to the diagonal of the normal equations, which are sums over images and tokens.
    """
    found = equations.of_channels(equations.neighbours(values, grid, kernel_size), targets)
    found = found if num_heads is None else found.by_head(num_heads)
    taps = found.solved(ridge).reshape(-1, kernel_size, kernel_size).astype(values.dtype)
    return np.moveaxis(taps, 0, -1) if num_heads is None else taps


def refit_output(features: jax.Array, outputs: jax.Array, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Weight [C, D] and bias [D] of the linear map from features [*B, C] to outputs [*B, D], by ridge regression.

    Args:
      ridge: added to the diagonal of the normal equations, but for the bias.
    """
    weight, bias = equations.of_map(features, outputs).solved(ridge)
    return weight.astype(features.dtype), bias.astype(features.dtype)


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
    """The model with attention replaced and taps fitted, and by block the relative error of its attention module.

    The error is the squared distance of the outputs from those of the attention for the same inputs, as a share of the
    squares of these.

    Args:
      where: the heads to replace by block; None for all.
      batches: images [B, H, W, C] as the model takes them, of one size, the first batch the largest; they are gone
        through several times.  Under a mesh these are the rows of this process.
      kind: of the replacement.  "ens_dw" begins with 0.9 of the head whose own fit is the best, and taps that are
        fitted to the output of the module.
      method: "normal" (random taps), "projection" (of "dw" and "conv") or "least_squares" (of all but "spvit").
      refit: whether the output projection is fitted too, for "dw" and "conv" of dense blocks.
      ridge: of all fits, times the mean of the diagonal.
      rngs: draws normal taps; seed 0 if None.

    Raises:
      ValueError: an unknown method, one that does not go with the kind or the model, no images, images that differ in
        size, a batch larger than the first, or as `replacement.replace`.
    """
    errors.one_of("fit: method", method, METHODS)
    result: Any = model
    where = {one.block: one.heads for one in replacement.entries("fit", where, kind, kernel_size)}
    found, rngs = {}, Keys(0) if rngs is None else rngs
    for index in where:
        options: dict[str, Any] = dict(kind=kind, kernel_size=kernel_size, rngs=rngs)
        after: Any = replacement.replace(result, {index: where[index]}, **options)
        new = after.blocks[index].attention
        _check(new, method, refit)
        sums = functools.partial(_sums, result, index, batches)
        if method == "projection":
            new = _with(new, taps=_projected(new, *sums(equations.projections, new)))
        elif method == "least_squares":
            new = _fitted(new, result.blocks[index].attention, sums, ridge)
        if refit:
            weight, bias = sums(equations.outputs, new).solved(ridge, scaled=True)
            new = _with(new, **{"proj.weight": weight, "proj.bias": bias})
        found[index] = float(np.divide(*sums(equations.distances, new)))
        tensors = {f"blocks.{index}.attention.{name}": t for name, t in logical.to_logical(new, nnx.Variable).items()}
        result = logical.from_logical(after, logical.to_logical(after, nnx.Variable) | tensors, nnx.Variable)
    return result, found


def damage(model: ViT, batches: Iterable[Any], *, kind: str = "dw", kernel_size: int = 3) -> np.ndarray:
    """The error caused by the replacement of each block alone: [depth], scores like Sigma's.

    The squared distance between what the best taps and the attention add to the residual stream, as a share of the
    squares of the stream before the block.  All blocks are measured in two passes over the images.

    Args:
      batches: as for `fit`.
      kind: "dw" or "conv".

    Raises:
      ValueError: another kind, images as `fit` refuses them, or a model with tokens before the patches, blocks that are
        replaced already, or only some of whose blocks are equivariant.
    """
    errors.one_of("damage: kind", kind, BY_HEAD)
    config = model.config
    if config.prefix or config.replaced or 0 < config.k < config.depth:
        raise ValueError(
            f"damage: needs blocks of one sort, all with attention, on patches alone; this model has {config.prefix} "
            f"tokens before the patches, {len(config.replaced)} replaced and {config.k} of {config.depth} equivariant "
            "blocks.  Measure it before blocks are replaced, and take patches_only(model)."
        )
    found = streamed(functools.partial(_all_equations, kind, kernel_size), batches, model)
    new = replace_attention(model.blocks[0].attention, kind, kernel_size=kernel_size)
    taps = [_in_place(new, Equations(*parts).solved(RIDGE, scaled=True)) for parts in zip(*found, strict=True)]
    taps = np.stack(taps).astype(new.taps.dtype)
    return np.divide(*streamed(functools.partial(_all_distances, kind, kernel_size), batches, model, taps))


# ---- One block


def _check(new: Any, method: str, refit: bool) -> None:
    """ValueError for what a replacement cannot do."""
    if method == "least_squares" and new.kind == "spvit":
        raise ValueError("fit: the outputs of kind='spvit' are not linear in its taps; take method='normal'.")
    if method == "projection" and new.kind not in BY_HEAD:
        other = "normal" if new.kind == "spvit" else "least_squares"
        raise ValueError(f"fit: kind={new.kind!r} has no taps of each head to project; take method={other!r}.")
    if refit and (new.kind not in BY_HEAD or isinstance(new, IsotypicReplacedAttention)):
        raise ValueError("fit: refit=True is for the kinds 'dw' and 'conv' of dense blocks; take refit=False.")


def _sums(model: ViT, index: int, batches: Iterable[Any], function: Callable, new: Any) -> Any:
    """The sum over all images of `function(attention, new, x, layout, weight)`, x being the inputs of the attention."""
    return streamed(functools.partial(_step, function, index), batches, model, new)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(function, index, model, new, images, weight):
    x, layout = model.embed(images)
    x, _ = model.trunk(x, layout, stop=index)
    block = model.blocks[index]
    return function(block.attention, new, block.norm1(x), layout, weight)


def _fitted(new: Any, attention: Any, sums: Callable, ridge: float) -> Any:
    """The replacement with the taps of least squares."""
    if new.kind != "ens_dw":
        return _with(new, taps=_in_place(new, sums(equations.channels, new).solved(ridge, scaled=True)))
    by_channel = replace_attention(attention, "dw", kernel_size=new.kernel_size)
    new = _with(new, gamma=_gamma(sums(equations.channels, by_channel), new.num_heads, ridge))
    return _with(new, taps=sums(equations.ensemble, new).solved(ridge, scaled=True).reshape(new.taps.shape))


def _in_place(new: Any, solutions: np.ndarray) -> np.ndarray:
    """Solutions [n, k k] as the replacement has its taps: conv [n, k, k], dw [k, k, n]."""
    taps = solutions.reshape(-1, new.kernel_size, new.kernel_size)
    return taps if new.kind == "conv" else np.moveaxis(taps, 0, -1)


def _projected(new: Any, taps: Any, images: np.ndarray) -> np.ndarray:
    """The taps of the heads [H, k, k], summed over images, as the replacement has them."""
    taps = taps[list(getattr(new, "heads", range(new.num_heads)))] / images
    if isinstance(new, IsotypicReplacedAttention):  # the same for the channels of all group elements
        group = FLIP if new.value.planes is None else OCTIC
        taps = np.mean([fields.act_on_grid(g, taps, (1, 2)) for g in group.elements], axis=0)
    channels = new.taps.shape[-1] // len(taps)
    return taps if new.kind == "conv" else np.repeat(np.moveaxis(taps, 0, -1), channels, axis=-1)


def _gamma(found: Equations, num_heads: int, ridge: float) -> np.ndarray:
    """Logits [H] that give SHARE to the head whose own taps leave the least of its output."""
    left = found.energy - (found.moment * found.solved(ridge, scaled=True)).sum(-1)
    left, energy = (a.reshape(num_heads, -1).sum(-1) for a in (left, found.energy))
    others = max(num_heads - 1, 1)
    return np.where(np.arange(num_heads) == np.argmin(left / energy), np.log(SHARE / (1 - SHARE) * others), 0.0)


def _with(module: Any, **tensors: np.ndarray) -> Any:
    """A copy of a module with some of its tensors."""
    old = logical.to_logical(module, nnx.Variable)
    new = {name: np.asarray(tensor, old[name].dtype) for name, tensor in tensors.items()}
    return logical.from_logical(module, old | new, nnx.Variable)


# ---- All blocks


@functools.partial(jax.jit, static_argnums=(0, 1))
def _all_equations(kind, kernel_size, model, images, weight):
    def collect(block, x, layout):
        new = replace_attention(block.attention, kind, kernel_size=kernel_size)
        return equations.channels(block.attention, new, block.norm1(x), layout, weight)

    return tuple(model.collected(images, collect))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _all_distances(kind, kernel_size, model, taps, images, weight):
    """Two sums of squares for each block, [depth]: of what changes, and of the stream before the block."""

    def fold(sums, index, block, x, layout):
        new = replace_attention(block.attention, kind, kernel_size=kernel_size)
        new.taps.set_value(taps[index])
        y = block.norm1(x)
        change = jax.tree.map(jnp.subtract, *(block.scale1(module(y, layout)) for module in (new, block.attention)))
        parts = equations.squares(change, weight), equations.squares(x, weight)
        return tuple(a.at[index].set(part) for a, part in zip(sums, parts, strict=True))

    return model.folded(images, fold, (jnp.zeros(model.config.depth), jnp.zeros(model.config.depth)))
