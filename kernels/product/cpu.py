"""Products in forms that XLA:CPU runs fast.

In float32 a sum over images and tokens runs over one axis (`axes.joined`): without it, a training step takes 1.09 times
as long for D8(ViT-S), 1.02 for ViT-S.  Without all that follows, a bfloat16 step takes 1.28 and 1.71 times as long (two
cores of Zen 3, four blocks, 8 images):

- A product is summed in float32 and rounded once: XLA:CPU has fast code only for float32 results.
- Its factors have row-major layouts.  XLA:CPU chooses its code for a product before it assigns layouts; if a factor
  might still be transposed, it has no fast code for batched products, as attention needs.  Without layouts alone, a
  step takes 1.04 and 1.10 times as long.
- The gradient of a weight is computed with more columns than rows, for which XLA:CPU has faster code, and transposed if
  the weight has fewer.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from equivit.kernels.product.axes import joined, only, split


def lowered(context: mlir.LoweringRuleContext, x, y, *, axes: str, precision: str | None):
    """Lower a product, such as "nc,cd->nd"."""
    module = context.module_context
    # XLA would gather arrays with a prescribed layout from several devices, and `jax.export` does not support layouts.
    prescribed = getattr(module.axis_context, "num_devices", None) == 1 and not module.lowering_parameters.for_export
    computed: Any = functools.partial(_computed, axes=axes, prescribed=prescribed)
    if not all(aval.dtype == jnp.bfloat16 for aval in context.avals_in):  # pyright: ignore[reportAttributeAccessIssue]
        computed = functools.partial(joined, axes=axes, precision=precision)
    return mlir.lower_fun(computed, multiple_results=False)(context, x, y)


def _computed(x, y, *, axes: str, prescribed: bool):
    """A batched matrix product: rows of x by columns of y; x, y and the result share the batch axes `many`."""
    of_x, of_y, of_z = split(axes)
    rows, columns = only(of_x, of_y), only(of_y, of_x)
    many, summed = only(of_z, rows + columns), only(of_x, of_z)
    if of_z == many + columns + rows != many + rows + columns:
        return _computed(y, x, axes=f"{of_y},{of_x}->{of_z}", prescribed=prescribed)
    if prescribed and of_x == summed + rows and x.size > y.size:
        turned = _computed(y, x, axes=f"{of_y},{of_x}->{columns + rows}", prescribed=prescribed)
        return _in_order(jnp.einsum(f"{columns + rows}->{of_z}", _in_order(turned)))
    if of_z != many + rows + columns or many and not prescribed:
        # With another layout XLA would have no bfloat16 code in the end.
        return jnp.einsum(axes, x.astype(jnp.float32), y.astype(jnp.float32)).astype(jnp.bfloat16)
    if prescribed:  # into a fast layout
        x, of_x = _turned(x, of_x, [many + rows + summed])
        y, of_y = _turned(y, of_y, [many + summed + columns, many + columns + summed])
        x, y = _in_order(x), _in_order(y)
    return jnp.einsum(f"{of_x},{of_y}->{of_z}", x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _in_order(x):
    """x with a row-major layout."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _turned(x, axes: str, orders: list[str]):
    """x transposed to one of the orders of axes, and that order."""
    order = axes if axes in orders else orders[0]
    return jnp.einsum(f"{axes}->{order}", x), order
