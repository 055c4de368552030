"""GELU of an octic field: transform to the eight values on the group, exact GELU, and back, in one pass.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.  Source: octic ViTs, Section 3.2.3 and Appendix A.
"""

import functools
import math

import jax
import jax.numpy as jnp

from equivit.derivatives import linear
from kernels import dispatch, fourier, tpu_blocks
from kernels.pointwise import gelu, gelu_gradient, to_isotypic, to_regular

NAME = "d8_gelu"


def reference(lines: jax.Array, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The definition, in plain jnp.  Sums and the GELU are in at least float32.

    The transforms are matrix products on one stacked array: with sums of eight arrays, XLA:CPU fuses the eight GELUs
    into each of the eight outputs and computes them eight times.
    """
    components = jnp.concatenate([lines, *jnp.split(planes, 2, axis=-1)])
    values = fourier.to_regular(components, jnp.promote_types(lines.dtype, jnp.float32))
    y = fourier.to_isotypic(_gelu(values).astype(lines.dtype))
    y_lines, *copies = jnp.split(y, [4, 6])
    return y_lines, jnp.concatenate(copies, axis=-1)


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@_gelu.defjvp
def _(primals, tangents):
    return _gelu(*primals), jax.jvp(_mirrored_gelu, primals, tangents)[1]


def _mirrored_gelu(x: jax.Array) -> jax.Array:
    """The same, bit for bit, as erf is odd; but XLA would keep the same erf for the backward pass."""
    return 0.5 * x * (1 - jax.lax.erf(-x * math.sqrt(0.5)))


def d8_gelu(lines: jax.Array, planes: jax.Array, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """GELU of an octic field.  Kernels compute in float32; the backward pass stores only the input and recomputes.

    Args:
      lines: [4, *B, N, C], the components A1, A2, B1, B2.
      planes: [2, *B, N, 2C], the rows of E, each with the channels of copy 1, then of copy 2.
      implementation: "auto" uses the kernel of the platform that the program is lowered for, if it supports these
        shapes and dtypes, and plain XLA otherwise.  "xla", "tpu" and "gpu" force one; "interpret" runs the TPU
        kernel anywhere, slowly.  On several devices a kernel needs the mesh of `jax.set_mesh`; if that does not divide
        axis -3 evenly, plain XLA runs.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that are not an octic field, or no kernel for them.
    """
    implementation = dispatch.chosen(NAME, implementation)
    dispatch.check_field(NAME, lines, planes)
    if implementation == "xla":
        return reference(lines, planes)
    return _d8_gelu(implementation, lines, planes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _d8_gelu(implementation, lines, planes):
    return forward(lines, planes, implementation=implementation)


@_d8_gelu.defjvp
def _derivative(implementation, field, slopes):
    def backward_of(field, slopes):
        return backward(*field, *slopes, implementation=implementation)

    # The transform is orthogonal and the GELU acts on each value alone, so the Jacobian is symmetric.
    return _d8_gelu(implementation, *field), linear(backward_of, backward_of, field, slopes)


# Jitted here: outside of jit, a choice by platform would be recompiled at every call.
@functools.partial(jax.jit, static_argnames="implementation", inline=True)
def forward(lines: jax.Array, planes: jax.Array, *, implementation: str) -> tuple[jax.Array, ...]:
    """The GELU, without a derivative."""
    kernels = _kernels(lines, tpu=_forward_tpu, gpu="forward", fields=1)
    return dispatch.run(NAME, implementation, reference, kernels, (lines, planes))


@functools.partial(jax.jit, static_argnames="implementation", inline=True)
def backward(
    lines: jax.Array, planes: jax.Array, d_lines: jax.Array, d_planes: jax.Array, *, implementation: str
) -> tuple[jax.Array, ...]:
    """The gradient at the input, from the input and the gradient at the output; all have the same shapes."""
    kernels = _kernels(lines, tpu=_backward_tpu, gpu="backward", fields=2)
    return dispatch.run(NAME, implementation, _reference_backward, kernels, (lines, planes, d_lines, d_planes))


def _reference_backward(lines, planes, *gradient):
    return jax.vjp(reference, lines, planes)[1](gradient)


def _kernels(lines, *, tpu, gpu, fields):
    """The kernels that support the dtype and width of `lines`; `fields`: how many fields they read (they write one).

    `tpu` is the kernel itself, `gpu` its name in d8_gelu_gpu.
    """
    from kernels import d8_gelu_gpu  # here: Mosaic GPU is slow to import, and models without fields do not need it

    width, dtype = lines.shape[-1], lines.dtype
    if not tpu_blocks.supported(dtype, [width] * (fields + 1)):
        tpu = None
    supported = d8_gelu_gpu.supported(width, dtype)
    gpu = dispatch.on_rows(getattr(d8_gelu_gpu, gpu), 2 * fields) if supported else None
    return {"tpu": tpu, "interpret": tpu and functools.partial(tpu, interpret=True), "gpu": gpu}


def _forward_tpu(lines, planes, *, interpret=False):
    def tile(rows, lanes, lines, planes, y_lines, y_planes):
        values = [gelu(v) for v in to_regular(tpu_blocks.read(lines, planes, rows, lanes))]
        tpu_blocks.write(y_lines, y_planes, rows, lanes, to_isotypic(values))

    return tpu_blocks.call(tile, (lines, planes), channels=lines.shape[-1], name=NAME, interpret=interpret)


def _backward_tpu(*fields, interpret=False):
    def tile(rows, lanes, lines, planes, d_lines, d_planes, dx_lines, dx_planes):
        values = to_regular(tpu_blocks.read(lines, planes, rows, lanes))
        gradients = to_regular(tpu_blocks.read(d_lines, d_planes, rows, lanes))
        gradients = [gelu_gradient(v) * g for v, g in zip(values, gradients, strict=True)]
        tpu_blocks.write(dx_lines, dx_planes, rows, lanes, to_isotypic(gradients))

    channels = fields[0].shape[-1]
    return tpu_blocks.call(tile, fields, channels=channels, name=f"{NAME}_backward", interpret=interpret)
