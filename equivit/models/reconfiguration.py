"""Rebuild a model with another configuration from the same logical tensors, and report the changes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from equivit import errors, logical
from equivit.layers.position import Position
from equivit.layers.rngs import Keys
from equivit.models.model import Config, ModelModule, abstract_model, rngs_of

HEADS = ("head.", "decoder.logits.", "auxiliary.logits.")  # the last two are a segmenter's
SHOWN = 4  # names listed in each part of a report


class Changes(NamedTuple):
    """The names of the logical tensors that a new configuration changes; all others are kept.

    Attributes:
      resized: positions resized to another grid, or converted to another kind of distances or another family.
      drawn: new tensors, and heads of another shape, initialised at random.
      dropped: tensors that the new model lacks.
    """

    resized: tuple[str, ...]
    drawn: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        return _report(self) or "all kept"


class RebuildReport(NamedTuple):
    """The names of the tensors that `rebuild` kept as they are, and its `Changes`."""

    kept: tuple[str, ...]
    resized: tuple[str, ...]
    drawn: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        return _report(self)


def reconfigure(model: ModelModule, *, rngs: nnx.Rngs | None = None, **fields) -> tuple[ModelModule, Changes]:
    """Replace fields of a model's configuration; return the new model and the changes to its tensors.

        model, changes = reconfigure(model, class_token=False, pool="mean", num_classes=10)

    Positions are resized to the new grid, antialiased if the old or the new configuration has `position_antialias`, and
    with the `position_offset` of the new one.  Heads of another shape, also a segmenter's, and tensors that the old
    model lacks are initialised at random.  Tensors that the new model lacks are dropped.  The new model stays in
    training or evaluation, as `train()` or `eval()` left the old one.

    Args:
      rngs: initialises new tensors; seed 0 if None.

    Raises:
      ValueError: not a model with arrays, an unknown field, incompatible values, or a tensor whose shape changes, for
        example with the width.
    """
    return _built("reconfigure", model, fields, rngs, draw=False)


def rebuild(model: ModelModule, *, rngs: nnx.Rngs | None = None, **fields) -> tuple[ModelModule, RebuildReport]:
    """As `reconfigure`, for another family, width or depth: keep the tensors that fit, and draw all others.

        model, report = rebuild(model, family="H8", rngs=nnx.Rngs(0))
        print(report)   # kept: blocks.10.attention.proj.bias, ... and 84 more; resized: ...; drawn: ...; dropped: ...

    A plain ViT made H8 keeps its dense blocks and its head.  Of the positions it keeps the part that the group leaves
    unchanged; from an equivariant to a plain family, they are kept whole.  The default of `invariant`
    follows the family.

    Args:
      rngs: initialises the tensors that do not fit; seed 0 if None.

    Raises:
      ValueError: an unknown field, or incompatible values.
    """
    new, changes = _built("rebuild", model, fields, rngs, draw=True)
    names = {str(name) for table in logical.names(new, nnx.Variable).values() for name in table.flat}
    return new, RebuildReport(tuple(sorted(names - {*changes.resized, *changes.drawn})), *changes)


def _built(name: str, model: ModelModule, fields: dict[str, Any], rngs: nnx.Rngs | None, *, draw: bool):
    """The model with some fields replaced, and the changes."""
    check_model(name, model)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        raise ValueError(
            f"{name}: this {type(model).__name__} has shapes instead of arrays; give a model of models.create, or call "
            f"{name} under jax.eval_shape."
        )
    old: Any = model.config
    known = [field.name for field in dataclasses.fields(old)]
    for field in fields:
        errors.one_of(f"{name}: field", field, known)
    if "family" in fields and "invariant" in known:
        chosen = dataclasses.replace(old, invariant=None).invariant
        if old.invariant == chosen:  # by the old family, so the new one chooses too
            fields = {"invariant": None, **fields}
    config = dataclasses.replace(old, **fields)
    tensors, changes = fitting_tensors(model, config, draw=draw)
    if changes.drawn:
        tensors |= _drawn(config, rngs_of(name, rngs), changes.drawn, _dtype(model))
    return switched_as(model, logical.from_logical(abstract_model(config), tensors, nnx.Variable)), changes


def check_model(name: str, model: Any) -> None:
    """Raise ValueError unless a value is a model."""
    if not hasattr(model, "config"):
        known = errors.shown(model) if isinstance(model, str) else "'swin_t'"
        raise ValueError(f"{name}: {errors.shown(model)} is not a model; give one, such as models.create({known}).")


def switched_as(old: Any, new: Any) -> Any:
    """`new` after the `train()` or `eval()` of `old`, if one was called."""
    if (evaluates := getattr(getattr(old, "encoder", old), "deterministic", None)) is not None:
        (new.eval if evaluates else new.train)()
    return new


def fitting_tensors(model: ModelModule, config: Config, *, draw: bool = False) -> tuple[dict[str, jax.Array], Changes]:
    """The logical tensors of `model` that fit a model of `config`, and the changes; as in `reconfigure`.

    Args:
      draw: draw the tensors that do not fit, as in `rebuild`, instead of raising an error.
    """
    new = abstract_model(config)
    tables = logical.tensors(new, nnx.Variable).values()
    wanted = {tensor.name: tensor.shape for table in tables for tensor in table.flat}
    tensors = logical.to_logical(model, nnx.Variable)
    resized = _resized(model, new)
    tensors |= resized
    drawn = {n for n in wanted if n not in tensors or (n.startswith(HEADS) and tensors[n].shape != wanted[n])}
    wrong = sorted(n for n in wanted.keys() - drawn if tensors[n].shape != wanted[n])
    if draw:
        drawn |= set(wrong)
    elif wrong:
        lines = [f"{name} is {list(tensors[name].shape)} and should be {list(wanted[name])}" for name in wrong]
        raise ValueError(f"{len(wrong)} parameters do not fit: {_some(lines, '; ')}.")
    changes = Changes(
        *(tuple(sorted(names)) for names in (resized.keys() & wanted.keys(), drawn, tensors.keys() - wanted.keys()))
    )
    return {name: tensors[name] for name in wanted.keys() - drawn}, changes


def _resized(model: ModelModule, new: ModelModule) -> dict[str, jax.Array]:
    """Positions resized to the grids of `new`, by logical name, where the grid differs."""
    theirs: dict[Any, Any] = {path: module for path, module in nnx.iter_modules(new) if hasattr(module, "tables")}
    leaves, names = {}, logical.names(new) | logical.names(model)
    ours: dict[Any, Any] = dict(nnx.iter_modules(model))
    for path, module in ours.items():
        if path in theirs:
            tables = _tables(module, theirs[path])
            leaves |= {".".join(map(str, (*path, name))): table for name, table in tables.items()}
    return {str(names[leaf][i]): leaves[leaf][i] for leaf in leaves for i in np.ndindex(names[leaf].shape)}


def _tables(module: Any, new: Any) -> dict[str, jax.Array]:
    """The position tables converted for `new`, if they change; a module in a stack has one table per block."""
    if type(module) is not type(new) and hasattr(new, "taken"):
        return new.taken(module)
    if module.grid == new.grid:
        return {}
    # The offset applies to sizes other than the model's, so the new configuration decides.
    both = isinstance(module, Position) and isinstance(new, Position)
    return module.tables(new.grid, new.offset, antialias=new.antialias) if both else module.tables(new.grid)


def _drawn(config: Config, rngs: nnx.Rngs, names: tuple[str, ...], dtype: Any) -> dict[str, jax.Array]:
    """The tensors `names`, initialised under jit, which leaves out the rest of the model; parameters in `dtype`."""

    @jax.jit
    def draw(key):
        model = config.build(Keys(key))
        tensors = logical.to_logical(model, nnx.Variable)
        tensors |= {name: tensor.astype(dtype) for name, tensor in logical.to_logical(model).items()}
        return {name: tensors[name] for name in names}

    return draw(rngs.params())


def _dtype(model: ModelModule) -> Any:
    """The type of the parameters; float32 if there are several."""
    found = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))}
    return found.pop() if len(found) == 1 else np.dtype("float32")


def _report(parts: NamedTuple) -> str:
    return "; ".join(f"{word}: {_some(names)}" for word, names in zip(parts._fields, parts, strict=True) if names)


def _some(names, comma: str = ", ") -> str:
    return comma.join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
