"""The first branch of an octic block: scale * attention(norm(x)), with the linear maps of attention.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2 and Appendix A.
"""

import functools
from collections.abc import Callable

import jax

from kernels import dispatch
from kernels.norm import Norm
from kernels.octic_attention import reference, tpu
from kernels.octic_attention.reference import Weights
from kernels.tpu.branch import check

__all__ = ["Weights", "octic_attention"]
NAME = "octic_attention"


def octic_attention(
    lines: jax.Array,
    planes: jax.Array,
    weights: Weights,
    heads: int,
    norm: Norm,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """scale * attention(norm(x)) of an octic field x.

    The kernel is for a TPU and for inference.  Under differentiation, norm, attention and scale run separately, with
    the kernels of `isotypic_attention`: the backward pass needs the intermediate results.  In bfloat16 the kernel
    rounds only the factors of its products and the result; the reference rounds every step.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      weights: in at most the precision of the field, so that it keeps its dtype.
      heads: at most 128 channels each, 8 C / heads.
      norm: the constants.
      implementation: "tpu" is the kernel, "interpret" runs it anywhere, slowly; others use the reference.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    chosen = dispatch.chosen(NAME, implementation)
    c = lines.shape[-1] if lines.ndim else 0
    check(NAME, lines, planes, weights, 3 * c, c, f"C={c} channels")
    if chosen in ("tpu", "interpret"):
        if tpu.supported(lines, weights, heads):
            return _octic_attention(chosen, heads, norm, lines, planes, *weights)
        if implementation != "auto":
            raise dispatch.no_kernel(NAME, implementation, (lines, planes, *weights), f" and {heads} heads")
    return reference.octic_attention(lines, planes, *weights, heads=heads, norm=norm, implementation=implementation)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _octic_attention(implementation, heads, norm, *arrays):
    plain = functools.partial(_apart, implementation, heads, norm)
    kernel = functools.partial(tpu.forward, heads=heads, norm=norm)
    kernels: dict[str, Callable | None] = {"tpu": kernel, "interpret": functools.partial(kernel, interpret=True)}
    return dispatch.run(NAME, implementation, plain, kernels, arrays[:2], arrays[2:])


@_octic_attention.defjvp
def _derivative(implementation, heads, norm, arrays, slopes):
    return jax.jvp(functools.partial(_apart, implementation, heads, norm), arrays, slopes)


def _apart(implementation, heads, norm, *arrays):
    """The branch in separate parts; attention uses a kernel if there is one."""
    with dispatch.using(implementation):
        return reference.octic_attention(*arrays, heads=heads, norm=norm, implementation="auto")
