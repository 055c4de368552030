"""What the octic kernels do at one point: the fast Fourier pair of the group on eight values, and GELU.

Every function is plain arithmetic on arrays of one shape, so that it runs inside a Pallas kernel of any backend, in jnp
and in NumPy alike.  Components are in the order A1, A2, B1, B2, E11, E12, E21, E22 (Exy: copy x, row y of E).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

SCALE = math.sqrt(2) / 4

# erfc(z) = (A1 t + ... + A5 t^5) exp(-z^2) with t = 1 / (1 + P z), for z >= 0: Abramowitz and Stegun, 7.1.26, whose
# error is below 1.5e-7.  It needs no erf, which Mosaic GPU does not lower, and shares its exponential with the density.
P = 0.3275911 * math.sqrt(0.5)  # z = |x| / sqrt(2)
A1, A2, A3, A4, A5 = (c / 2 for c in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
DENSITY = 1 / math.sqrt(2 * math.pi)


def to_regular(components):
    """Inverse Fourier transform: eight components to the eight values on the group.  Source: octic ViTs, Listing 1."""
    a1, a2, b1, b2, e11, e12, e21, e22 = components
    a, b, c, d = a1 + a2, a1 - a2, b1 + b2, b1 - b2
    e, f, g, h = e11 + e12, e11 - e12, e21 + e22, e21 - e22
    ac, a_c, bd, b_d = a + c, a - c, b + d, b - d
    eh, e_h, fg, f_g = e + h, e - h, f + g, f - g
    values = (ac + eh, a_c + f_g, ac - eh, a_c - f_g, bd - fg, b_d - e_h, bd + fg, b_d + e_h)
    return tuple(SCALE * value for value in values)


def to_isotypic(values):
    """Fourier transform, the transpose and inverse of `to_regular`."""
    v0, v1, v2, v3, v4, v5, v6, v7 = (SCALE * value for value in values)
    ac, eh, a_c, f_g = v0 + v2, v0 - v2, v1 + v3, v1 - v3
    bd, fg, b_d, e_h = v4 + v6, v6 - v4, v5 + v7, v7 - v5
    a, c, b, d = ac + a_c, ac - a_c, bd + b_d, bd - b_d
    e, h, f, g = eh + e_h, eh - e_h, fg + f_g, fg - f_g
    return a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h


FOURIER = np.stack(to_regular(np.eye(8)))  # [8, 8], values on the group = FOURIER @ components


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, x Phi(x), of float32 values; within 5e-7 of it for all x."""
    return x * _distribution(x)[0]


def gelu_gradient(x: jax.Array) -> jax.Array:
    """The derivative Phi(x) + x phi(x) of the exact GELU, within 5e-7."""
    distribution, bell = _distribution(x)
    return distribution + x * (DENSITY * bell)


def _distribution(x):
    """Phi(x), the distribution of a standard normal variable, and exp(-x^2/2)."""
    bell = jnp.exp(-0.5 * (x * x))
    t = 1.0 / (1.0 + P * jnp.abs(x))
    tail = t * (A1 + t * (A2 + t * (A3 + t * (A4 + t * A5)))) * bell
    return jnp.where(x > 0, 1.0 - tail, tail), bell
