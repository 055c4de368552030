"""GELU of an octic field in one pass: transform to the eight values on the group, apply the exact GELU, transform back.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.  Source: octic ViTs, Section 3.2.3 and Appendix A.
"""

import functools

import jax

from equivit.derivatives import linear
from equivit.kernels import dispatch
from equivit.kernels.d8_gelu import reference

NAME = "d8_gelu"


def d8_gelu(lines: jax.Array, planes: jax.Array, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """GELU of an octic field.  Kernels compute in float32; the backward pass stores only the input and recomputes.

    Args:
      lines: [4, *B, N, C], the components A1, A2, B1, B2.
      planes: [2, *B, N, 2C], the rows of E, each with the channels of copy 1, then of copy 2.
      implementation: "auto" uses the GPU kernel in a program lowered for a Hopper GPU, if it supports these shapes and
        dtypes, and plain XLA otherwise.  "xla", "tpu" and "gpu" force one; "interpret" runs the TPU kernel anywhere,
        slowly.  On several devices a kernel needs a mesh from `jax.set_mesh`; if it does not divide axis -3 evenly,
        plain XLA runs.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that are not an octic field, or no kernel for them.
    """
    chosen = dispatch.resolve(NAME, implementation)
    dispatch.check_field(NAME, lines, planes)
    kernels = {} if chosen in ("xla", "reference") else _kernels(lines, kernel="backward", fields=2)
    if not kernels or dispatch.lacks(implementation, chosen, kernels):
        return reference.d8_gelu(lines, planes)
    return _d8_gelu(chosen, lines, planes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0, inline=True)  # otherwise each call would compile the choice by platform
def _d8_gelu(implementation, *field):
    kernels = _kernels(field[0], kernel="forward", fields=1)
    return dispatch.run(NAME, implementation, reference.d8_gelu, kernels, field)


@_d8_gelu.defjvp
def _derivative(implementation, field, slopes):
    def backward_of(field, slopes):
        return backward(*field, *slopes, implementation=implementation)

    # The transform is orthogonal and the GELU acts on each value alone, so the Jacobian is symmetric.
    return _d8_gelu(implementation, *field), linear(backward_of, backward_of, field, slopes)


def backward(
    lines: jax.Array, planes: jax.Array, d_lines: jax.Array, d_planes: jax.Array, *, implementation: str
) -> tuple[jax.Array, ...]:
    """The gradient of the input, from the input and the gradient of the output; all have the same shapes."""
    return _backward(implementation, lines, planes, d_lines, d_planes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(implementation, *arrays):
    kernels = _kernels(arrays[0], kernel="backward", fields=2)
    return dispatch.run(NAME, implementation, _plain_backward, kernels, arrays)


@_backward.defjvp
def _second_derivative(implementation, arrays, slopes):
    return _backward(implementation, *arrays), jax.jvp(_plain_backward, arrays, slopes)[1]


def _plain_backward(lines, planes, *gradient):
    return jax.vjp(reference.d8_gelu, lines, planes)[1](gradient)


def _kernels(lines, *, kernel, fields):
    """The kernels that support the dtype and width of `lines`; they read `fields` fields and write one."""
    # Deferred: Mosaic is slow to import, and models without fields do not need it.
    from equivit.kernels.d8_gelu import gpu, tpu

    width, dtype = lines.shape[-1], lines.dtype
    on_tpu = getattr(tpu, kernel) if tpu.supported(width, dtype, fields) else None
    on_gpu = dispatch.on_rows(getattr(gpu, kernel), 2 * fields) if gpu.supported(width, dtype) else None
    return dispatch.by_implementation(on_tpu, on_gpu)
