"""The first linear map of an octic MLP with a fused GELU, so that the hidden field is written once, and the whole MLP.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> lines [4, *B, N, F] and planes [2, *B, N, 2F].
Source: octic ViTs, Sections 3.2.1 and 3.2.3.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels import dispatch
from equivit.kernels.isotypic_linear import Field, Linear, linear
from equivit.kernels.octic_linear_gelu import reference

NAME = "octic_linear_gelu"


def octic_linear_gelu(
    lines: jax.Array,
    planes: jax.Array,
    w_lines: jax.Array,
    w_planes: jax.Array,
    bias: jax.Array,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """GELU of a linear map of an octic field.

    Under differentiation, the linear map and `d8_gelu` run separately and the hidden field is stored: the backward pass
    needs it, and recomputing it would cost a tenth of a training step's products.

    If the kernel does not support the shapes, "auto" is the linear map, then `d8_gelu`.  In bfloat16, only the kernel
    applies the GELU to unrounded float32 sums.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      w_lines: [4, C, F], for each 1-D irrep.
      w_planes: [2C, 2F], for both rows of E.
      bias: [F], of the invariant component.
      implementation: as for `d8_gelu`.

    Returns:
      lines [4, *B, N, F] and planes [2, *B, N, 2F].

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    chosen = dispatch.resolve(NAME, implementation)
    dispatch.check_field(NAME, lines, planes)
    _check_weights(lines.shape[-1], w_lines, w_planes, bias)
    arrays = (lines, planes, w_lines, w_planes, bias)
    if chosen in ("xla", "reference"):
        return reference.octic_linear_gelu(*arrays)
    dtype = jnp.result_type(*arrays[:-1])
    arrays = *(a.astype(dtype) for a in arrays[:-1]), bias  # the gradient of a bias is summed in its own type
    if dispatch.lacks(implementation, chosen, _kernels(arrays[0], *arrays[2:])):
        return reference.octic_linear_gelu(*arrays, implementation="auto")
    return _octic_linear_gelu(chosen, *arrays)


def octic_feed_forward(field: Field, first: Linear, second: Linear, *, implementation: str = "auto") -> Field:
    """The MLP of a field.

    Args:
      field: lines [4, *B, N, C] and planes [2, *B, N, 2C].
      first: weights [4, C, F] and [2C, 2F]; bias [F].
      second: weights [4, F, C] and [2F, 2C]; bias [C] or None.
      implementation: "gpu" are kernels for a Hopper GPU, of the forward and of the backward pass, if they support the
        arrays; others as for `octic_linear_gelu`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    chosen = dispatch.resolve("octic_feed_forward", implementation)
    if chosen == "gpu" and dispatch.hopper():
        from equivit.kernels.octic_linear_gelu import gpu_feed_forward  # deferred, as in `d8_gelu`

        if gpu_feed_forward.supported(field, first, second):
            return gpu_feed_forward.feed_forward(field, first, second)
    (lines, planes), (w_lines, w_planes) = field, first[0]
    bias: Any = first[1]  # an MLP's first map has one
    return linear(octic_linear_gelu(lines, planes, w_lines, w_planes, bias, implementation=implementation), second)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0, inline=True)  # otherwise each call would compile the choice by platform
def _octic_linear_gelu(implementation, lines, planes, *weights):
    plain = functools.partial(reference.octic_linear_gelu, implementation=implementation)
    return dispatch.run(NAME, implementation, plain, _kernels(lines, *weights), (lines, planes), weights)


@_octic_linear_gelu.defjvp
def _derivative(implementation, arrays, slopes):
    # The derivative needs the result of the linear map.
    return jax.jvp(functools.partial(reference.octic_linear_gelu, implementation=implementation), arrays, slopes)


def _check_weights(c: int, w_lines: jax.Array, w_planes: jax.Array, bias: jax.Array) -> None:
    f = bias.shape[-1] if bias.ndim else 0
    expected = ((4, c, f), (2 * c, 2 * f), (f,))
    shapes = (w_lines.shape, w_planes.shape, bias.shape)
    if shapes != expected:
        raise ValueError(
            f"{NAME}: w_lines {shapes[0]}, w_planes {shapes[1]} and bias {shapes[2]} must be [4, C, F], [2C, 2F] and "
            f"[F]; for a field of C={c} channels and this bias, {expected[0]} and {expected[1]}."
        )


def _kernels(lines, *weights):
    """The kernels that support the dtype and widths."""
    from equivit.kernels.octic_linear_gelu import gpu, tpu  # deferred, as in `d8_gelu`

    c, f, dtype = *weights[0].shape[1:], lines.dtype
    on_tpu = tpu.forward if tpu.supported(lines, *weights) else None
    on_gpu = dispatch.on_rows(gpu.forward, 2) if gpu.supported(c, f, dtype) else None
    return dispatch.by_implementation(on_tpu, on_gpu)
