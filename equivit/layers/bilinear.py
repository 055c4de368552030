"""Products as a CPU has them fast, and so are those of their gradients.

JAX derives from a product others that are slower on a CPU.  So this is a primitive, with the few rules that one needs:

- A gradient has its axes in the order of the factor that it belongs to.  JAX's has those of the cotangent first, and
  XLA:CPU is slower at many such products and then turns their results.
- In bfloat16 it is summed in float32 and rounded once: XLA:CPU has fast products for results in float32 alone.  To
  round such a result is not enough: JAX derives from it products of float32 cotangents with bfloat16.
- Its factors have the order in memory of their axes.  XLA:CPU chooses its code for a product before it orders axes; if
  a factor may yet be a transposed one, it has no fast code for many products at once, such as those of attention.
- The gradient of a weight is computed with more columns than rows, for which XLA:CPU has faster code, and is turned if
  the weight has fewer.
"""

import functools
import string

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from equivit.layers.in_order import in_order, is_prescribed


def einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """jnp.einsum of two arrays, such as "nc,cd->nd"; an axis that is summed over is one of both."""
    # Within shard_map, the gradient of a factor is summed over the devices that only the other factor varies over.
    over = _varying(x) | _varying(y)
    x, y = (jax.lax.pcast(factor, tuple(over - _varying(factor)), to="varying") for factor in (x, y))
    return _product.bind(x, y, axes=axes)


def _varying(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _computed(x, y, *, axes: str):
    if not x.dtype == y.dtype == jnp.bfloat16:
        return jnp.einsum(axes, x, y)
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _lowered_on_cpu(context: mlir.LoweringRuleContext, x, y, *, axes: str):
    computed = functools.partial(_computed_on_cpu, axes=axes, prescribed=is_prescribed(context))
    return mlir.lower_fun(computed, multiple_results=False)(context, x, y)


def _computed_on_cpu(x, y, *, axes: str, prescribed: bool):
    """As a matrix of rows of x by columns of y, for each place on the many axes that are of x, y and the result."""
    of_x, of_y, of_z = _split(axes)
    rows, columns = _only(of_x, of_y), _only(of_y, of_x)
    many, summed = _only(of_z, rows + columns), _only(of_x, of_z)
    if of_z == many + columns + rows != many + rows + columns:
        return _computed_on_cpu(y, x, axes=f"{of_y},{of_x}->{of_z}", prescribed=prescribed)
    if prescribed and of_x == summed + rows and x.size > y.size:
        turned = _computed_on_cpu(y, x, axes=f"{of_y},{of_x}->{columns + rows}", prescribed=prescribed)
        return in_order(jnp.einsum(f"{columns + rows}->{of_z}", in_order(turned)))
    if x.dtype == y.dtype == jnp.bfloat16:
        if of_z != many + rows + columns or many and not prescribed:
            # If XLA gives arrays another order in memory, it finds in the end that it has no code for bfloat16.
            return _computed(x.astype(jnp.float32), y.astype(jnp.float32), axes=axes).astype(jnp.bfloat16)
        if prescribed:  # into one that is fast
            x, of_x = _turned(x, of_x, [many + rows + summed])
            y, of_y = _turned(y, of_y, [many + summed + columns, many + columns + summed])
    return _computed(in_order(x), in_order(y), axes=f"{of_x},{of_y}->{of_z}")


def _turned(x, axes: str, orders: list[str]):
    """With its axes in one of the orders, and that order."""
    order = axes if axes in orders else orders[0]
    return jnp.einsum(f"{axes}->{order}", x), order


def _only(letters: str, others: str) -> str:
    """The letters that are not among the others."""
    return "".join(letter for letter in letters if letter not in others)


def _aval(x, y, *, axes: str):
    return jax.make_jaxpr(functools.partial(_computed, axes=axes))(x, y).out_avals[0]


def _split(axes: str) -> tuple[str, str, str]:
    factors, result = axes.split("->")
    of_x, of_y = factors.split(",")
    return of_x, of_y, result


def _x_gradient(dz, x, y, *, axes: str):
    of_x, of_y, of_z = _split(axes)
    return einsum(f"{of_z},{of_y}->{of_x}", dz, y)


def _y_gradient(dz, x, y, *, axes: str):
    of_x, of_y, of_z = _split(axes)
    return einsum(f"{of_x},{of_z}->{of_y}", x, dz)


def _batched(factors, at, *, axes: str):
    """One more axis, the first one of each factor that has it and of the result."""
    new = next(letter for letter in string.ascii_letters if letter not in axes)
    moved = [x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(factors, at, strict=True)]
    of_x, of_y = ("" if i is None else new for i in at)
    x_axes, y_axes, z_axes = _split(axes)
    return einsum(f"{of_x}{x_axes},{of_y}{y_axes}->{new}{z_axes}", *moved), 0


_product = Primitive("bilinear_product")
_product.def_impl(jax.jit(_product.bind, static_argnames="axes"))
_product.def_abstract_eval(_aval)
ad.defbilinear(_product, _x_gradient, _y_gradient)
batching.primitive_batchers[_product] = _batched
mlir.register_lowering(_product, mlir.lower_fun(_computed, multiple_results=False))
mlir.register_lowering(_product, _lowered_on_cpu, platform="cpu")
