"""In which type a model computes.  That belongs to a run, not to a model: parameters are stored in float32.

"mixed" rounds the factors of matrix products and convolutions to bfloat16, as autocast does in the official codes.  A
linear map computes in the type of its weight; norms, layer scales, positions, softmax, statistics and the residual
stream stay in float32.  Rounding the stream too would lose most of what the blocks add at the start of training, when
layer scales are 1e-4.
"""

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx

from equivit import errors

PRECISIONS = ("float32", "mixed", "bfloat16")
M = TypeVar("M", bound=nnx.Module)


def cast(module: M, precision: str) -> M:
    """A copy of `module` that computes at a precision.

    Args:
      precision: "float32" leaves every type as it is; "mixed" casts the parameters that declare `product=True`;
        "bfloat16" casts all parameters, and with them the residual stream.  Statistics and buffers keep their type.

    Raises:
      ValueError: an unknown precision.
    """
    errors.one_of("precision", precision, PRECISIONS)

    def is_rounded(variable):
        chosen = precision == "bfloat16" or variable.get_metadata().get("product", False)
        return precision != "float32" and isinstance(variable, nnx.Param) and chosen

    graph, state = nnx.split(module)
    flat = [(path, v.replace(_rounded(v.get_value())) if is_rounded(v) else v) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _rounded(array):
    return array.astype(jnp.bfloat16) if jnp.issubdtype(array.dtype, jnp.floating) else array
