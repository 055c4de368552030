"""The exact GELU, dense and octic: its derivatives, and that the backward pass begins from the input alone."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.d8_gelu.reference import d8_gelu
from equivit.kernels.gelu import exact_gelu
from equivit.layers import dense

RNG = np.random.default_rng(0)


def plain(x):
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@pytest.mark.parametrize("gelu", [dense.gelu, exact_gelu], ids=["dense", "of the kernels"])
def test_values_and_derivatives_are_those_of_the_formula_bit_for_bit(gelu):
    x = RNG.normal(size=1000).astype(np.float32) * 3

    def all_of(gelu, x):
        once, twice = jax.grad(gelu), jax.grad(jax.grad(gelu))
        return gelu(x), jax.vmap(once)(x), jax.vmap(twice)(x), jax.jvp(gelu, (x,), (jnp.cos(x),))

    chex.assert_trees_all_equal(all_of(gelu, x), all_of(plain, x))


def octic(reference, x):
    lines, planes = reference(x, x[:2].repeat(2, -1))
    return lines.sum() + planes.sum()


@pytest.mark.parametrize(
    ("gelu", "number"),
    [(dense.gelu, 2), (functools.partial(octic, d8_gelu), 2), (dense.recomputed(plain), 1)],
    ids=["dense", "octic", "by the formula"],
)
def test_the_backward_pass_has_an_erf_of_its_own(gelu, number):
    """XLA computes equal values of a program once; kept between, they are as large as the hidden field."""

    def both(x):
        y, pull = jax.vjp(gelu, x)
        return y, pull(jnp.ones_like(y))

    x = jax.ShapeDtypeStruct((4, 3, 5, 8), jnp.float32)
    assert jax.jit(both).lower(x).compile().as_text().count(" erf(") == number
