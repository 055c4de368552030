"""Initialise convolution taps from the attention they replace, and rank blocks by the error this causes.

The attention of a head is a matrix E(x), tokens by tokens, applied to its values V.  Two methods approximate it:

- "projection": the convolution nearest to E on average over images, the diagonal averages of E's mean;
- "least_squares": the convolution whose outputs are nearest to E V, which also depends on the values.

`fit` replaces blocks from first to last, each in the model with all earlier blocks replaced.  `damage` replaces each
block alone; its scores rank blocks as Sigma does.  The paper uses random taps and Sigma; both methods here are ours.
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
from equivit.depthwise.equations import Equations, streamed
from equivit.layers.depthwise import BY_HEAD, IsotypicReplacedAttention, replace_attention
from equivit.layers.rngs import Keys
from equivit.models.vit.model import ViT
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

METHODS = ("normal", "projection", "least_squares")
RIDGE = 1e-4  # of the mean of the diagonal
SHARE = 0.9  # weight of the best head in an ensemble


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
    """Replace attention and fit the taps; return the model and the relative error of each replacement by block.

    The error is the squared distance between the outputs of replacement and attention for the same inputs, divided by
    the squared norm of the attention's outputs.

    Args:
      where: the heads to replace by block; None for all.
      batches: images [B, H, W, C], normalised for the model and all of one size; the first batch is the largest.  They
        are iterated several times.  Under a mesh, only the rows of this process.
      kind: of the replacement.  "ens_dw" starts with a weight of 0.9 on the head whose separate fit is best, and fits
        the taps to the output of the module.
      method: "normal" (random taps), "projection" (of "dw" and "conv") or "least_squares" (of all but "spvit").
      refit: also fit the output projection, for "dw" and "conv" of dense blocks.
      ridge: ridge of all fits, relative to the mean of the diagonal.
      rngs: draws normal taps; seed 0 if None.

    Raises ValueError for an unknown method, a method that the kind or the model does not support, no images, images
    that differ in size, a batch larger than the first, or as in `replacement.replace`.
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
            weight, bias = sums(equations.outputs, new).solved(ridge)
            new = _with(new, **{"proj.weight": weight, "proj.bias": bias})
        found[index] = float(np.divide(*sums(equations.distances, new)))
        tensors = {f"blocks.{index}.attention.{name}": t for name, t in logical.to_logical(new, nnx.Variable).items()}
        result = logical.from_logical(after, logical.to_logical(after, nnx.Variable) | tensors, nnx.Variable)
    return result, found


def damage(model: ViT, batches: Iterable[Any], *, kind: str = "dw", kernel_size: int = 3) -> np.ndarray:
    """The error caused by replacing each block alone: [depth], scores to rank blocks like Sigma's.

    The error is the squared distance between the branch with the best taps and the attention branch, divided by the
    squared norm of the residual stream before the block.  Two passes over the images measure all blocks.
    The kind is "dw" or "conv", the batches are as for `fit`.

    Raises ValueError for another kind, images that `fit` rejects, or a model with tokens before the patches, with
    replaced blocks, or with both equivariant and dense blocks.
    """
    errors.one_of("damage: kind", kind, BY_HEAD)
    config = model.config
    if config.prefix or config.replaced or 0 < config.k < config.depth:
        raise ValueError(
            "damage: needs blocks of one kind, all with attention, and only patch tokens; this model has "
            f"{config.prefix} tokens before the patches, {len(config.replaced)} replaced and {config.k} of "
            f"{config.depth} equivariant blocks.  Measure it before blocks are replaced, and take patches_only(model)."
        )
    found = streamed(functools.partial(_all_equations, kind, kernel_size), batches, model)
    new = replace_attention(model.blocks[0].attention, kind, kernel_size=kernel_size)
    taps = [_as_taps(new, Equations(*parts).solved(RIDGE)) for parts in zip(*found, strict=True)]
    taps = np.stack(taps).astype(new.taps.dtype)
    return np.divide(*streamed(functools.partial(_all_distances, kind, kernel_size), batches, model, taps))


# ---- One block


def _check(new: Any, method: str, refit: bool) -> None:
    """Raise ValueError for a method that the replacement does not support."""
    if method == "least_squares" and new.kind == "spvit":
        raise ValueError("fit: the outputs of kind='spvit' are not linear in its taps; take method='normal'.")
    if method == "projection" and new.kind not in BY_HEAD:
        other = "normal" if new.kind == "spvit" else "least_squares"
        raise ValueError(f"fit: kind={new.kind!r} has no taps per head to project; take method={other!r}.")
    if refit and (new.kind not in BY_HEAD or isinstance(new, IsotypicReplacedAttention)):
        raise ValueError("fit: refit=True is for the kinds 'dw' and 'conv' of dense blocks; take refit=False.")


def _sums(model: ViT, index: int, batches: Iterable[Any], function: Callable, new: Any) -> Any:
    """The sum over all images of `function(attention, new, x, layout, weight)`; x are the inputs of the attention."""
    return streamed(functools.partial(_step, function, index), batches, model, new)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(function, index, model, new, images, weight):
    x, layout = model.embed(images)
    x, _ = model.trunk(x, layout, stop=index)
    block = model.blocks[index]
    return function(block.attention, new, block.norm1(x), layout, weight)


def _fitted(new: Any, attention: Any, sums: Callable, ridge: float) -> Any:
    """The replacement with least-squares taps."""
    if new.kind != "ens_dw":
        return _with(new, taps=_as_taps(new, sums(equations.channels, new).solved(ridge)))
    by_channel = replace_attention(attention, "dw", kernel_size=new.kernel_size)
    new = _with(new, gamma=_gamma(sums(equations.channels, by_channel), new.num_heads, ridge))
    return _with(new, taps=sums(equations.ensemble, new).solved(ridge).reshape(new.taps.shape))


def _as_taps(new: Any, solutions: np.ndarray) -> np.ndarray:
    """Solutions [n, k k] in the layout of the taps: conv [n, k, k], dw [k, k, n]."""
    taps = solutions.reshape(-1, new.kernel_size, new.kernel_size)
    return taps if new.kind == "conv" else np.moveaxis(taps, 0, -1)


def _projected(new: Any, taps: Any, images: np.ndarray) -> np.ndarray:
    """The mean over images of the taps of heads [H, k, k], in the layout of the replacement."""
    taps = taps[list(getattr(new, "heads", range(new.num_heads)))] / images
    if isinstance(new, IsotypicReplacedAttention):  # the channels of all group elements share their taps
        group = FLIP if new.value.planes is None else OCTIC
        taps = np.mean([fields.act_on_grid(g, taps, (1, 2)) for g in group.elements], axis=0)
    channels = new.taps.shape[-1] // len(taps)
    return taps if new.kind == "conv" else np.repeat(np.moveaxis(taps, 0, -1), channels, axis=-1)


def _gamma(found: Equations, num_heads: int, ridge: float) -> np.ndarray:
    """Logits [H] that give SHARE to the head with the smallest relative error of its own taps."""
    left = found.energy - (found.moment * found.solved(ridge)).sum(-1)
    left, energy = (a.reshape(num_heads, -1).sum(-1) for a in (left, found.energy))
    others = max(num_heads - 1, 1)
    return np.where(np.arange(num_heads) == np.argmin(left / energy), np.log(SHARE / (1 - SHARE) * others), 0.0)


def _with(module: Any, **tensors: np.ndarray) -> Any:
    """A copy of a module with some tensors replaced."""
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
    """For each block, the sums of squares of the change of its branch and of the stream before it: [depth] each."""

    def fold(sums, index, block, x, layout):
        new = replace_attention(block.attention, kind, kernel_size=kernel_size)
        new.taps.set_value(taps[index])
        y = block.norm1(x)
        change = jax.tree.map(jnp.subtract, *(block.scale1(module(y, layout)) for module in (new, block.attention)))
        parts = equations.squares(change, weight), equations.squares(x, weight)
        return tuple(a.at[index].set(part) for a, part in zip(sums, parts, strict=True))

    return model.folded(images, fold, (jnp.zeros(model.config.depth), jnp.zeros(model.config.depth)))
