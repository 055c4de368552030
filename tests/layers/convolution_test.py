"""Convolutions against sums over their taps, of each index by itself; their sizes, seams, costs and types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, precision
from equivit.costs import Cost
from equivit.layers.convolution import Conv, DepthwiseConv, NormedConv, output_size

# (kernel, stride, padding, size of the map): the embeddings of CvT, then rows and columns with nothing in common; maps
# that the stride divides and that it does not, and one that is smaller than the padding.
CASES = [
    ((7, 7), (4, 4), (2, 2), (12, 8)),
    ((3, 3), (2, 2), (1, 1), (5, 6)),
    ((3, 2), (1, 3), (2, 0), (4, 7)),
    ((5, 3), (2, 1), (2, 1), (1, 4)),
]


def layer(depthwise, case, mode, bias=True):
    """A layer of 2 channels, to 4 unless it is depthwise; kernel and bias drawn by NumPy."""
    options = dict(zip(("kernel", "stride", "padding"), case, strict=False), mode=mode, bias=bias)
    make = (lambda r: DepthwiseConv(2, **options, rngs=r)) if depthwise else (lambda r: Conv(2, 4, **options, rngs=r))
    abstract, random = jax.eval_shape(lambda: make(nnx.Rngs(0))), np.random.default_rng(0)
    arrays = {n: random.normal(size=a.shape).astype(np.float32) for n, a in sorted(logical.take(abstract).items())}
    return logical.put(abstract, {name: jnp.asarray(array) for name, array in arrays.items()})


def maps(*shape):
    return np.random.default_rng(1).normal(size=(*shape, 2)).astype(np.float32)


def by_hand(layer, x):
    """Tap (a, b) of output (i, j) is at (i s - p + a, j s - p + b): modulo the size, or zero outside of the map."""
    kernel, (h, w) = np.asarray(layer.kernel[...], np.float64), x.shape[1:3]
    (kh, kw, each, width), (sh, sw), (ph, pw) = kernel.shape, layer.stride, layer.padding
    y = np.zeros((len(x), (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1, width))
    for i, j, a, b in np.ndindex(*y.shape[1:3], kh, kw):
        row, column = i * sh - ph + a, j * sw - pw + b
        if layer.mode == "circular" or (0 <= row < h and 0 <= column < w):
            taps, pixel = kernel[a, b], x[:, row % h, column % w]
            y[:, i, j] += pixel * taps[0] if each == 1 else pixel @ taps
    return y + np.asarray(layer.bias[...])


@pytest.mark.parametrize("depthwise", [False, True], ids=["dense", "depthwise"])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_over_taps(case, mode, depthwise):
    conv, x = layer(depthwise, case, mode), maps(2, *case[-1])
    y, expected = jax.jit(lambda conv, x: conv(x))(conv, x), by_hand(conv, x)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)  # float32 sums of at most 98 products near 1
    assert output_size(case[-1], *case[:3]) == y.shape[1:3]


def grouped(groups, kernel=(1, 1)):
    """A convolution of 6 channels to 12 in groups, drawn by NumPy, and maps for it."""
    make = lambda: Conv(6, 12, kernel=kernel, groups=groups, rngs=nnx.Rngs(0))  # noqa: E731
    random = np.random.default_rng(0)
    arrays = {n: random.normal(size=a.shape) for n, a in sorted(logical.take(jax.eval_shape(make)).items())}
    conv = logical.put(jax.eval_shape(make), {n: a.astype(np.float32) for n, a in arrays.items()})
    return conv, random.normal(size=(2, 3, 5, 6)).astype(np.float32)


@pytest.mark.parametrize("depthwise", [False, True], ids=["points", "depthwise"])
def test_accelerators_run_the_library_s_convolution(depthwise):
    """One operation, and on a CPU none."""
    conv, x = (layer(True, CASES[1], "zeros"), maps(1, 4, 6)) if depthwise else grouped(1)
    for platform, convolutions in (("cpu", 0), ("cuda", 1), ("tpu", 1)):
        text = jax.jit(lambda conv, x: conv(x)).trace(conv, x).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.convolution") == convolutions
        assert ("stablehlo.dot_general" in text) == (platform == "cpu" and not depthwise)


def test_any_batch_axes():
    conv, x = layer(True, CASES[1], "circular"), maps(2, 3, 5, 6)
    y = jax.jit(lambda conv, x: (conv(x), conv(x.reshape(6, 5, 6, 2)), conv(x[0, 0])))(conv, x)
    assert y[0].shape == (2, 3, 3, 3, 2)
    np.testing.assert_array_equal(y[0], y[1].reshape(y[0].shape))
    np.testing.assert_allclose(y[2], y[0][0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("depthwise", [False, True], ids=["dense", "depthwise"])
def test_costs(depthwise):
    """Each output and tap once, zeros included, and the sum with the bias; backward the same for map and kernel."""
    case = (*CASES[1][:3], (4, 6))
    conv, x = layer(depthwise, case, "zeros"), maps(5, 4, 6)
    products, outputs = 9 * (1 if depthwise else 2), 5 * 2 * 3 * (2 if depthwise else 4)
    counted = costs.count(lambda conv, x: conv(x), conv, x)
    assert counted["linear"] == Cost(products * outputs, outputs) and not counted.notes
    assert counted.macs == counted["linear"].macs
    both = jax.grad(lambda kernel, x: logical.put(conv, {"kernel": kernel})(x).sum(), (0, 1))
    assert costs.count(both, conv.kernel[...], x)["linear"].macs == 3 * counted.macs


@pytest.mark.parametrize("groups", [1, 3])
def test_costs_of_points(groups):
    conv, x = grouped(groups)
    products = 2 * 15 * 12 * 6 // groups
    assert costs.count(lambda conv, x: conv(x), conv, x)["linear"] == Cost(products, 2 * 15 * 12)
    both = jax.grad(lambda kernel, x: logical.put(conv, {"kernel": kernel})(x).sum(), (0, 1))
    assert costs.count(both, conv.kernel[...], x)["linear"].macs == 3 * products


def test_types():
    """As a patch embedding: the product in the type of the kernel, the sum in that of the bias."""
    with_bias, without = (precision.cast(layer(False, CASES[0], "circular", bias), "mixed") for bias in (True, False))
    x = maps(1, 12, 8)
    assert jax.eval_shape(with_bias, x).dtype == jnp.float32
    assert jax.eval_shape(without, x).dtype == jnp.bfloat16


def test_what_cannot_be():
    with pytest.raises(ValueError, match="DepthwiseConv: mode='circle' is not one of zeros, circular; the nearest is"):
        layer(True, CASES[0], "circle")
    with pytest.raises(ValueError, match="the width 2 of a map with padding 2 is smaller than the kernel, 7; .* 3"):
        jax.eval_shape(layer(False, CASES[0], "circular"), maps(1, 12, 2))


def test_a_normed_convolution_is_its_three_parts_and_halves_odd_maps_upwards():
    make = functools.partial(NormedConv, 4, 6, kernel=(3, 5), stride=(2, 2), groups=2, activation=jax.nn.relu)
    unit = make(rngs=nnx.Rngs(params=0))
    unit.norm.mean[...], unit.norm.bias[...] = np.arange(6) / 10, np.full(6, 0.3)
    unit.norm.variance[...], unit.norm.scale[...] = np.arange(1.0, 7.0), np.linspace(-1, 2, 6)
    x = np.random.default_rng(3).standard_normal((2, 7, 4, 4)).astype(np.float32)
    y = unit(x)
    assert y.shape == (2, 4, 2, 6) and unit.conv.bias is None and (np.asarray(y) == 0).any()
    np.testing.assert_array_equal(y, jax.nn.relu(unit.norm(unit.conv(x))))
    folded = unit.folded()
    assert folded.norm is None and unit.conv.bias is None
    np.testing.assert_allclose(folded(x), y, atol=1e-5)  # sums of 30 products of size 1, in another order
    bare = make(norm=False, rngs=nnx.Rngs(params=0))
    assert bare.norm is None and bare.conv.bias is not None
    with pytest.raises(ValueError, match="groups=4 must divide in_channels=4 and width=6; .* is 2"):
        NormedConv(4, 6, kernel=(1, 1), groups=4, rngs=nnx.Rngs(params=0))


def test_wrong_pairs_and_channels_are_refused():
    with pytest.raises(ValueError, match=r"Conv: kernel=3 must be a pair \(rows, columns\)"):
        Conv(3, 4, kernel=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="have 4 channels; a kernel .* with groups=1 reads 3"):
        Conv(3, 4, kernel=(3, 3), rngs=nnx.Rngs(0))(jnp.ones((1, 5, 5, 4)))
