"""The two residual branches of an octic block, x + scale * body(norm(x)), each in one operation.

Shapes: lines [4, *B, N, C] and planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2 and Appendix A.

The kernels are for inference: one for a TPU, a few for a Hopper GPU.  Under differentiation, norm, body and scale run
separately, with the kernels of the body: the backward pass needs the intermediate results.  In bfloat16 the kernels
round only the factors of their products and the result; the reference rounds every step.
"""

import functools
from typing import Any

import jax

from equivit.kernels import dispatch
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import reference
from equivit.kernels.octic_branch.reference import Weights

__all__ = ["Weights", "octic_attention", "octic_mlp"]
Field = tuple[jax.Array, jax.Array]


def octic_attention(
    lines: jax.Array, planes: jax.Array, weights: Weights, heads: int, norm: Norm, *, implementation: str = "auto"
) -> Field:
    """x + scale * attention(norm(x)) of an octic field x, with the linear maps of attention.

    Args:
      lines: [4, *B, N, C].
      planes: [2, *B, N, 2C].
      weights: in at most the precision of the field, so that it keeps its dtype; the first map has F = 3C, ordered
        (q | k | v) x heads x channels, and the second G = C.
      heads: at most 128 channels each, 8 C / heads.
      norm: the constants.
      implementation: "tpu" is a kernel, which "interpret" runs anywhere, slowly; "gpu" are kernels for Hopper, in
        bfloat16; others use the reference.

    Returns:
      Arrays like `lines` and `planes`.

    Raises:
      ValueError: an unknown implementation, arrays that do not fit together, or no kernel for them.
    """
    c = lines.shape[-1] if lines.ndim else 0
    sizes, note = (3 * c, c, f"C={c} channels"), f" and {heads} heads"
    return _branch("octic_attention", sizes, note, lines, planes, weights, implementation, heads=heads, norm=norm)


def octic_mlp(
    lines: jax.Array, planes: jax.Array, weights: Weights, norm: Norm, *, implementation: str = "auto"
) -> Field:
    """x + scale * mlp(norm(x)) of an octic field x, where the MLP is linear, GELU, linear, with F = G hidden channels.

    Arguments, result and errors as for `octic_attention`.
    """
    c, f = lines.shape[-1] if lines.ndim else 0, weights.first_bias.size
    sizes = f, f, f"C={c} channels and F={f} hidden ones"
    return _branch("octic_mlp", sizes, "", lines, planes, weights, implementation, norm=norm)


def _branch(name, sizes, note, lines, planes, weights, implementation, **options) -> Field:
    """The branch of this name: its kernel, or the function of the same name in `reference`."""
    chosen, plain = dispatch.resolve(name, implementation), functools.partial(getattr(reference, name), **options)
    _check(name, lines, planes, weights, *sizes)
    if chosen in dispatch.FUSED:
        kernel = _kernel(name, "gpu" if chosen == "gpu" else "tpu")
        asked = implementation != "auto"
        if kernel.supported(lines, weights, **options) and (asked or chosen != "gpu" or dispatch.hopper()):
            fused = functools.partial(kernel.forward, **options)
            return _fused(name, chosen, plain, fused, lines, planes, *weights)
        if asked:
            raise dispatch.no_kernel(name, implementation, (lines, planes, *weights), note)
    return plain(lines, planes, *weights, implementation=implementation)


def _kernel(name: str, platform: str) -> Any:
    """The module with the kernel of a branch."""
    # Deferred: Mosaic imports slowly.
    from equivit.kernels.octic_branch import gpu_attention, gpu_mlp, tpu_attention, tpu_mlp

    modules = {"tpu": (tpu_attention, tpu_mlp), "gpu": (gpu_attention, gpu_mlp)}
    return next(module for module in modules[platform] if name == module.NAME)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _fused(name, implementation, plain, kernel, *arrays):
    apart = functools.partial(_apart, implementation, plain)
    kernels = {"gpu": kernel} if implementation == "gpu" else dispatch.by_implementation(kernel)
    return dispatch.run(name, implementation, apart, kernels, arrays[:2], arrays[2:])


@_fused.defjvp
def _derivative(name, implementation, plain, kernel, arrays, slopes):
    return jax.jvp(functools.partial(_apart, implementation, plain), arrays, slopes)


def _apart(implementation, plain, *arrays):
    """The branch in separate parts; its body uses a kernel if there is one."""
    with dispatch.using(implementation):
        return plain(*arrays, implementation="auto")


def _check(name, lines, planes, weights, first, second, sizes):
    """ValueError unless the arrays are a field and the parameters of a branch with F = `first` and G = `second`."""
    dispatch.check_field(name, lines, planes)
    c = lines.shape[-1]
    maps = (4, c, first), (2 * c, 2 * first), (first,), (4, second, c), (2 * second, 2 * c), (c,)
    shapes = (4, c), (2 * c,), (c,), *maps, (4, c), (2 * c,)
    for field, array, shape in zip(weights._fields, weights, shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"{name}: {field} {array.shape} must be {shape}, for a field of {sizes}.")
