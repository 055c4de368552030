"""The norm of a field: its derivatives by hand are those of its definition."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from kernels import norm
from kernels.norm import Norm, reference
from tests.drawing import normal

NORM = Norm(eps=0.3, row_weight=0.7)  # both matter
TOLERANCE = dict(rtol=1e-12, atol=1e-12)  # float64: means of 5 and 10 channels
FIELDS = {"octic": [(4, 2, 7, 5), (2, 2, 7, 10)], "flip": [(2, 7, 5)], "no tokens": [(4, 2, 0, 5), (2, 2, 0, 10)]}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def draw(shapes, seed=0):
    return tuple(2 + normal(*shape, dtype="float64", seed=seed + i) for i, shape in enumerate(shapes))


@pytest.mark.parametrize("shapes", FIELDS.values(), ids=FIELDS)
def test_every_derivative_is_that_of_the_definition(shapes):
    field, slope = draw(shapes), draw(shapes, seed=5)

    def derivatives(function):
        def inner(field):
            return sum((jnp.sin(y) * s).sum() for y, s in zip(function(field, NORM), slope, strict=True))

        y, pull = jax.vjp(lambda field: function(field, NORM), field)
        along = jax.jvp(lambda field: function(field, NORM), (field,), (slope,))
        twice = jax.jvp(jax.grad(inner), (field,), (slope,))
        return (
            y,
            pull(slope),
            along,
            twice,
            jax.vmap(jax.grad(inner))(jax.tree.map(lambda a: jnp.stack([a, 3 * a]), field)),
        )

    chex.assert_trees_all_close(derivatives(norm.standardise), derivatives(reference.standardise), **TOLERANCE)


def test_a_scale_and_a_bias_are_applied():
    field = draw(FIELDS["octic"])
    scales, bias = (normal(4, 5, dtype="float64"), normal(10, dtype="float64")), normal(5, dtype="float64")
    values = (functools.partial(function, norm=NORM) for function in (norm.normalise, reference.normalise))
    found, expected = (
        jax.value_and_grad(lambda *a, f=f: sum(jnp.sin(y).sum() for y in f(*a)), (0, 1, 2)) for f in values
    )
    chex.assert_trees_all_close(found(field, scales, bias), expected(field, scales, bias), **TOLERANCE)


def test_the_dtype_is_the_field_s_and_the_sums_are_float32():
    field = tuple(a.astype(jnp.bfloat16) for a in draw(FIELDS["octic"]))
    y, pull = jax.vjp(lambda field: norm.standardise(field, NORM), field)
    assert {a.dtype for a in (*y, *pull(y)[0])} == {jnp.dtype("bfloat16")}
    wide = reference.standardise(tuple(a.astype(jnp.float32) for a in field), NORM)
    chex.assert_trees_all_equal(y, tuple(a.astype(jnp.bfloat16) for a in wide))


@pytest.mark.parametrize(("platform", "stores"), [("cuda", True), ("cpu", False)])
def test_a_gpu_stores_what_both_passes_read(platform, stores):
    """The deviation forward, and the projection backward; otherwise the passes over lines and planes read both."""
    gradient = jax.jit(jax.grad(lambda field: sum(jnp.sin(y).sum() for y in norm.standardise(field, NORM))))
    text = gradient.trace(draw(FIELDS["octic"])).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("optimization_barrier") == 2 * stores
