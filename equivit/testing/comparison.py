"""Comparison of outputs, with error messages."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.models.features import Grid
from equivit.symmetry.fields import Isotypic


def size_of(where: str, output: Any) -> float:
    """The largest entry of an output, the scale for deviations; AssertionError if it is zero or not finite."""
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(output)):
        raise AssertionError(
            f"{where}: the output is not finite, so it equals nothing; jax.config.update('jax_debug_nans', True) stops "
            "where a NaN comes from."
        )
    inexact = [leaf for leaf in jax.tree.leaves(output) if _tolerance(leaf)]  # labels do not set the scale
    if not (size := _largest(inexact or output)):
        raise AssertionError(f"{where}: the output is zero, which proves nothing; use random parameters.")
    return size


def compare(what: str, pairs: dict[str, tuple[Any, Any]], size: float, tol: float | None) -> float:
    """The largest deviation of named pairs, relative to `size`; AssertionError if one exceeds its tolerance."""
    worst = 0.0
    for part, (a, b) in pairs.items():
        name, allowed = f"{what}: {part}", _tolerance(b) if tol is None else tol
        chex.assert_equal_shape((a, b), custom_message=f"{name} has a different shape.")
        gap = _largest(_wide(a) - _wide(b)) / size
        try:
            if allowed:
                chex.assert_trees_all_close(_wide(a), _wide(b), rtol=0, atol=allowed * size)
            else:  # no cast: float32 merges large integers
                chex.assert_trees_all_equal(a, b)
        except AssertionError as error:  # which shows the wrong entries
            raise AssertionError(f"{name} deviates by {gap:.2e} (relative; tol={allowed:.0e}).") from error
        worst = max(worst, gap)
    return worst


def leaves(y: Any, expected: Any) -> dict[str, tuple[Any, Any]]:
    """Pairs of arrays from two trees, by name for errors."""
    pairs = zip(jax.tree.leaves(y), jax.tree.leaves(expected), strict=True)
    return {"the output" if k == 0 else f"output {k}": pair for k, pair in enumerate(pairs)}


def check_structure(what: str, y: Any, expected: Any) -> None:
    """AssertionError unless two trees have the same structure."""
    found, wanted = jax.tree.structure(y), jax.tree.structure(expected)
    if found != wanted:
        raise AssertionError(f"{what}: the output has the structure {found}, not {wanted}.")


def check_tolerance(where: str, tol: Any) -> None:
    """ValueError unless a tolerance is None or a finite number, zero or more."""
    if tol is None or (
        isinstance(tol, int | float | np.floating | np.integer) and not isinstance(tol, bool) and 0 <= tol < math.inf
    ):
        return
    raise ValueError(f"{where}: tol={errors.shown(tol)} must be a finite number, zero or more, such as 1e-5, or None.")


def check_arrays(where: str, value: Any) -> None:
    """ValueError unless a value is an array or holds only arrays; `where` begins the message."""
    every = jax.tree.leaves(value)
    if not every or not all(map(is_array, every)):
        wrong = next((leaf for leaf in every if not is_array(leaf)), value)
        raise ValueError(f"{where} an array, or arrays in a tuple or dict; there is {named(wrong)}.")


def check_images(where: str, value: Any) -> None:
    """ValueError unless a value is an array of images."""
    if not is_array(value) or value.ndim < 3:
        raise ValueError(f"{where} an array of images [*B, H, W, C]; it is {named(value)}.")


def check_not_empty(where: str, value: Any) -> None:
    """ValueError for arrays without entries."""
    if not sum(leaf.size for leaf in jax.tree.leaves(value)):
        raise ValueError(f"{where} not empty, which shows nothing; it is {named(value)}.")


def is_array(value: Any) -> bool:
    """Whether a value is an array of JAX or numpy."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def named(value: Any) -> str:
    """A description of a value, for an error."""
    if is_array(value):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Isotypic):
        return f"a field of {value.group.name}, {list(value.shape)}"
    if isinstance(value, Grid):
        return f"a Grid of values {list(value.values.shape)}, stride {value.stride}, offset {named(value.offset)}"
    return repr(value)[:60] if value is None or value == () else f"{type(value).__name__} {repr(value)[:60]}"


def _largest(tree) -> float:
    return max((float(np.abs(leaf).max()) for leaf in jax.tree.leaves(_wide(tree)) if leaf.size), default=0.0)


def _wide(tree):
    """Cast on the host to at least float32, and integers to float64, which keeps large integers distinct."""

    def wide(leaf):
        return np.asarray(leaf).astype(jnp.promote_types(leaf.dtype, jnp.float32) if _tolerance(leaf) else np.float64)

    return jax.tree.map(wide, tree)


def _tolerance(leaf) -> float:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return 0.0
    return {64: 1e-10, 32: 1e-5}.get(jnp.finfo(leaf.dtype).bits, 5e-2)
