"""The precision of computation, a property of the run, not of the model: parameters are stored in float32.

"mixed" rounds the factors of matrix products and convolutions to bfloat16, like autocast in the official codes.  A
linear map computes in the type of its weight; norms, layer scales, positions, softmax, statistics and the residual
stream stay in float32.  In bfloat16 the stream would lose most of the blocks' contributions at the start of training,
when layer scales are 1e-4.  "float16" rounds the same factors to float16, which has three more bits but a smaller
range: training scales its loss (`training/loss_scale.py`).
"""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.kernels import mesh

LOW = {"mixed": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float16": jnp.float16}  # the type of rounded parameters
PRECISIONS = ("float32", *LOW)
M = TypeVar("M", bound=nnx.Module)


def cast(module: M, precision: str) -> M:
    """Copy `module` for computation at a precision.

    Args:
      precision: "float32" keeps all types; "mixed" and "float16" cast the parameters that declare `product=True`, to
        bfloat16 and float16; "bfloat16" casts all parameters, and with them the residual stream.  Statistics and
        buffers keep their type.

    Raises ValueError for an unknown precision.
    """
    errors.one_of("precision", precision, PRECISIONS)

    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    rounded = [path for path, variable in flat if _is_rounded(variable, precision)]
    arrays = [dict(flat)[path].get_value() for path in rounded]
    arrays = dict(zip(rounded, _rounded(arrays, LOW[precision]), strict=True)) if rounded else {}
    return nnx.merge(graph, nnx.from_flat_state([(p, v.replace(arrays.get(p, v.get_value()))) for p, v in flat]))


@dataclasses.dataclass(frozen=True)
class AtUse:
    """Parameters as a training step computes with them (`layers.stack.used`): rounded, then whole on every device."""

    precision: str

    def __call__(self, module: M) -> M:
        return mesh.gathered(cast(module, self.precision))


def _is_rounded(variable: nnx.Variable, precision: str) -> bool:
    if precision == "float32" or not isinstance(variable, nnx.Param):
        return False
    floating = jnp.issubdtype(variable.get_value().dtype, jnp.floating)
    return floating and (precision == "bfloat16" or variable.get_metadata().get("product", False))


@functools.partial(jax.jit, static_argnums=1, inline=True)  # one program instead of one per shape
def _rounded(arrays, dtype):
    return [array.astype(dtype) for array in arrays]
