"""Frozen parameters: logical tensors that the objective or `optimizer.freeze` excludes from training.

`optimizer.freeze` holds shell patterns of logical names.  The last matching pattern decides; a leading "!" makes the
tensor trainable again.  "{replaced}" expands to each block of `model.replaced`, "{positions}" to each tensor of the
learned positions, which some models lack, "{first_6}" to each tensor before block 6, of any model:

    patch_embed.*,blocks.[0-5].*            the patches and the first six blocks
    *,!head.*                               all but the head
    *,!*blocks.{replaced}.attention.*       all but the modules that replace attention, a segmenter's too
    {positions}                             the positions
    {first_6}                               the patches, positions and tokens, and the first six blocks

A frozen tensor has no update and no decay, and its gradient is in no norm; running statistics still change.  A leaf
that is frozen as a whole has no moments; the frozen slices of any other have moments of zero.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.logical import Tensor
from equivit.models.vit.replaced import as_replaced
from equivit.objectives.objective import Objective, Rule

REPLACED, POSITIONS, FIRST = "{replaced}", "{positions}", re.compile(r"\{first_(\d+)\}")


def rule(objective: Objective, tables: Mapping[str, np.ndarray]) -> Callable[[Tensor], Rule]:
    """Combine the objective's rule for each logical tensor with `optimizer.freeze`.

    Args:
      tables: the logical tensors of each leaf of the module (`logical.tensors`).

    Raises:
      ValueError: a pattern matches no tensor, nothing is left to train, or "{replaced}" without replaced blocks.
    """
    if not (given := tuple(objective.config.optimizer.freeze)):
        return objective.rule
    tensors = [tensor for table in tables.values() for tensor in table.flat]
    names = [tensor.name for tensor in tensors]
    patterns = [name for pattern in given for name in _first_blocks(pattern, tensors)]
    frozen = set()
    for pattern in _expanded(patterns, objective.config, names):
        matched = matching("optimizer.freeze", pattern.removeprefix("!"), names)
        frozen = frozen - matched if pattern.startswith("!") else frozen | matched

    def combined(tensor):
        usual = objective.rule(tensor)
        return usual._replace(frozen=usual.frozen or tensor.name in frozen)

    if all(combined(tensor).frozen for table in tables.values() for tensor in table.flat):
        raise ValueError(f"optimizer.freeze={given} leaves nothing to train; except some, as in '*,!head.*'.")
    return combined


def _first_blocks(pattern: str, tensors: Iterable[Tensor]) -> list[str]:
    """The names of the tensors before a block if the pattern is "{first_6}", else the pattern."""
    if not (match := FIRST.fullmatch(pattern.removeprefix("!"))):
        return [pattern]
    tensors, number = [tensor for tensor in tensors if tensor.layers], int(match[1])
    blocks = max((tensor.last for tensor in tensors), default=1) - 1
    if number > blocks:
        raise ValueError(f"optimizer.freeze={pattern!r}: the model has {blocks} blocks; give at most {blocks}.")
    return ["!" * pattern.startswith("!") + tensor.name for tensor in tensors if max(tensor.layers) <= number]


def _expanded(patterns: Iterable[str], config: ConfigDict, names: Iterable[str]) -> list[str]:
    """The patterns with "{replaced}" once for every replaced block, and "{positions}" once for every position."""
    positions = [name for name in names if re.fullmatch(r"((?!stages|blocks)\w+\.)*position\.\w+", name)]
    patterns = [p.replace(POSITIONS, name) for p in patterns for name in (positions if POSITIONS in p else [""])]
    if not any(REPLACED in pattern for pattern in patterns):
        return patterns
    blocks = [str(entry.block) for entry in as_replaced("config.model", config.model.get("replaced", ()))]
    if not blocks:
        raise ValueError(
            f"optimizer.freeze={tuple(patterns)}: no block of {config.model.name} is replaced; say which are by "
            "model.replaced."
        )
    return [p.replace(REPLACED, number) for p in patterns for number in (blocks if REPLACED in p else [""])]


def matching(key: str, pattern: str, names: Iterable[str]) -> set[str]:
    """The names that match a shell pattern.  ValueError with the nearest names if none does."""
    names = list(names)
    if found := {name for name in names if fnmatch.fnmatchcase(name, pattern)}:
        return found
    general = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)  # one name for all blocks
    parts = (name.split(".") for name in general)
    known = dict.fromkeys([*general, *(".".join([*part[:n], "*"]) for part in parts for n in range(1, len(part)))])
    near = errors.near(re.sub(r"\.\d+\.", ".*.", pattern), known, 3)
    such = f"near are {errors.listed(map(repr, near))}" if near else f"there are such as {names[0]!r}"
    raise ValueError(f"{key}: {pattern!r} matches no parameter; {such}.")


def masks(
    rule: Callable[[Tensor], Rule], tables: Mapping[str, np.ndarray], leaves: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Masks of the trained slices of leaves with frozen ones, shaped to broadcast against the leaf."""
    found = {k: logical.per_tensor(tables[k], a, lambda tensor: not rule(tensor).frozen) for k, a in leaves.items()}
    return {k: trained for k, trained in found.items() if not trained.all()}


def masked(tree: Any, masks: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Set frozen slices to zero, NaN included."""
    return {k: jnp.where(masks[k], a, 0) if k in masks else a for k, a in tree.items()}


def summary(objective: Objective, module: nnx.Module) -> str:
    """A line for the start of a run: "25,307,136 of 284,393,043 parameters are trained." """
    tables = logical.tensors(module)
    trains = rule(objective, tables)
    sizes = [(math.prod(t.shape), trains(t).frozen) for table in tables.values() for t in table.flat]
    total, still = sum(size for size, _ in sizes), sum(size for size, frozen in sizes if frozen)
    count = f"{total - still:,} of" if still else "All"
    return f"{count} {total:,} parameters are trained."
