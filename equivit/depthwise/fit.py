"""Start convolution taps from the attention they replace, and rank blocks by the error this causes.

The attention of a head is a matrix E(x), tokens by tokens, applied to its values V.  Two starts approximate it:

- "projection": the convolution nearest to E on average over images, the diagonal averages of E's mean;
- "least_squares": the convolution whose outputs are nearest to E V, which also depends on the values.

`fit` replaces blocks from first to last, each in the model with all earlier blocks replaced.  `damage` replaces each
block alone; its scores rank blocks as Sigma does.  Both starts and this score are ours, not of the paper.
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
from equivit.layers import taps
from equivit.layers.depthwise import BY_HEAD, KINDS, TEMPERATURES, IsotypicReplacedAttention, replace_attention
from equivit.models.model import rngs_of
from equivit.models.vit.model import ViT
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

STARTS = (*taps.STARTS, "projection", "least_squares")
# Starts that are fitted to the attention, by kind; the nearest one first.
FITTED = dict.fromkeys(BY_HEAD, ("least_squares", "projection")) | {"ens_dw": ("least_squares",)}
RIDGE = 1e-4  # of the mean of the diagonal
SHARE = 0.9  # weight of the best head in an ensemble


def fit(
    model: ViT,
    where: Mapping[int, tuple[int, ...] | None],
    batches: Iterable[Any],
    *,
    kind: str = "dw",
    form: str = "released",
    start: str | None = "least_squares",
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
      form: of the replacement.
      start: "projection" (of "dw" and "conv"), "least_squares" (of these and "ens_dw"), one of `taps.STARTS`, or None
        for the start of the form.
      refit: also fit the output projection, for "dw" and "conv" of dense blocks.
      ridge: ridge of all fits, relative to the mean of the diagonal.
      rngs: draws taps; seed 0 if None.

    Raises ValueError for an unknown start, a start that the kind or the model does not support, no images, images that
    differ in size, a batch larger than the first, or as in `replacement.replace`.
    """
    check_start("fit", start, kind)
    result: Any = model
    where = {one.block: one.heads for one in replacement.entries("fit", where, kind, kernel_size, form)}
    found, rngs = {}, rngs_of("fit", rngs)
    drawn = start if start in taps.STARTS else None
    for index in where:
        options: dict[str, Any] = dict(kind=kind, form=form, kernel_size=kernel_size, start=drawn, rngs=rngs)
        after: Any = replacement.replace(result, {index: where[index]}, **options)
        new = after.blocks[index].attention
        _check_refit(new, refit)
        sums = functools.partial(_sums, result, index, batches)
        if start == "projection":
            new = _with(new, taps=_projected(new, *sums(equations.projections, new)))
        elif start == "least_squares":
            new = _fitted(new, result.blocks[index].attention, sums, ridge)
        if refit:
            weight, bias = sums(equations.outputs, new).solved(ridge)
            new = _with(new, **{"proj.weight": weight, "proj.bias": bias})
        found[index] = float(np.divide(*sums(equations.distances, new)))
        tensors = {f"blocks.{index}.attention.{name}": t for name, t in logical.to_logical(new, nnx.Variable).items()}
        result = logical.from_logical(after, logical.to_logical(after, nnx.Variable) | tensors, nnx.Variable)
    return result, found


def check_start(name: str, start: str | None, kind: str) -> None:
    """Raise ValueError for a start that is unknown, or not for the kind; `name` begins the message."""
    errors.one_of(f"{name}: kind", kind, KINDS)
    errors.one_of(f"{name}: start", start, (None, *STARTS))
    if start in taps.STARTS:
        taps.check_start(name, start, kind)
    elif start is not None and start not in FITTED.get(kind, ()):
        reasons = {"spvit": "whose outputs are not linear in its taps", "identity": "which has no taps"}
        reason, best = reasons.get(kind, "which has no taps for each head"), best_start(kind)
        omitted = " (in a command, leave --start out)" if best is None else ""
        raise ValueError(f"{name}: start={start!r} is not for kind={kind!r}, {reason}; take start={best!r}{omitted}.")


def best_start(kind: str) -> str | None:
    """The start that leaves a kind nearest to the attention; None, the start of the form, if none can be fitted."""
    return FITTED.get(kind, (None,))[0]


def damage(
    model: ViT, batches: Iterable[Any], *, kind: str = "dw", form: str = "released", kernel_size: int = 3
) -> np.ndarray:
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
    how = (kind, form, kernel_size)
    found = streamed(functools.partial(_all_equations, how), batches, model)
    new = _replaced(model.blocks[0], *how)
    fits = [_tensors(new, Equations(*parts).solved(RIDGE)) for parts in zip(*found, strict=True)]
    stacked = jax.tree.map(lambda *of_blocks: np.stack(of_blocks).astype(new.taps.dtype), *fits)
    return np.divide(*streamed(functools.partial(_all_distances, how), batches, model, stacked))


# ---- One block


def _check_refit(new: Any, refit: bool) -> None:
    if refit and (new.kind not in BY_HEAD or isinstance(new, IsotypicReplacedAttention)):
        raise ValueError("fit: refit=True is for the kinds 'dw' and 'conv' of dense blocks; take refit=False.")


def _sums(model: ViT, index: int, batches: Iterable[Any], function: Callable, new: Any) -> Any:
    """The sum over all images of `function(attention, new, x, layout, weight)`; x are the inputs of the attention."""
    return streamed(functools.partial(_step, function, index), batches, model, new)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(function, index, model, new, images, weight):
    x, layout = model.embed(images)
    x, _ = model.evaluated().trunk(x, layout, stop=index)
    block = model.blocks[index]
    return function(block.attention, new, block.norm1(x), layout, weight)


def _fitted(new: Any, attention: Any, sums: Callable, ridge: float) -> Any:
    """The replacement with least-squares taps."""
    if new.kind != "ens_dw":
        return _with(new, **_tensors(new, sums(equations.channels, new).solved(ridge)))
    by_channel = replace_attention(attention, "dw", form=new.form, kernel_size=new.kernel_size)
    logits = _logits(sums(equations.channels, by_channel), new.num_heads, ridge)
    new = _with(new, gamma=TEMPERATURES[new.form] * logits)
    solution = sums(equations.ensemble, new).solved(ridge).reshape(-1, new.taps.shape[-1])
    return _with(new, **_tensors(new, solution.T))


def _tensors(new: Any, solutions: np.ndarray) -> dict[str, np.ndarray]:
    """Solutions [n, k k], or [n, k k + 1] with a bias, in the layout of the tensors: conv [n, k, k], dw [k, k, n]."""
    size = new.kernel_size
    taps = solutions[:, : size**2].reshape(-1, size, size)
    found = {"taps": taps if new.kind == "conv" else np.moveaxis(taps, 0, -1)}
    return found if new.bias is None else found | {"bias": solutions[:, -1]}


def _projected(new: Any, filters: Any, images: np.ndarray) -> np.ndarray:
    """The mean over images of the taps of heads [H, k, k], in the layout of the replacement."""
    filters = filters[list(getattr(new, "heads", range(new.num_heads)))] / images
    if isinstance(new, IsotypicReplacedAttention):  # the channels of all group elements share their taps
        group = FLIP if new.value.planes is None else OCTIC
        filters = np.mean([fields.act_on_grid(g, filters, (1, 2)) for g in group.elements], axis=0)
    channels = new.taps.shape[-1] // len(filters)
    return filters if new.kind == "conv" else np.repeat(np.moveaxis(filters, 0, -1), channels, axis=-1)


def _logits(found: Equations, num_heads: int, ridge: float) -> np.ndarray:
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


def _replaced(block: Any, kind: str, form: str, kernel_size: int) -> Any:
    return replace_attention(block.attention, kind, form=form, kernel_size=kernel_size)


@functools.partial(jax.jit, static_argnums=0)
def _all_equations(how, model, images, weight):
    def collect(block, x, layout):
        new = _replaced(block, *how)
        return equations.channels(block.attention, new, block.norm1(x), layout, weight)

    return tuple(model.collected(images, collect))


@functools.partial(jax.jit, static_argnums=0)
def _all_distances(how, model, fits, images, weight):
    """For each block, the sums of squares of the change of its branch and of the stream before it: [depth] each."""

    def fold(sums, index, block, x, layout):
        new = logical.put(_replaced(block, *how), {name: array[index] for name, array in fits.items()})
        y = block.norm1(x)
        change = jax.tree.map(jnp.subtract, *(block.scale1(module(y, layout)) for module in (new, block.attention)))
        parts = equations.squares(change, weight), equations.squares(x, weight)
        return tuple(a.at[index].set(part) for a, part in zip(sums, parts, strict=True))

    return model.folded(images, fold, (jnp.zeros(model.config.depth), jnp.zeros(model.config.depth)))
