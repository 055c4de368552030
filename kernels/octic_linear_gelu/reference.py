"""The first linear map of an octic MLP and its GELU in plain jnp: the definition."""

import jax

from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.isotypic_linear import linear


def octic_linear_gelu(
    lines: jax.Array, planes: jax.Array, *weights: jax.Array, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """GELU of the linear map with w_lines, w_planes and bias; `implementation` as in `d8_gelu`."""
    w_lines, w_planes, bias = weights
    h = linear((lines, planes), ((w_lines, w_planes), bias))
    with jax.named_scope("activation"):
        return d8_gelu(*h, implementation=implementation)
