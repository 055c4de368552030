"""Public checks of symmetry, also for your own layers and models."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from equivit import logical
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
        float64, 5e-2 in bfloat16.
      grid: (h, w) of an input field's tokens.
      output_grid: (h, w) of an output field's tokens for the untransformed x; None: `grid`.

    Returns:
      The largest relative deviation.

    Raises:
      AssertionError: names the element, the irrep and the deviation; also when the output is zero or not finite.
      ValueError: an unknown kind of input or output, or a missing grid.
    """
    _check_kinds(input, output, grid, output_grid)
    upright, worst = fn(x), 0.0
    chex.assert_tree_all_finite(upright)
    if not (size := _largest(upright)):
        raise AssertionError("assert_equivariant: the output is zero, which proves nothing; use random parameters.")
    tol = _tolerance(upright) if tol is None else tol
    for g in group.elements:
        y = fn(_act(g, x, input, grid, prefix))
        expected = _act(g, upright, output, output_grid or grid, prefix)
        for part, (a, b) in _parts(group, y, expected).items():
            what = f"{group.name} element {g!r}: {part}"
            chex.assert_equal_shape((a, b), custom_message=f"{what} has a different shape.")
            gap = _largest(a - b) / size
            try:
                chex.assert_trees_all_close(_wide(a), _wide(b), rtol=0, atol=tol * size)
            except AssertionError as error:  # its message shows the wrong entries
                raise AssertionError(f"{what} deviates by {gap:.2e} (relative; {tol=:.0e}).") from error
            worst = max(worst, gap)
    return worst


def randomise(module: nnx.Module, key: jax.Array) -> nnx.Module:
    """A copy with all parameters random, so that no zero hides an error.

    Scales are near 1, biases and tokens have standard deviation 1/2, matrices have unit gain.  Parameters keep their
    dtype.
    """

    def draw(name, index, array):
        noise = jax.random.normal(jax.random.fold_in(key, index), array.shape, array.dtype)
        if array.ndim >= 2:
            return noise * array[..., 0].size ** -0.5
        scale = "scale" in name or ("norm" in name and not name.endswith("bias"))
        return 1 + 0.2 * noise if scale else 0.5 * noise

    tensors = logical.to_logical(module)
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
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(_wide(tree)))


def _wide(tree):
    """Cast to at least float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _tolerance(tree) -> float:
    return {"float64": 1e-10, "float32": 1e-5}.get(str(jax.tree.leaves(tree)[0].dtype), 5e-2)
