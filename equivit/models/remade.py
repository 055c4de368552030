"""A model under another configuration: the same logical tensors, and a report of what became of them."""

import dataclasses

import jax
from flax import nnx

from equivit import errors, logical
from equivit.models.model import Config

SHOWN = 4  # names in one note


def remade(model: nnx.Module, *, rngs: nnx.Rngs | None = None, **fields) -> tuple[nnx.Module, list[str]]:
    """The model with some fields of its configuration replaced; see `fitted`.

    Raises:
      ValueError: an unknown field, values that do not go together, or tensors of another shape.
    """
    known = [field.name for field in dataclasses.fields(model.config)]
    for name in fields:
        errors.one_of("remade: field", name, known)
    return fitted(model, dataclasses.replace(model.config, **fields), rngs=rngs)


def fitted(model: nnx.Module, config: Config, *, rngs: nnx.Rngs | None = None) -> tuple[nnx.Module, list[str]]:
    """A model of `config` with the tensors of `model`, by their logical names.

    Positions are resized to the grid of `config`.  A head of another shape is drawn anew, and so is what `model` does
    not have; what `config` has no place for is dropped.

    Args:
      rngs: draws what is new; seed 0 if None.

    Returns:
      The model, and a note on each kind of change: "drawn: head.weight, head.bias".  No notes: all was kept.

    Raises:
      ValueError: tensors of the same name and another shape, such as those of another width.
    """
    rngs = nnx.Rngs(params=0) if rngs is None else rngs
    new = jax.eval_shape(lambda: config.build(nnx.Rngs(params=0)))
    wanted = {name: t.shape for name, t in jax.eval_shape(lambda m: logical.to_logical(m, nnx.Variable), new).items()}
    tensors = logical.to_logical(model, nnx.Variable)
    resized = _resized(model, new)
    tensors |= {name: tensor for name, tensor in resized.items() if tensor.shape == wanted.get(name)}
    found = {name for name, tensor in tensors.items() if tensor.shape == wanted.get(name)}
    drawn = {name for name in wanted if name not in tensors or (_of_head(name) and name not in found)}
    if wrong := sorted(wanted.keys() - found - drawn):
        lines = [f"{name} is {list(tensors[name].shape)} and should be {list(wanted[name])}" for name in wrong]
        raise ValueError(f"{len(wrong)} tensors do not fit the configuration: {_some(lines)}.")
    fresh = _drawn(config, rngs, drawn) if drawn else {}
    kept = {name: tensors[name] for name in found - drawn}
    notes = [
        *([f"resized: {_some(sorted(resized))}"] if resized else []),
        *([f"drawn: {_some(sorted(drawn))}"] if drawn else []),
        *([f"dropped: {_some(dropped)}"] if (dropped := sorted(tensors.keys() - wanted.keys())) else []),
    ]
    return logical.from_logical(new, kept | fresh, nnx.Variable), notes


def _of_head(name: str) -> bool:
    return name.startswith("head.")


def _resized(model, new) -> dict[str, jax.Array]:
    """Positions, by logical name, for the grid of `new` where that is another."""
    theirs = {path: module for path, module in nnx.iter_modules(new) if hasattr(module, "tables")}
    result = {}
    for path, module in nnx.iter_modules(model):
        if path in theirs and module.grid != theirs[path].grid:
            table = logical.put(module, module.tables(theirs[path].grid))
            prefix = ".".join(map(str, path))
            result |= {f"{prefix}.{name}": tensor for name, tensor in logical.to_logical(table).items()}
    return result


def _drawn(config, rngs, names) -> dict[str, jax.Array]:
    """New tensors; under jit, so that the rest of the model is never drawn."""

    @jax.jit
    def draw(key):
        tensors = logical.to_logical(config.build(nnx.Rngs(params=key)), nnx.Variable)
        return {name: tensors[name] for name in names}

    return draw(rngs.params())


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
