"""Invariantizations are invariant under every element, differentiable at zero, and stable at ties."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import testing
from equivit.layers import invariants
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC
from tests.symmetry.fields_test import random_field

WIDTH = 32
CASES = [(OCTIC, kind) for kind in invariants.KINDS] + [
    (FLIP, kind) for kind in invariants.KINDS if kind not in ("polynomial", "triple_correlation")
]
ALL = pytest.mark.parametrize("group,kind", CASES, ids=lambda v: getattr(v, "name", v))


def create(group, kind):
    return invariants.create(kind, WIDTH, group=group, rngs=nnx.Rngs(0))


def turned(g, field):
    """Moved on the host: JAX would compile a program for each element and shape."""
    return jax.device_put(fields.act_on_channels(g, jax.device_get(field)))


@ALL
def test_is_invariant(group, kind):
    """Canonisation and max filtering choose; random inputs are far from ties (checked below)."""
    layer, x = create(group, kind), random_field(group, (1, 64), WIDTH // group.order)
    upright = layer(x)
    chex.assert_shape(upright, (2, 64, layer.out_features))
    for g in group.elements:
        y = layer(turned(g, x))
        chex.assert_trees_all_close(y, upright, rtol=0, atol=1e-5 * float(jnp.abs(upright).max()))


@ALL
def test_tells_different_tokens_apart(group, kind):
    """Not constant: two random tokens differ."""
    y = create(group, kind)(random_field(group, (1, 2), WIDTH // group.order))
    assert float(jnp.abs(y[:, 0] - y[:, 1]).max()) > 1e-2


@ALL
def test_gradient_at_zero_is_finite(group, kind):
    x = jax.tree.map(lambda a: jax.device_put(np.zeros_like(a)), random_field(group, (1, 2), WIDTH // group.order))
    layer = create(group, kind)
    chex.assert_tree_all_finite(jax.jit(jax.grad(lambda x: layer(x).sum()))(x))


def test_choices_are_clear_on_random_inputs():
    """The share of tokens whose two best elements are within 1e-5 relative; the rest is where choices are tested."""
    layer, x = create(OCTIC, "canonisation"), random_field(OCTIC, (1, 4096), WIDTH // 8)
    moved = jnp.stack([fields.to_dense(fields.act_on_channels(g, x)) for g in OCTIC.elements])
    scores = jnp.sort((moved * layer.reference[...]).sum(-1), axis=0)
    close = (scores[-1] - scores[-2]) < 1e-5 * jnp.abs(scores[-1])
    print(f"tokens too close to call: {float(close.mean()):.2e}")
    assert float(close.mean()) < 1e-3


@pytest.mark.parametrize("kind", ["canonisation", "max_filtering"])
@pytest.mark.parametrize("stabiliser", ["m", "rr", "mr", "r"])
def test_exact_ties(kind, stabiliser):
    """A token that an element leaves as it is ties with itself: the result must not depend on the orientation."""
    x = random_field(OCTIC, (1, 16), WIDTH // 8)
    orbit, g = x, stabiliser
    while g != "e":
        orbit = jax.tree.map(jnp.add, orbit, turned(g, x))
        g = OCTIC.product(stabiliser, g)
    layer = create(OCTIC, kind)
    upright = layer(orbit)
    for g in OCTIC.elements:
        chex.assert_trees_all_close(layer(turned(g, orbit)), upright, rtol=0, atol=1e-5)


def test_absolute_values_of_all_components_are_not_invariant():
    """The official "NonInvariant": |E| still turns, and that must be caught."""
    x = random_field(OCTIC, (2, 2), 4)

    def wrong(field):
        return jnp.abs(fields.to_dense(field)).mean(-2)

    with pytest.raises(AssertionError, match="octic element 'r'"):
        testing.assert_equivariant(wrong, OCTIC, x, "field", "invariant", grid=(2, 2))


def test_unknown_and_impossible_kinds_are_refused():
    with pytest.raises(ValueError, match="invariantization 'power' is not one of linear"):
        create(OCTIC, "power")
    with pytest.raises(ValueError, match="only for the octic group, not for flip; power_spectrum works for both"):
        create(FLIP, "polynomial")


@pytest.mark.parametrize(("group", "kind"), CASES)
def test_an_array_is_refused(group, kind):
    layer = invariants.create(kind, 16, group=group, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"^{type(layer).__name__}: x is an array \[2, 3, 16\] .*fields.from_dense"):
        layer(jnp.ones((2, 3, 16)))


@pytest.mark.parametrize(("group", "kind"), CASES)
def test_a_field_of_the_other_group_is_refused(group, kind):
    layer, other = create(group, kind), FLIP if group is OCTIC else OCTIC
    with pytest.raises(ValueError, match=f"x is a field of the {other.name} group; the layer is of the {group.name}"):
        layer(random_field(other, (1, 2), WIDTH // other.order))


@pytest.mark.parametrize("size", [300, 1e-4])
def test_norms_in_float16_neither_overflow_nor_underflow(size):
    x = random_field(OCTIC, (1, 4), WIDTH // 8)
    x = jax.tree.map(lambda leaf: jnp.full_like(leaf, size, jnp.float16), x)
    norms = create(OCTIC, "power_spectrum")(x)[..., WIDTH // 2 :]
    assert norms.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(norms, float), size * np.sqrt(2), rtol=0.01)


@pytest.mark.parametrize(("group", "kind"), CASES)
def test_a_field_of_another_width_is_refused(group, kind):
    with pytest.raises(ValueError, match=f"has width {2 * WIDTH}; the layer reads {WIDTH}"):
        create(group, kind)(random_field(group, (1, 4), 2 * WIDTH // group.order))
