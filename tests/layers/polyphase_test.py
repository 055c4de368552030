"""Phases of strided convolutions on a torus: every one of them by brute force in NumPy, and the arithmetic saved."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from equivit import costs
from equivit.layers import polyphase

RNG = np.random.default_rng(0)
norms = jax.jit(polyphase.embedding_norms, static_argnums=(3, 4))
lattice_norms = jax.jit(polyphase.lattice_norms, static_argnums=1)


def everywhere(x, kernel, padding=(0, 0)):
    """A convolution at every position: [B, H, W, C] -> [B, H, W, D].  Its first tap lies `padding` back."""
    taps = itertools.product(range(kernel.shape[0]), range(kernel.shape[1]))
    return sum(np.roll(x, (padding[0] - i, padding[1] - j), (1, 2)) @ kernel[i, j] for i, j in taps)


def by_hand(y, stride):
    """The norm of all that a stride keeps of a map, for each phase."""
    parts = [y[:, p :: stride[0], q :: stride[1]] for p, q in np.ndindex(*stride)]
    return np.stack([np.linalg.norm(part.reshape(len(y), -1), axis=1) for part in parts], 1)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((8, 12), (4, 4), (4, 4), (0, 0)),  # Swin's patches
        ((12, 20), (7, 7), (4, 4), (2, 2)),  # CvT's
        ((8, 12), (7, 7), (4, 4), (3, 3)),  # MViTv2's
        ((6, 10), (3, 3), (2, 2), (1, 1)),
        ((6, 10), (2, 2), (2, 2), (0, 0)),
        ((9, 10), (3, 4), (3, 2), (0, 1)),  # odd sides, and nothing the same for both axes
        ((6, 8), (2, 7), (1, 4), (1, 3)),
        ((4, 8), (4, 4), (4, 4), (0, 0)),  # one block of pixels along an axis
        ((4, 4), (7, 7), (4, 4), (3, 3)),  # and along both, less than a patch
        ((2, 2), (3, 3), (2, 2), (1, 1)),
        ((32, 48), (16, 16), (16, 16), (0, 0)),  # a ViT's patches
    ],
    ids=str,
)
def test_norms_of_all_phases(size, kernel, stride, padding):
    x, bias = RNG.normal(size=(2, *size, 3)), RNG.normal(size=5)
    kernel = RNG.normal(size=(*kernel, 3, 5))
    with jax.enable_x64(True):
        found = norms(x, kernel, bias, stride, padding)
    expected = by_hand(everywhere(x, kernel, padding) + bias, stride)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.ptp(expected, 1).min() > 1e-3 * expected.max()  # else an order of phases would show nothing
    if any(padding):
        assert not np.allclose(by_hand(everywhere(x, kernel) + bias, stride), expected, rtol=1e-3)


def test_norms_are_at_least_in_float32():
    """A bfloat16 model distinguishes patches as finely as a float32 model."""
    x, kernel, bias = (RNG.normal(size=s).astype(ml_dtypes.bfloat16) for s in ((2, 8, 12, 3), (4, 4, 3, 5), (5,)))
    wide = [a.astype(np.float64) for a in (x, kernel, bias)]
    found = norms(x, kernel, bias, (4, 4), (0, 0))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_hand(everywhere(*wide[:2]) + wide[2], (4, 4)), rtol=1e-6)
    found = lattice_norms(x, (4, 2))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_hand(wide[0], (4, 2)), rtol=1e-6)


def test_black_images_have_the_norm_of_the_bias():
    x, kernel, bias = np.zeros((1, 8, 8, 3)), RNG.normal(size=(4, 4, 3, 5)), RNG.normal(size=5)
    with jax.enable_x64(True):
        np.testing.assert_allclose(norms(x, kernel, bias, (4, 4), (0, 0)), 2 * np.linalg.norm(bias), rtol=1e-12)
        np.testing.assert_array_equal(norms(x, kernel, 0 * bias, (4, 4), (0, 0)), 0)


@pytest.mark.parametrize("stride", [(2, 2), (3, 1), (9, 4)])
def test_norms_of_lattices(stride):
    x = RNG.normal(size=(2, 9 * (2 if stride[0] == 2 else 1), 8, 3))
    with jax.enable_x64(True):
        np.testing.assert_allclose(lattice_norms(x, stride), by_hand(x, stride), rtol=1e-12)


def products(function, *shapes):
    return costs.count(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).macs


@pytest.mark.parametrize(("side", "padding", "width"), [(4, 0, 96), (7, 2, 64), (7, 3, 96)])
def test_arithmetic_of_choosing_a_phase_of_patches(side, padding, width):
    """At most a third of the convolution at stride 1, which the definition takes."""
    kernel, definition = (side, side, 3, width), 224 * 224 * side * side * 3 * width
    found = products(
        lambda x, k, b: polyphase.embedding_norms(x, k, b, (4, 4), (padding, padding)),
        (1, 224, 224, 3),
        kernel,
        (width,),
    )
    assert found <= definition / 3
    if side == 4:
        assert 26e6 < found < 27e6 and 231e6 < definition < 232e6  # as its docstring has it


def test_choosing_a_phase_of_large_patches():
    """Products of all pairs of pixels with weights for each phase would take a ViT 755 M multiply-adds and 3 GB."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 224, 224, 3), (16, 16, 3, 384), (384,))]
    found = costs.count(lambda x, k, b: polyphase.embedding_norms(x, k, b, (16, 16)), *shapes)
    assert found.macs <= 224 * 224 * 16 * 16 * 3 * 384 / 12
    assert norms.lower(*shapes, (16, 16), (0, 0)).compile().memory_analysis().temp_size_in_bytes < 48 * 2**20
