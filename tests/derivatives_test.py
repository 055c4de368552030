"""Linear functions with their transposes, and what layers make of them: forward mode, and gradients without scatter."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import kernels, models, testing
from equivit.derivatives import linear, with_pullback
from equivit.layers import isotypic
from equivit.symmetry import fields, shifts
from equivit.symmetry.groups import OCTIC

X = np.random.default_rng(0).standard_normal((2, 6, 9, 3)).astype(np.float32)
BY = np.array([[1, 2], [5, -4]])


@with_pullback(lambda times, arrays, slope: (times * slope * arrays[1], times * slope * arrays[0]), static=(2,))
def product(x, y, times):
    return times * x * y


def test_a_pullback_is_the_gradient_and_all_other_derivatives_are_derived():
    def ours(x, y):
        return (jnp.sin(product(x, y, 2)) * x).sum()

    def plain(x, y):
        return (jnp.sin(2 * x * y) * x).sum()

    x, y = X[0, 0], X[0, 1]
    functions = [
        lambda f: jax.jit(jax.grad(f, (0, 1)))(x, y),
        lambda f: jax.jvp(f, (x, y), (y, x)),
        lambda f: jax.hessian(f, 1)(x, y),
        lambda f: jax.vmap(jax.grad(f), (0, None))(X[0], X[0, 0]),
        lambda f: jax.vmap(lambda x: jax.jvp(f, (x, y), (x, y))[1], 2)(np.moveaxis(X[0], 0, 2)),
        lambda f: jax.grad(jax.checkpoint(f), 1)(x, y),
        lambda f: jax.grad(lambda y: jax.lax.scan(lambda c, x: (c + f(x, y), None), 0.0, X[0])[0])(x),
    ]
    for of in functions:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), of(ours), of(plain))


def test_the_given_transpose_is_what_runs():
    """A wrong one shows: it is called in reverse mode, and nowhere else."""

    def doubled(x):
        return linear(lambda _, x: 2 * x, lambda _, y: 7 * y, (), x)

    assert doubled(1.5) == 3 and jax.jvp(doubled, (1.0,), (1.0,))[1] == 2
    assert jax.vjp(doubled, 1.0)[1](1.0) == (7,)


def rolled(x, by):
    return jnp.stack([jnp.roll(a, tuple(s), (0, 1)) for a, s in zip(x, by, strict=True)])


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lambda x: shifts.roll(x, jnp.asarray(BY)), lambda x: rolled(x, BY)),
        (lambda x: shifts.component(x, jnp.asarray(BY), (2, 3)), lambda x: rolled(x, -BY)[:, ::2, ::3]),
        (lambda x: shifts.polyphase_up(x, jnp.asarray(BY), 2), lambda x: rolled(jax.lax.pad(x, 0.0, PADS), BY)),
    ],
    ids=["roll", "component", "polyphase_up"],
)
def test_moving_a_map_has_no_scatter_in_its_gradient(ours, plain):
    def of(f):
        cube = jax.jit(lambda x: (f(x) ** 3).sum())
        several = jax.vmap(jax.grad(cube))(np.stack([X, 2 * X]))
        return cube(X), jax.grad(cube)(X), jax.jvp(cube, (X,), (X[::-1],)), several

    for mine, theirs in zip(of(ours), of(plain), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, theirs)
    assert "scatter" not in jax.jit(jax.grad(lambda x: (ours(x) ** 3).sum())).lower(X).as_text()


PADS = ((0, 0, 0), (0, 1, 1), (0, 1, 1), (0, 0, 0))

SMALL = {
    "swin": ("swin_t", dict(width=16, depths=(2, 2), num_heads=(1, 2), window_size=(4, 4), patch_size=2)),
    "cvt": ("cvt_13", dict(widths=(16, 24), depths=(1, 1), num_heads=(1, 2), kernels=(7, 3), strides=(4, 2))),
    "mvit": ("mvitv2_t", dict(width=16, depths=(1, 1))),
    "vit": ("vit_s16", dict(width=32, depth=1, num_heads=2, patch_size=8)),
    "octic": ("octic_vit_s16", dict(family="D8", width=64, depth=1, num_heads=2, patch_size=8)),
}
SMALL["cvt"][1]["paddings"] = (2, 1)


def loss(name, **options):
    """A function of parameters and images, and the parameters."""
    variant, config = SMALL[name]
    model = testing.randomise(models.abstract(variant, num_classes=5, **config | options), jax.random.key(0))
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def function(parameters, images):
        return jnp.sin(nnx.merge(graph, parameters, rest)(images)).sum()

    return function, parameters


@pytest.mark.parametrize("name", [name for name in SMALL if name != "swin"])
def test_models_have_forward_mode_derivatives(name):
    """Adaptive models contain all operations of ordinary ones; `test_both_modes_agree` covers Swin."""
    function, parameters = loss(name, adaptive=True)
    both = (parameters, jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32))
    assert jax.eval_shape(lambda both: jax.jvp(function, both, both)[1], both).shape == ()


@pytest.mark.slow
def test_both_modes_agree():
    """The derivative along a direction is the gradient times it, but for the rounding of some layers in float32."""
    function, parameters = loss("swin", adaptive=True, depths=(2, 1))
    images = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    direction = jax.tree.map(lambda p: np.cos(np.arange(p.size, dtype=p.dtype)).reshape(p.shape), parameters)

    @jax.jit
    def both(*arguments):
        slopes, along = jax.grad(function, (0, 1))(*arguments), (direction, images[::-1])
        products = jax.tree.leaves(jax.tree.map(jnp.vdot, slopes, along))
        return jax.jvp(function, arguments, along)[1], sum(products)

    forward, backward = both(parameters, images)
    assert abs(forward) > 1e-3
    np.testing.assert_allclose(forward, backward, rtol=1e-3)


@pytest.mark.parametrize("name", list(SMALL))
def test_no_map_is_scattered_into(name):
    """In the gradient of an adaptive model for a GPU: the sums that are left are those of tables of positions.

    Axes of maps are multiples of the batch, 11.
    """
    function, parameters = loss(name, adaptive=True)
    traced = jax.jit(jax.grad(function, (0, 1))).trace(parameters, jax.ShapeDtypeStruct((11, 32, 32, 3), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    ends = [re.compile(r"\}\) : \(tensor<([0-9x]*)x").search(text, at.start()) for at in re.finditer(SCATTER, text)]
    into = [[int(size) for size in end[1].split("x")] for end in ends]
    print(name, into)
    assert not any(size % 11 == 0 for sizes in into for size in sizes)


SCATTER = '"stablehlo.scatter"'


@pytest.mark.parametrize("name", ["gelu", "Mlp", "Attention", "LayerNorm"])
def test_octic_layers_have_second_derivatives(name):
    """At a width for which there are kernels: Hessian times vector in three ways, and by XLA alone."""
    x = fields.from_dense(jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 256)), jnp.float32), OCTIC)
    options = dict(gelu=(), Mlp=(256, 256), Attention=(256, 2), LayerNorm=(256,))[name]
    layer = getattr(isotypic, name)
    layer = layer(*options, group=OCTIC, rngs=nnx.Rngs(0)) if options else layer

    def of(x):
        return (layer(x).lines ** 2).sum()

    def twice(x):
        forward = jax.jvp(jax.grad(of), (x,), (x,))[1]
        dot = jax.grad(lambda y: sum(map(jnp.vdot, jax.tree.leaves(jax.grad(of)(y)), jax.tree.leaves(x))))(x)
        return forward, dot, jax.grad(lambda y: jax.jvp(of, (y,), (x,))[1])(x)

    found = jax.jit(twice)(x)
    with kernels.using("xla"):
        expected = jax.jit(lambda x: jax.jvp(jax.grad(of), (x,), (x,))[1])(x)
    for one in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), one, expected)
