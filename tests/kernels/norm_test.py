"""The norm of a field: its derivatives by hand are those of its definition."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from equivit.kernels import norm
from equivit.kernels.norm import Norm, reference
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


@functools.partial(jax.jit, static_argnums=0)
def derivatives(function, field, slope):
    """Values and derivatives of all modes of a function from a field to a field, or a pair of them."""
    slopes = jax.tree.map(lambda y: jnp.cos(3 * jnp.arange(y.size)).reshape(y.shape), jax.eval_shape(function, field))

    def inner(field):
        pairs = zip(*map(jax.tree.leaves, (function(field), slopes)), strict=True)
        return sum((jnp.sin(y) * s).sum() for y, s in pairs)

    y, pull = jax.vjp(function, field)
    along = jax.jvp(function, (field,), (slope,))
    twice = jax.jvp(jax.grad(inner), (field,), (slope,))
    batched = jax.vmap(jax.grad(inner))(jax.tree.map(lambda a: jnp.stack([a, 3 * a]), field))
    return y, pull(slopes), along, twice, batched


PAIRS = {
    "standardise": (norm.standardise, reference.standardise),
    "fork": (functools.partial(norm.fork, dtype="float64"), lambda x, norm: (x, reference.standardise(x, norm))),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shapes", FIELDS.values(), ids=FIELDS)
def test_every_derivative_is_that_of_the_definition(shapes, name):
    field, slope = draw(shapes), draw(shapes, seed=5)
    found, expected = (derivatives(functools.partial(f, norm=NORM), field, slope) for f in PAIRS[name])
    chex.assert_trees_all_close(found, expected, **TOLERANCE)


def test_a_fork_s_gradients_have_the_dtypes_of_its_results():
    field = tuple(a.astype(jnp.float32) for a in draw(FIELDS["octic"]))
    (same, y), pull = jax.vjp(lambda field: norm.fork(field, NORM, jnp.bfloat16), field)
    chex.assert_trees_all_equal(same, field)
    assert {a.dtype for a in y} == {jnp.dtype("bfloat16")}
    (alone,), (both,) = pull((jax.tree.map(jnp.zeros_like, field), y)), pull((field, y))
    assert {a.dtype for a in both} == {jnp.dtype("float32")}
    chex.assert_trees_all_equal(both, tuple(a + b for a, b in zip(field, alone, strict=True)))


def test_a_scale_and_a_bias_are_applied():
    field = draw(FIELDS["octic"])
    scales, bias = (normal(4, 5, dtype="float64"), normal(10, dtype="float64")), normal(5, dtype="float64")
    values = (functools.partial(function, norm=NORM) for function in (norm.normalise, reference.normalise))
    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: sum(jnp.sin(y).sum() for y in f(*a)), (0, 1, 2))) for f in values
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
