"""The second branch of an octic block: scale * mlp(norm(x)), where the MLP is linear, GELU, linear.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same; F channels per component are hidden.
Source: octic ViTs, Section 3.2 and Appendix A.
"""

import functools
from collections.abc import Callable

import jax

from kernels import dispatch
from kernels.norm import Norm
from kernels.octic_mlp import reference, tpu
from kernels.octic_mlp.reference import Weights
from kernels.tpu.branch import check

__all__ = ["Weights", "octic_mlp"]
NAME = "octic_mlp"


def octic_mlp(
    lines: jax.Array, planes: jax.Array, weights: Weights, norm: Norm, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """scale * mlp(norm(x)) of an octic field x.

    The kernel is for a TPU and for inference.  Under differentiation, norm, maps and scale run in XLA, with the kernels
    of `octic_linear_gelu` and its gradient: the backward pass needs the intermediate results.  In bfloat16 the kernel
    rounds only the factors of its products and the result; the reference rounds every step.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      weights: in at most the precision of the field, so that it keeps its dtype.
      norm: the constants.
      implementation: "tpu" is the kernel, "interpret" runs it anywhere, slowly; others use the reference.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    chosen = dispatch.chosen(NAME, implementation)
    c, f = lines.shape[-1] if lines.ndim else 0, weights.in_bias.size
    check(NAME, lines, planes, weights, f, f, f"C={c} channels and F={f} hidden ones")
    if chosen in ("tpu", "interpret"):
        if tpu.supported(lines, weights):
            return _octic_mlp(chosen, norm, lines, planes, *weights)
        if implementation != "auto":
            raise dispatch.no_kernel(NAME, implementation, (lines, planes, *weights))
    return reference.octic_mlp(lines, planes, *weights, norm=norm, implementation=implementation)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _octic_mlp(implementation, norm, *arrays):
    plain = functools.partial(reference.octic_mlp, norm=norm, implementation=implementation)
    kernel = functools.partial(tpu.forward, norm=norm)
    kernels: dict[str, Callable | None] = {"tpu": kernel, "interpret": functools.partial(kernel, interpret=True)}
    return dispatch.run(NAME, implementation, plain, kernels, arrays[:2], arrays[2:])


@_octic_mlp.defjvp
def _derivative(implementation, norm, arrays, slopes):
    return jax.jvp(functools.partial(reference.octic_mlp, norm=norm, implementation=implementation), arrays, slopes)
