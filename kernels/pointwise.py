"""Pointwise arithmetic of the octic kernels: the group's fast Fourier transform, its inverse, and the GELU.

Every function is plain arithmetic on arrays of one shape, so that it runs in a Pallas kernel of any backend, in jnp and
in NumPy.  Components are in the order A1, A2, B1, B2, E11, E12, E21, E22 (Exy: copy x, row y of E).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

SCALE = math.sqrt(2) / 4

# The upper tail of the normal distribution is 1 - Phi(a) = 2^p(a) for 0 <= a <= LARGEST; p is the minimax polynomial of
# degree 6 with p(0) = -1, found by linear programming on 1,500 points: the tail's error times max(a, 0.6) is 1.3e-7.
# It needs no erf, which Mosaic GPU cannot lower, no division and only one exponential: compiled for a Hopper GPU, an
# octic GELU takes a third fewer instructions than with Abramowitz and Stegun's 7.1.26.
LARGEST = 6.0  # where the tail is 1e-9; far beyond it the polynomial increases again
TAIL = (2.45608595e-5, -6.96318022e-4, 7.84691604e-3, -5.30603817e-2, -4.5902321e-1, -1.15112479, -1.0)
LOG2_DENSITY = (-0.5 / math.log(2), -0.5 * math.log2(2 * math.pi))  # log2 of phi(x) = this[0] x^2 + this[1]

# Phi(x) = (1 + tanh(x q(x^2))) / 2; q has these coefficients, highest first.  They minimise the error of x Phi(x) for
# |x| <= LARGEST, to 2.6e-5, found by linear programming on the linearised error at 4,001 points.  It takes half as many
# operations as the tail, and only one transcendental operation of the TPU.
TANH = (-3.51521626e-4, 3.70056638e-2, 7.97507874e-1)


def to_regular(components: Sequence[jax.Array] | np.ndarray) -> tuple[jax.Array, ...]:
    """Inverse Fourier transform: eight components to the eight values on the group.  Source: octic ViTs, Listing 1."""
    return tuple(SCALE * value for value in regular_sums(components))


def regular_sums(components: Sequence[jax.Array] | np.ndarray) -> tuple[jax.Array, ...]:
    """`to_regular` without its factor SCALE: sums and differences alone."""
    a1, a2, b1, b2, e11, e12, e21, e22 = components
    a, b, c, d = a1 + a2, a1 - a2, b1 + b2, b1 - b2
    e, f, g, h = e11 + e12, e11 - e12, e21 + e22, e21 - e22
    ac, a_c, bd, b_d = a + c, a - c, b + d, b - d
    eh, e_h, fg, f_g = e + h, e - h, f + g, f - g
    return ac + eh, a_c + f_g, ac - eh, a_c - f_g, bd - fg, b_d - e_h, bd + fg, b_d + e_h


def to_isotypic(values: Sequence[jax.Array] | np.ndarray) -> tuple[jax.Array, ...]:
    """Fourier transform, the transpose and inverse of `to_regular`."""
    return isotypic_sums([SCALE * value for value in values])


def isotypic_sums(values: Sequence[jax.Array] | np.ndarray) -> tuple[jax.Array, ...]:
    """`to_isotypic` without its factor SCALE: sums and differences alone."""
    v0, v1, v2, v3, v4, v5, v6, v7 = values
    ac, eh, a_c, f_g = v0 + v2, v0 - v2, v1 + v3, v1 - v3
    bd, fg, b_d, e_h = v4 + v6, v6 - v4, v5 + v7, v7 - v5
    a, c, b, d = ac + a_c, ac - a_c, bd + b_d, bd - b_d
    e, h, f, g = eh + e_h, eh - e_h, fg + f_g, fg - f_g
    return a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h


FOURIER = np.stack(to_regular(np.eye(8)))  # [8, 8], values on the group = FOURIER @ components


def octic_gelu(components: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The GELU of the values on the group, of eight components."""
    return to_isotypic([gelu(value) for value in to_regular(components)])


def octic_gelu_gradient(components: Sequence[jax.Array], gradients: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The gradient of the eight components, from them and the gradients of the results of `octic_gelu`."""
    pairs = zip(to_regular(components), to_regular(gradients), strict=True)
    return to_isotypic([gelu_gradient(value) * gradient for value, gradient in pairs])


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x Phi(x), of float32 values, with an error below 5e-7 for all x."""
    a, tail = _magnitude_and_tail(x)
    return jnp.maximum(x, 0.0) - a * tail


def double_gelu(u: jax.Array, scale: float) -> jax.Array:
    """2 gelu(scale u) / scale, with an error below 6e-5 / scale: less than bfloat16 rounds.

    The factors cost nothing here, and save one multiplication per argument and one per result.
    """
    square = jnp.minimum(u * u, (LARGEST / scale) ** 2)
    fifth, third, first = (c * scale**power for c, power in zip(TANH, (5, 3, 1), strict=True))
    return u * jnp.tanh(u * ((fifth * square + third) * square + first)) + u


def gelu_gradient(x: jax.Array) -> jax.Array:
    """The derivative Phi(x) + x phi(x) of the exact GELU, with an error below 5e-7."""
    _, tail = _magnitude_and_tail(x)
    density = jnp.exp2(LOG2_DENSITY[0] * (x * x) + LOG2_DENSITY[1])
    return jnp.where(x > 0, 1.0 - tail, tail) + x * density


def _magnitude_and_tail(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a = min(|x|, LARGEST), and 1 - Phi(a) of a normal variable."""
    a = jnp.minimum(jnp.abs(x), LARGEST)
    p = TAIL[0] * a + TAIL[1]
    for coefficient in TAIL[2:]:
        p = p * a + coefficient
    return a, jnp.exp2(p)
