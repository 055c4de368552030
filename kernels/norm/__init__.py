"""Layer norm of a field: irreps are centred, and divided by one common standard deviation; then scales and a bias.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.
"""

import functools

import jax

from kernels import dispatch
from kernels.isotypic_linear import Field
from kernels.norm import gpu, reference
from kernels.norm.reference import Norm

__all__ = ["Norm", "normalise"]
NAME = "norm"


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """The norm, on a GPU by `gpu.normalise`.

    Args:
      field: lines and planes, or lines alone.
      scales: of lines [i, C], of planes [2C].
      bias: [C], of the first line.
      norm: constants.
    """
    on_gpu = len(field) > 1 and dispatch.chosen(NAME, "auto") in ("auto", "gpu")
    return _normalise(field, scales, bias, norm, on_gpu)


# Computed again in a backward pass: what a derivative needs is four times as large as a field in bfloat16.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normalise(field, scales, bias, norm, on_gpu):
    plain = functools.partial(reference.normalise, norm=norm)
    kernels = {"gpu": functools.partial(gpu.normalise, norm=norm)} if on_gpu else {}
    with jax.named_scope("norm"):
        return dispatch.select(NAME, "auto", plain, kernels, field, scales, bias)
