"""Strided convolutions on a torus at the phase with the largest norm, and the moments of tokens for a norm before."""

import functools
from typing import NamedTuple

import jax

from equivit.kernels import dispatch
from equivit.kernels.phases import cpu, gpu, reference, tpu
from equivit.kernels.phases.reference import Affine, Maps, Pair

__all__ = ["KERNELS", "Moments", "at_largest", "pool", "token_moments"]

KERNELS = tuple(cpu.FILTERING)  # sides of the kernels that it takes


class Moments(NamedTuple):
    """A norm over the inputs of each output turns a convolution y into (y - mean total) scale.

    Shapes: mean and scale [B, h, w], at each output of stride 1; total [D].
    """

    mean: jax.Array
    scale: jax.Array
    total: jax.Array


def at_largest(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    moments: Moments | None = None,
    *,
    padding: Pair = (0, 0),
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The convolution of stride 2 at the phase (row, column) with the largest l2 norm, and the norms of all four.

    Output (i, j) at phase (p, q) has its first tap at row 2 i + p and column 2 j + q, less the padding.  Inputs are
    rounded to the dtype of the kernel, and on a GPU outputs too, once; all else is in at least float32.  For a
    gradient, differentiate the convolution at the phase chosen: the one of this would go through all four.

    Shapes: x [B, h, w, C], kernel [k, k, C, D], k 2 or 3, bias [D] -> [B, h/2, w/2, D] and [B, 4], phases row-major.

    Args:
      moments: of a norm before the convolution; None for no norm.
      implementation: "reference" computes the convolution at stride 1, and so do "gpu", without a copy of x, and "tpu",
        which takes a phase without a gather.  "cpu" needs fewer products, but passes over more memory.  All others are
        the platform's, and "cpu" where it has none.

    Raises:
      ValueError: an unknown implementation.
    """
    chosen, arguments = dispatch.resolve("at_largest", implementation), (x, kernel, bias, moments)
    forms = {"reference": reference, "cpu": cpu, "gpu": gpu, "tpu": tpu}
    forms = {name: functools.partial(of.at_largest, padding=padding) for name, of in forms.items()}
    if chosen in forms:
        return forms[chosen](*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=forms["gpu"], tpu=forms["tpu"], default=forms["cpu"])


def pool(
    maps: Maps,
    kernels: Maps,
    affines: tuple[Affine, ...],
    *,
    stride: Pair,
    padding: Pair,
    implementation: str = "auto",
) -> tuple[Maps, jax.Array]:
    """Depthwise convolutions at the phase with the largest l2 norm over all of them, and the norms of all phases.

    All heads share a kernel.  Output (i, j) at phase (p, q) has its first tap at row sh i + p and column sw j + q, less
    the padding.  Products have the dtype of the kernel, all else is in at least float32.  For a gradient, differentiate
    the convolutions at the phase chosen.

    Shapes: maps [B, heads, H, W, C] and kernels [kh, kw, 1, C], for each map -> [B, heads, H / sh, W / sw, C] for each,
    and [B, sh sw], phases row-major.

    Args:
      affines: (factor, shift) of the outputs of each convolution, which broadcast to [C].
      stride, padding: (rows, columns), of all convolutions.
      implementation: "reference" writes the convolutions at stride 1, and so does "tpu", which takes a phase without a
        gather; "gpu" writes the phase chosen alone.  All others are the platform's, and "reference" where it has none.

    Raises:
      ValueError: an unknown implementation.
    """
    chosen = dispatch.resolve("pool", implementation)
    arguments = (maps, kernels, affines)
    forms = {"reference": reference, "gpu": gpu, "tpu": tpu}
    forms = {name: functools.partial(of.pool, stride=stride, padding=padding) for name, of in forms.items()}
    if chosen in forms:
        return forms[chosen](*arguments)
    return jax.lax.platform_dependent(*arguments, cuda=forms["gpu"], tpu=forms["tpu"], default=forms["reference"])


def token_moments(x: jax.Array, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """The mean and variance of each token over its channels, in at least float32: [*B, C] -> [*B] and [*B].

    Args:
      implementation: "reference" reads x twice, "gpu" once; all others are "gpu" on an NVIDIA GPU, else "reference".

    Raises:
      ValueError: an unknown implementation.
    """
    chosen = dispatch.resolve("token_moments", implementation)
    forms = {"reference": reference.token_moments, "gpu": gpu.token_moments}
    if chosen in forms:
        return forms[chosen](x)
    return jax.lax.platform_dependent(x, cuda=forms["gpu"], default=forms["reference"])
