"""Public checks of symmetry, also for your own layers and models."""

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors, logical
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, Tokens
from equivit.symmetry.groups import Group


def assert_equivariant(
    fn: Callable,
    group: Group,
    x: Tokens,
    input: str = "image",
    output: str = "invariant",
    prefix: int = 0,
    tol: float | None = None,
    *,
    grid: tuple[int, int] | None = None,
    output_grid: tuple[int, int] | None = None,
) -> float:
    """Check fn(g x) = g fn(x) for every element g of `group`.

    Args:
      fn: the function to test.  Give it random parameters, biases included: zeros hide errors.
      x: images [*B, H, W, C], or a field.
      input: "image" or "field", how g acts on x.
      output: "invariant" (g does nothing), "image", or "field".
      prefix: number of class and register tokens in fields, which do not move.
      tol: largest allowed deviation, relative to the largest entry of the output; None: 1e-5 in float32, 1e-10 in
        float64, 5e-2 in bfloat16 and float16, and 0 for integers and booleans, which must agree exactly.
      grid: (h, w) of an input field's tokens.
      output_grid: (h, w) of an output field's tokens for the untransformed x; None: `grid`.

    Returns:
      The largest relative deviation.

    Raises:
      AssertionError: names the element, the irrep and the deviation; also when the output is zero or not finite.
      ValueError: an unknown kind of input or output, a missing grid, no group, or an x or a result of fn that is not of
        its kind.
    """
    _check_kinds(input, output, grid, output_grid)
    _check_group(group)
    _check_value("x", x, "input", input, group)
    upright, worst = fn(x), 0.0
    _check_value("fn(x)", upright, "output", output, group)
    # Everything but `fn` is computed by numpy: JAX would compile a program for each operation, element and shape.
    x, upright = jax.tree.map(np.asarray, (x, upright))
    chex.assert_tree_all_finite(upright)
    inexact = [leaf for leaf in jax.tree.leaves(upright) if _tolerance(leaf)]  # not measured by labels beside them
    if not (size := _largest(inexact or upright)):
        raise AssertionError("assert_equivariant: the output is zero, which proves nothing; use random parameters.")
    for g in group.elements:
        y = fn(jax.device_put(_act(g, x, input, grid, prefix)))
        expected = _act(g, upright, output, output_grid or grid, prefix)
        _check_structure(f"{group.name} element {g!r}", y, expected)
        for part, (a, b) in _parts(group, y, expected).items():
            what, allowed = f"{group.name} element {g!r}: {part}", _tolerance(b) if tol is None else tol
            chex.assert_equal_shape((a, b), custom_message=f"{what} has a different shape.")
            gap = _largest(_wide(a) - _wide(b)) / size
            try:
                if allowed:
                    chex.assert_trees_all_close(_wide(a), _wide(b), rtol=0, atol=allowed * size)
                else:  # as they are: float32 does not tell large integers apart
                    chex.assert_trees_all_equal(a, b)
            except AssertionError as error:  # its message shows the wrong entries
                raise AssertionError(f"{what} deviates by {gap:.2e} (relative; tol={allowed:.0e}).") from error
            worst = max(worst, gap)
    return worst


def randomise(module: nnx.Module, key: jax.Array) -> nnx.Module:
    """A copy with all parameters random, so that no zero hides an error.

    Scales are near 1, biases and tokens have standard deviation 1/2, matrices have unit gain.  Parameters keep their
    dtype.  The module may be abstract, as from `models.abstract`.
    """

    def draw(name, index, array):
        # By numpy: JAX would compile a program for each shape.
        noise = np.random.default_rng([*seed, index]).standard_normal(array.shape)
        if array.ndim >= 2:
            noise = noise * math.prod(array.shape[:-1]) ** -0.5
        elif "scale" in name or ("norm" in name and not name.endswith("bias")):
            noise = 1 + 0.2 * noise
        else:
            noise = 0.5 * noise
        return noise.astype(array.dtype)

    seed = jax.random.key_data(key).tolist()
    tensors = jax.eval_shape(logical.to_logical, module)
    return logical.from_logical(module, {n: draw(n, i, a) for i, (n, a) in enumerate(tensors.items())})


def _check_kinds(input: str, output: str, grid: tuple[int, int] | None, output_grid: tuple[int, int] | None) -> None:
    if input not in ("image", "field"):
        raise ValueError(f"assert_equivariant: {input=} must be 'image' or 'field'.")
    if output not in ("invariant", "image", "field"):
        raise ValueError(f"assert_equivariant: {output=} must be 'invariant', 'image' or 'field'.")
    if input == "field" and grid is None:
        raise ValueError("assert_equivariant: input='field' needs grid=(h, w), the token grid.")
    if output == "field" and grid is None and output_grid is None:
        raise ValueError("assert_equivariant: output='field' needs output_grid=(h, w), the token grid of fn(x).")


def _check_group(group):
    if not isinstance(group, Group):
        raise ValueError(
            f"assert_equivariant: {group=} must be a group, FLIP or OCTIC of equivit.symmetry.groups"
            f"{errors.nearest(str(group).upper(), ('FLIP', 'OCTIC'))}."
        )


def _check_value(what, value, role, kind, group):
    """ValueError unless a value is what its kind says: x and `input`, or what fn returned and `output`."""
    where = f"assert_equivariant: {role}={kind!r}, so {what} must be"
    if kind == "field":
        if not isinstance(value, Isotypic) or value.group is not group:
            raise ValueError(f"{where} a field of {group.name}, an Isotypic; it is {_named(value)}.")
    elif kind == "image":
        if not _is_array(value) or value.ndim < 3:
            raise ValueError(f"{where} an array of images [*B, H, W, C]; it is {_named(value)}.")
    else:
        leaves = jax.tree.leaves(value)
        if not leaves or not all(map(_is_array, leaves)):
            wrong = next((leaf for leaf in leaves if not _is_array(leaf)), value)
            raise ValueError(f"{where} an array, or arrays in a tuple or dict; there is {_named(wrong)}.")
    if not sum(leaf.size for leaf in jax.tree.leaves(value)):
        raise ValueError(f"{where} not empty, which shows nothing; it is {_named(value)}.")


def _check_structure(element, y, expected):
    found, wanted = jax.tree.structure(y), jax.tree.structure(expected)
    if found != wanted:
        raise AssertionError(f"{element}: the output has another structure, {found}, than {wanted}.")


def _is_array(value) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _named(value) -> str:
    """What a value is, for an error."""
    if _is_array(value):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Isotypic):
        return f"a field of {value.group.name}, {list(value.shape)}"
    return repr(value)[:60] if value is None or value == () else f"{type(value).__name__} {repr(value)[:60]}"


def _act(g, x, kind, grid, prefix):
    if kind == "field":
        return fields.act(g, x, grid, prefix)
    return fields.act_on_image(g, x) if kind == "image" else x


def _parts(group, y, expected) -> dict[str, tuple[Any, Any]]:
    """Pairs to compare, by their name in errors."""
    if isinstance(expected, Isotypic):
        pairs = {f"irrep {i.name}": (y.lines[k], expected.lines[k]) for k, i in enumerate(group.lines)}
        return pairs | {f"irrep {i.name}": (y.planes, expected.planes) for i in group.planes}
    leaves = zip(jax.tree.leaves(y), jax.tree.leaves(expected), strict=True)
    return {"the output" if k == 0 else f"output {k}": pair for k, pair in enumerate(leaves)}


def _largest(tree) -> float:
    return max((float(np.abs(leaf).max()) for leaf in jax.tree.leaves(_wide(tree)) if leaf.size), default=0.0)


def _wide(tree):
    """Cast on the host to at least float32, and integers to float64, where two that are large still differ."""

    def wide(leaf):
        return np.asarray(leaf).astype(jnp.promote_types(leaf.dtype, jnp.float32) if _tolerance(leaf) else np.float64)

    return jax.tree.map(wide, tree)


def _tolerance(leaf) -> float:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return 0.0
    return {64: 1e-10, 32: 1e-5}.get(jnp.finfo(leaf.dtype).bits, 5e-2)
