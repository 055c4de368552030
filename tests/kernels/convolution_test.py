"""The forms in which XLA:CPU computes convolutions fast: values and gradients are those of XLA's convolution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.convolution import convolve, wrap_pad
from equivit.kernels.convolution.cpu import TAPS_IN_A_SUM

# Kernel, stride, pads and size: odd and not square, pads that differ, rows that the stride leaves over, a single pixel.
SIZES = [
    ((3, 3), (1, 1), ((1, 1), (1, 1)), (5, 6)),
    ((3, 2), (2, 2), ((1, 0), (0, 1)), (7, 6)),
    ((2, 5), (3, 1), ((0, 0), (2, 2)), (8, 7)),
    ((1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
]
FORMS = {  # channels of x, of each group, of the result; groups
    "depthwise": (4, 1, 4, 4),
    "few channels": (3, 3, 5, 1),
    "many channels": (6, 6, 4, 1),
    "groups": (6, 2, 9, 3),
}


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def all_of(function, x, kernel):
    y, back = jax.vjp(function, x, kernel)
    return y, back(jnp.cos(y))


def assert_equal(found, expected, tolerance):
    """Relative to the largest entry: sums of up to 90 products in another order, and of as many outputs."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()), found, expected
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_reference(form, size, mode, platform):
    (channels, inner, width, groups), (kernel, stride, pads, maps) = FORMS[form], size
    x, kernel = drawn(2, *maps, channels), drawn(*kernel, inner, width)
    options = dict(stride=stride, pads=pads, mode=mode, groups=groups)

    @jax.jit
    def both(x, kernel):
        forms = (functools.partial(convolve, implementation=name, **options) for name in (platform, "reference"))
        return [all_of(f, x, kernel) for f in forms]

    assert_equal(*both(x, kernel), 4e-6)


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_many_taps_are_summed_in_parts(mode):
    x, kernel = drawn(1, 9, 10, 3), drawn(9, 9, 1, 3)
    assert kernel[..., 0, 0].size > TAPS_IN_A_SUM
    options = dict(pads=((4, 4), (4, 4)), mode=mode, groups=3)
    forms = [functools.partial(convolve, implementation=name, **options) for name in ("cpu", "reference")]
    assert_equal(*(jax.jit(functools.partial(all_of, f))(x, kernel) for f in forms), 4e-6)


@pytest.mark.parametrize("form", ["depthwise", "few channels"])
def test_in_bfloat16_a_sum_is_rounded_once(form):
    channels, inner, width, groups = FORMS[form]
    x, kernel = (a.astype(jnp.bfloat16) for a in (drawn(2, 5, 6, channels), drawn(3, 3, inner, width)))
    run = jax.jit(functools.partial(convolve, groups=groups, implementation="cpu"))
    exact = run(*(a.astype(jnp.float32) for a in (x, kernel)))
    assert run(x, kernel).dtype == jnp.bfloat16
    np.testing.assert_array_equal(run(x, kernel), exact.astype(jnp.bfloat16))


def test_channels_of_the_wrong_group_are_caught():
    """Groups of every third channel are others."""
    x, kernel = drawn(2, 3, 5, 6), drawn(1, 1, 2, 12)
    mixed = kernel.reshape(1, 1, 2, 4, 3).swapaxes(-1, -2).reshape(1, 1, 2, 12)
    y, other = (convolve(x, k, groups=3, implementation="cpu") for k in (kernel, mixed))
    assert np.abs(y - other).max() > 0.1


PROGRAMS = {  # the arguments of a convolution, and how many its program for a CPU has
    "depthwise": ((2, 5, 6, 4), (3, 3, 1, 4), dict(groups=4), 0),
    "one tap": ((2, 5, 6, 4), (1, 1, 4, 3), dict(), 0),
    "few channels by few taps": ((2, 5, 6, 3), (3, 3, 3, 4), dict(), 0),
    "many channels": ((2, 5, 6, 8), (3, 3, 8, 4), dict(), 1),
    "a large kernel": ((2, 8, 8, 3), (7, 7, 3, 4), dict(), 1),
    "around a torus": ((2, 5, 6, 8), (3, 3, 8, 4), dict(mode="circular"), 1),
    "depthwise around a torus": ((2, 5, 6, 4), (3, 3, 1, 4), dict(groups=4, mode="circular"), 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_which_program_has_which_form(name):
    x, kernel, options, on_cpu = PROGRAMS[name]
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, kernel))
    traced = jax.jit(functools.partial(convolve, **options)).trace(*arrays)
    for platform, convolutions in (("cpu", on_cpu), ("cuda", int(name != "depthwise around a torus")), ("tpu", 1)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.convolution") == convolutions
        assert "optimization_barrier" not in text or platform == "cpu"
        assert ("[0, -1]" in text) == (name == "around a torus" and platform == "cpu")  # a column more, cropped


def test_a_tpu_copies_edges_and_others_index_them():
    traced = jax.jit(functools.partial(wrap_pad, ends=((1, 1), (0, 2)))).trace(jnp.zeros((2, 5, 6, 3)))
    for platform, gathers in (("cpu", 2), ("cuda", 2), ("tpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count('"stablehlo.gather"(') == gathers
        assert ("stablehlo.concatenate" in text) == (platform == "tpu")


@pytest.mark.parametrize("size", [(5, 6), (2, 1)], ids=str)
def test_maps_around_a_torus_and_their_gradient(size):
    """Maps that are smaller than what lies around them, too."""
    x, pads = drawn(2, *size, 2), ((3, 1), (0, 2))

    def padded(x):
        return jnp.pad(x, [(0, 0), *pads, (0, 0)], mode="wrap")

    found, expected = (
        (f(x), jax.vjp(f, x)[1](jnp.cos(f(x)))[0]) for f in (functools.partial(wrap_pad, ends=pads), padded)
    )
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=2e-6)  # sums of up to 18 cosines
