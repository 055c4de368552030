"""Equivariance check for the groups of the pixel grid."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from equivit import errors
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, Tokens
from equivit.symmetry.groups import Group
from equivit.testing import comparison


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
      input: "image" or "field", the action of g on x.
      output: "invariant" (g does nothing), "image", or "field".
      prefix: number of class and register tokens in fields; they do not move.
      tol: largest allowed deviation, relative to the largest entry of the output; None: 1e-5 in float32, 1e-10 in
        float64, 5e-2 in bfloat16 and float16, and 0 for integers and booleans, which must agree exactly.
      grid: (h, w) of an input field's tokens.
      output_grid: (h, w) of an output field's tokens for the untransformed x; None: `grid`.

    Returns the largest relative deviation.

    Raises:
      AssertionError: names the element, the irrep and the deviation; also when the output is zero or not finite.
      ValueError: an unknown kind of input or output, a missing grid, an invalid group or tolerance, or an x or a result
        of fn of another kind.
    """
    errors.one_of("assert_equivariant: input", input, ("image", "field"))
    errors.one_of("assert_equivariant: output", output, ("invariant", "image", "field"))
    if input == "field" and grid is None:
        raise ValueError("assert_equivariant: input='field' needs grid=(h, w), the token grid.")
    if output == "field" and grid is None and output_grid is None:
        raise ValueError("assert_equivariant: output='field' needs output_grid=(h, w), the token grid of fn(x).")
    _check_group(group)
    comparison.check_tolerance("assert_equivariant", tol)
    _check_value("x", x, "input", input, group)
    upright, worst = fn(x), 0.0
    _check_value("fn(x)", upright, "output", output, group)
    size = comparison.size_of("assert_equivariant", upright)
    # numpy computes everything but `fn`: JAX would compile a program for each operation, element and shape.
    x, upright = jax.tree.map(np.asarray, (x, upright))
    for g in group.elements:
        y = fn(jax.device_put(_act(g, x, input, grid, prefix)))
        expected, what = _act(g, upright, output, output_grid or grid, prefix), f"{group.name} element {g!r}"
        comparison.check_structure(what, y, expected)
        worst = max(worst, comparison.compare(what, _parts(group, y, expected), size, tol))
    return worst


def _check_group(group):
    if not isinstance(group, Group):
        raise ValueError(
            f"assert_equivariant: {group=} must be a group, FLIP or OCTIC of equivit.symmetry.groups"
            f"{errors.nearest(str(group).upper(), ('FLIP', 'OCTIC'))}."
        )


def _check_value(what, value, role, kind, group):
    """ValueError unless x is of the kind `input`, or the result of fn of the kind `output`."""
    where = f"assert_equivariant: {role}={kind!r}, so {what} must be"
    if kind == "field":
        if not isinstance(value, Isotypic) or value.group is not group:
            raise ValueError(f"{where} a field of {group.name}, an Isotypic; it is {comparison.named(value)}.")
    elif kind == "image":
        comparison.check_images(where, value)
    else:
        comparison.check_arrays(where, value)
    comparison.check_not_empty(where, value)


def _act(g, x, kind, grid, prefix):
    if kind == "field":
        return fields.act(g, x, grid, prefix)
    return fields.act_on_image(g, x) if kind == "image" else x


def _parts(group, y, expected) -> dict[str, tuple[Any, Any]]:
    """Pairs to compare, by name for errors."""
    if isinstance(expected, Isotypic):
        pairs = {f"irrep {i.name}": (y.lines[k], expected.lines[k]) for k, i in enumerate(group.lines)}
        return pairs | {f"irrep {i.name}": (y.planes, expected.planes) for i in group.planes}
    return comparison.leaves(y, expected)
