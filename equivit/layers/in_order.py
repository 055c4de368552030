"""The order of an array's axes in memory, prescribed where that helps: in programs for one CPU.

XLA:CPU chooses the order of axes of what it computes, and its code for some of it, before it knows what comes after.
Where a prescribed order is faster, `in_order` prescribes it.  Elsewhere it does nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def in_order(x: jax.Array) -> jax.Array:
    """x, of which the last axis is contiguous in memory, then the one before it, and so on; so is its gradient."""
    return _in_order.bind(x)


def is_prescribed(context: mlir.LoweringRuleContext) -> bool:
    """Whether a program has it.  From several devices XLA would gather such arrays, and `jax.export` takes none."""
    module = context.module_context
    return getattr(module.axis_context, "num_devices", None) == 1 and not module.lowering_parameters.for_export


def _lowered_on_cpu(context: mlir.LoweringRuleContext, x):
    def constrained(x):
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if is_prescribed(context) else x

    return mlir.lower_fun(constrained, multiple_results=False)(context, x)


def _batched(arrays, at):
    return in_order(jnp.moveaxis(arrays[0], at[0], 0)), 0


_in_order = Primitive("in_order")
_in_order.def_impl(jax.jit(_in_order.bind))
_in_order.def_abstract_eval(lambda x: x)
ad.deflinear2(_in_order, lambda cotangent, x: [in_order(cotangent)])
batching.primitive_batchers[_in_order] = _batched
mlir.register_lowering(_in_order, lambda context, x: [x])
mlir.register_lowering(_in_order, _lowered_on_cpu, platform="cpu")
