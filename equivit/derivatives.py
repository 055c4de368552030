"""Handwritten gradients that keep forward-mode derivatives.

`jax.custom_vjp` does not support `jax.jvp`, and `jax.custom_jvp` derives the gradient by transposing the derivative.
Here a linear function comes with its transpose, so both modes, `jax.vmap` and higher derivatives work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def linear(function: Callable, transpose: Callable, residuals: Any, x: Any) -> Any:
    """Apply function(residuals, x), linear in the tree x; reverse mode runs transpose(residuals, slope).

    Neither may close over traced arrays.
    """
    (fixed, fixed_tree), (leaves, tree) = map(jax.tree.flatten, (residuals, x))
    result_tree = jax.tree.structure(jax.eval_shape(function, residuals, x))

    def flat(function, tree):
        def on_leaves(*arrays):
            known, given = arrays[: len(fixed)], arrays[len(fixed) :]
            return jax.tree.leaves(function(jax.tree.unflatten(fixed_tree, known), jax.tree.unflatten(tree, given)))

        return on_leaves

    results = _bind(flat(function, tree), flat(transpose, result_tree), len(fixed), *fixed, *leaves)
    return jax.tree.unflatten(result_tree, results)


def with_pullback(pullback: Callable[..., tuple], *, static: tuple[int, ...] = ()) -> Callable[[Callable], Any]:
    """Decorate a function whose gradient is `pullback`; its forward-mode derivative is derived.

    Args:
      pullback: called as pullback(*static arguments, arrays, slope); returns the slope of each array, in a tuple.
      static: the positions of arguments that are not arrays; they come last.
    """

    def decorate(function: Callable) -> Any:
        custom = jax.custom_jvp(function, nondiff_argnums=static)

        @custom.defjvp
        def derivative(*arguments):
            *constants, arrays, slopes = arguments

            def forward(arrays, slopes):
                return jax.jvp(lambda *arrays: function(*arrays, *constants), arrays, slopes)[1]

            pulled = functools.partial(pullback, *constants)
            return custom(*arrays, *constants), linear(forward, pulled, arrays, slopes)

        return custom

    return decorate


def zero_slope(x: jax.Array) -> Any:
    """The slope of a constant array: zeros, in JAX's dtype float0 for integers."""
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


# The primitive: `function`, a jaxpr, and `transpose` map leaves to leaves; the first `number` leaves are residuals.
def _bind(function, transpose, number, *arrays):
    return _linear.bind(*arrays, function=jax.make_jaxpr(function)(*arrays), transpose=transpose, number=number)


def _jvp(arrays, slopes, *, function, transpose, number):
    function = jaxpr_as_fun(function)
    if all(type(slope) is ad.Zero for slope in slopes[:number]):
        slopes = map(ad.instantiate_zeros, slopes[number:])
        along = _bind(function, transpose, number, *arrays[:number], *slopes)
        return _bind(function, transpose, number, *arrays), along
    pairs = zip(arrays, slopes, strict=True)
    return jax.jvp(function, arrays, tuple(zero_slope(x) if type(slope) is ad.Zero else slope for x, slope in pairs))


def _transpose(slopes, *arrays, function, transpose, number):
    slopes = map(ad.instantiate_zeros, slopes)
    pulled = _bind(transpose, jaxpr_as_fun(function), number, *arrays[:number], *slopes)
    unknown = map(ad.is_undefined_primal, arrays[number:])
    return [None] * number + [slope if wanted else None for slope, wanted in zip(pulled, unknown, strict=True)]


def _batched(arrays, at, *, function, transpose, number):
    (size,) = {x.shape[i] for x, i in zip(arrays, at, strict=True) if i is not None}
    given = [batching.bdim_at_front(x, i, size) for x, i in zip(arrays[number:], at[number:], strict=True)]

    def each(function):
        return lambda *arrays: jax.vmap(function, (*at[:number], *(0,) * (len(arrays) - number)))(*arrays)

    results = _bind(each(jaxpr_as_fun(function)), each(transpose), number, *arrays[:number], *given)
    return results, [0] * len(results)


def _run(*arrays, function, transpose, number):
    return jaxpr_as_fun(function)(*arrays)


_linear = Primitive("linear")
_linear.multiple_results = True
_linear.def_impl(_run)
# Interpreted kernels have effects.
_linear.def_effectful_abstract_eval(lambda *_, function, **__: (function.out_avals, function.effects))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
