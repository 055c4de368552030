"""The first linear map of an octic MLP with the GELU as its epilogue, so that the hidden field is written once.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> lines [4, *B, N, F] and planes [2, *B, N, 2F].
Source: octic ViTs, Sections 3.2.1 and 3.2.3.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels import d8_gelu, dispatch, tpu_blocks
from kernels.isotypic_linear import affine
from kernels.pointwise import gelu, to_isotypic, to_regular

NAME = "octic_linear_gelu"
# How much of `tpu_blocks.VMEM_BYTES` the weights, which stay in VMEM, may use; a third is left for the fields.  The
# paper's widths fit up to ViT-e (6.6 MiB) in bfloat16, and up to ViT-G (6.5 MiB) in float32.
WEIGHT_BYTES = 8 * 2**20


def linear(
    lines: jax.Array, planes: jax.Array, w_lines: jax.Array, w_planes: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The linear map, as `isotypic_linear.py` has it."""
    with jax.named_scope("linear"):
        # The name is of what `remat="dots"` keeps for the backward pass.
        return checkpoint_name((affine(lines, w_lines, bias), affine(planes, w_planes)), "product")


def reference(
    lines: jax.Array, planes: jax.Array, w_lines: jax.Array, w_planes: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The definition, in plain jnp."""
    h = linear(lines, planes, w_lines, w_planes, bias)
    with jax.named_scope("activation"):
        return d8_gelu.reference(*h)


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

    Under differentiation it is the linear map alone, then `d8_gelu`, and the hidden field is stored: the backward pass
    needs it, and recomputing it would cost a tenth of a training step's products.

    If the kernel does not support the shapes, "auto" is the linear map, then `d8_gelu`.  In bfloat16 the
    kernel's GELU sees the sums in float32, the other implementations see them rounded.

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
    implementation = dispatch.chosen(NAME, implementation)
    dispatch.check_field(NAME, lines, planes)
    _check_weights(lines.shape[-1], w_lines, w_planes, bias)
    arrays = (lines, planes, w_lines, w_planes, bias)
    if implementation == "xla":
        return reference(*arrays)
    dtype = jnp.result_type(*arrays)
    return _octic_linear_gelu(implementation, *(a.astype(dtype) for a in arrays))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _octic_linear_gelu(implementation, *arrays):
    return _forward(*arrays, implementation=implementation)


@_octic_linear_gelu.defjvp
def _derivative(implementation, arrays, slopes):
    return jax.jvp(functools.partial(_apart, implementation), arrays, slopes)


def _apart(implementation, *arrays):
    """The linear map, then the GELU: a derivative needs what lies between."""
    h = linear(*arrays)
    with jax.named_scope("activation"):
        return d8_gelu.d8_gelu(*h, implementation=implementation)


# Jitted here: outside of jit, a choice by platform would be recompiled at every call.
@functools.partial(jax.jit, static_argnames="implementation", inline=True)
def _forward(lines, planes, w_lines, w_planes, bias, *, implementation):
    plain = functools.partial(_apart, implementation)
    kernels = _kernels(lines, w_lines, w_planes, bias)
    return dispatch.run(NAME, implementation, plain, kernels, (lines, planes), (w_lines, w_planes, bias))


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
    from kernels import octic_linear_gelu_gpu  # here, as in d8_gelu.py

    c, f, dtype = *weights[0].shape[1:], lines.dtype
    size = sum(a.nbytes for a in weights)
    tpu = _forward_tpu if size <= WEIGHT_BYTES and tpu_blocks.supported(dtype, [c, f], size) else None
    supported = octic_linear_gelu_gpu.supported(c, f, dtype)
    gpu = dispatch.on_rows(octic_linear_gelu_gpu.forward, 2) if supported else None
    return {"tpu": tpu, "interpret": tpu and functools.partial(tpu, interpret=True), "gpu": gpu}


def _forward_tpu(lines, planes, w_lines, w_planes, bias, *, interpret=False):
    dot = functools.partial(jnp.dot, precision=tpu_blocks.precision(lines.dtype), preferred_element_type=jnp.float32)
    channels = len(bias)

    def tile(rows, lanes, lines, planes, w_lines, w_planes, bias, y_lines, y_planes):
        h = [dot(lines[i, rows, :], w_lines[i, :, lanes]) for i in range(4)]
        h[0] += bias[0, lanes].astype(jnp.float32)
        for columns in (lanes, tpu_blocks.second_copy(lanes, channels)):
            h += [dot(planes[row, rows, :], w_planes[:, columns]) for row in (0, 1)]
        tpu_blocks.write(y_lines, y_planes, rows, lanes, to_isotypic([gelu(v) for v in to_regular(h)]))

    weights = (w_lines, w_planes, bias[None])
    return tpu_blocks.call(tile, (lines, planes), weights, channels=channels, name=NAME, interpret=interpret)
