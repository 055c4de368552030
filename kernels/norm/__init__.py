"""Layer norm of a field: centre each irrep, divide by a common standard deviation, scale, and add a bias.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.
"""

import functools

import jax

from kernels import dispatch
from kernels.isotypic_linear import Field
from kernels.norm import reference
from kernels.norm.reference import Norm

__all__ = ["Norm", "normalise"]
NAME = "norm"


def normalise(field: Field, scales: Field, bias: jax.Array, norm: Norm) -> Field:
    """Normalise a field; on a GPU, the standard deviation of lines and planes is computed once.

    There XLA would compute it in the fusions of both, and so read the whole field twice.

    Args:
      field: lines and planes, or lines alone.
      scales: for lines [i, C], for planes [2C].
      bias: [C], added to the first line.
      norm: the constants.
    """
    on_gpu = len(field) > 1 and dispatch.chosen(NAME, "auto") in ("auto", "gpu")
    return _normalise(field, scales, bias, norm, on_gpu)


# Recomputed in the backward pass: the residuals would be four times as large as a field in bfloat16.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4))
def _normalise(field, scales, bias, norm, on_gpu):
    plain = functools.partial(reference.normalise, norm=norm)
    kernels = {"gpu": functools.partial(plain, store=jax.lax.optimization_barrier)} if on_gpu else {}
    with jax.named_scope("norm"):
        return dispatch.select(NAME, "auto", plain, kernels, field, scales, bias)
