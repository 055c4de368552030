"""Strided convolutions at the phase with the largest norm: every form against NumPy, and the passes that each takes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from equivit import costs
from equivit.kernels.phases import Moments, at_largest, pool, token_moments
from equivit.kernels.phases.cpu import by_phase, convolved, filters
from equivit.symmetry import shifts

RNG = np.random.default_rng(0)
SIZES = [(6, 10), (2, 4), (4, 2)]


def everywhere(x, kernel, padding=(0, 0)):
    """A convolution at every position: [B, H, W, C] -> [B, H, W, D].  Its first tap lies `padding` back."""
    taps = itertools.product(range(kernel.shape[0]), range(kernel.shape[1]))
    return sum(np.roll(x, (padding[0] - i, padding[1] - j), (1, 2)) @ kernel[i, j] for i, j in taps)


def each_channel(x, kernel, padding):
    """A depthwise convolution at every position of maps [B, heads, H, W, C]."""
    taps = itertools.product(range(kernel.shape[0]), range(kernel.shape[1]))
    return sum(np.roll(x, (padding[0] - i, padding[1] - j), (2, 3)) * kernel[i, j, 0] for i, j in taps)


def parts(y, stride):
    """The phases of the last axes but one, [..., h, w, C], row-major."""
    return [y[..., p :: stride[0], q :: stride[1], :] for p, q in np.ndindex(*stride)]


def norms_of(*maps):
    """Per image, over all else."""
    return np.sqrt(sum(np.square(a).reshape(len(a), -1).sum(1) for a in maps))


@pytest.mark.parametrize("form", ["reference", "cpu", "gpu", "tpu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("taps", "padding"), [(2, (0, 0)), (3, (1, 1)), (3, (0, 2)), (3, (0, 0))])
def test_the_phase_with_the_largest_norm(taps, padding, size, form):
    """With a bias, and with the moments of a norm before the convolution, which differ everywhere."""
    x, kernel, bias = RNG.normal(size=(9, *size, 3)), RNG.normal(size=(taps, taps, 3, 5)), RNG.normal(size=5)
    moments = Moments(RNG.normal(size=(9, *size)), RNG.uniform(0.5, 2, (9, *size)), RNG.normal(size=5))
    run = functools.partial(at_largest, padding=padding, implementation=form)
    cases = (None, None), (bias, None), (bias, moments)
    with jax.enable_x64(True):
        every = jax.jit(lambda x, kernel, cases: [run(x, kernel, *case) for case in cases])(x, kernel, cases)
    for (b, m), (found, norms) in zip(cases, every, strict=True):
        y = everywhere(x, kernel, padding)
        y = y if m is None else (y - m.mean[..., None] * m.total) * m.scale[..., None]
        each = parts(y if b is None else y + b, (2, 2))
        expected = np.stack([norms_of(part) for part in each], 1)
        np.testing.assert_allclose(norms, expected, rtol=1e-12)
        best = expected.argmax(1)
        assert len(set(best)) > 1  # a form that always takes one phase would show
        np.testing.assert_allclose(found, np.stack(each)[best, np.arange(9)], rtol=0, atol=1e-12)


def test_auto_on_a_cpu_is_the_form_for_one():
    """All results are the same to the last bit."""
    x, kernel = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((3, 6, 10, 3), (3, 3, 3, 5)))
    depthwise = RNG.normal(size=(3, 3, 1, 3)).astype(np.float32)
    one = (jnp.ones(3), jnp.zeros(3))

    @functools.partial(jax.jit, static_argnums=0)
    def run(forms):
        at_a_phase, others = forms
        pooled = pool((x[:, None],), (depthwise,), (one,), stride=(2, 2), padding=(1, 1), implementation=others)
        return at_largest(x, kernel, implementation=at_a_phase), pooled, token_moments(x, implementation=others)

    jax.tree.map(np.testing.assert_array_equal, run(("auto", "auto")), run(("cpu", "reference")))


@pytest.mark.parametrize("form", ["reference", "cpu", "gpu", "tpu"])
@pytest.mark.parametrize(("taps", "padding"), [(2, (0, 0)), (3, (1, 1))])
def test_bfloat16_maps_follow_rolls(taps, padding, form):
    """Sums rounded to bfloat16 on the way would differ by 1e-3 from phase to phase, or at the seam."""
    x, kernel = (jnp.asarray(RNG.normal(size=s), jnp.bfloat16) for s in ((9, 6, 10, 64), (taps, taps, 64, 5)))
    run = jax.jit(functools.partial(at_largest, padding=padding, implementation=form))
    (y, norms), (rolled, rolled_norms) = (map(np.asarray, run(a, kernel)) for a in (x, jnp.roll(x, (1, 1), (1, 2))))
    np.testing.assert_allclose(rolled_norms[:, ::-1], norms, rtol=1e-6)
    carried = zip(y, *np.divmod(norms.argmax(1), 2), strict=True)  # from phase 1 to the next output of phase 0
    expected = np.stack([np.roll(one, (p, q), (0, 1)) for one, p, q in carried])
    np.testing.assert_allclose(rolled, expected, rtol=0, atol=1e-6 * np.abs(y).max())


@pytest.mark.parametrize("form", ["reference", "gpu", "tpu"])
@pytest.mark.parametrize(
    ("size", "stride", "taps", "padding"),
    [((8, 12), (4, 4), (3, 3), (1, 1)), ((6, 10), (2, 2), (3, 3), (1, 1)), ((6, 3), (2, 1), (2, 5), (0, 3))],
    ids=str,
)
def test_maps_pooled_at_one_phase(size, stride, taps, padding, form):
    """Two heads and two maps: the phase is that of all of them together."""
    rng = np.random.default_rng(0)
    maps = tuple(rng.normal(size=(9, 2, *size, 3)) for _ in range(2))
    kernels = tuple(rng.normal(size=(*taps, 1, 3)) for _ in range(2))
    affines = tuple((rng.uniform(1, 2, 3), rng.normal(size=3)) for _ in range(2))
    every = [
        parts(each_channel(x, kernel, padding) * factor + shift, stride)
        for x, kernel, (factor, shift) in zip(maps, kernels, affines, strict=True)
    ]
    expected = np.stack([norms_of(*phase) for phase in zip(*every, strict=True)], 1)
    with jax.enable_x64(True):
        found, norms = jax.jit(functools.partial(pool, stride=stride, padding=padding, implementation=form))(
            maps, kernels, affines
        )
    np.testing.assert_allclose(norms, expected, rtol=1e-12)
    best = expected.argmax(1)
    assert len(set(best)) > 1
    for a, phases in zip(found, every, strict=True):
        np.testing.assert_allclose(a, np.stack(phases)[best, np.arange(9)], rtol=0, atol=1e-12)
    alone = np.stack([norms_of(phase) for phase in every[0]], 1)
    assert (alone.argmax(1) != best).any()  # the first map alone would choose otherwise


@pytest.mark.parametrize("form", ["reference", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 97), (7, 1), (4, 384)], ids=str)
def test_moments_of_tokens(shape, dtype, form):
    """The mean is a thousand deviations, so that the mean square less the squared mean has no correct digit."""
    x = jnp.asarray(1e3 + RNG.normal(size=shape), dtype)
    mean, variance = jax.jit(functools.partial(token_moments, implementation=form))(x)
    exact = np.asarray(x, np.float64)
    assert mean.dtype == variance.dtype == jnp.float32 and mean.shape == shape[:-1]
    np.testing.assert_allclose(mean, exact.mean(-1), rtol=shape[-1] * 2**-24)  # each entry rounds the mean once
    # Deviations are rounded to a unit of the last place of the mean, 6e-5, and averaged.
    np.testing.assert_allclose(variance, exact.var(-1), rtol=1e-3, atol=1e-7)
    naive = jnp.square(x.astype(jnp.float32)).mean(-1) - jnp.square(mean)
    assert shape[-1] == 1 or abs(naive - exact.var(-1)).max() > 0.02


@pytest.mark.parametrize("form", ["gpu", "auto"])
def test_moments_of_tokens_have_the_reference_s_gradient(form):
    x, slopes = RNG.normal(size=(2, 3, 8)).astype(np.float32), RNG.normal(size=(2, 2, 3))

    def gradient(form):
        return jax.jit(jax.grad(lambda x: (jnp.stack(token_moments(x, implementation=form)) * slopes).sum()))(x)

    np.testing.assert_allclose(gradient(form), gradient("reference"), rtol=1e-6)


def test_gpus_read_tokens_once_for_their_moments():
    traced = jax.jit(token_moments).trace(jnp.zeros((2, 4, 6)))
    for platform, passes in (("cuda", 1), ("tpu", 2), ("cpu", 2)):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.reduce(") == passes


def test_accelerators_convolve_once_and_gpus_pool_at_one_phase():
    """Minimal filtering is for CPUs; only a GPU gathers.  Nothing is scattered."""
    x, kernel = jnp.zeros((2, 8, 6, 4)), jnp.zeros((3, 3, 4, 5))
    traced = jax.jit(at_largest).trace(x, kernel)
    for platform, products, convolutions in (("cuda", 0, 1), ("tpu", 0, 1), ("cpu", 16, 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (text.count("stablehlo.dot_general"), text.count("stablehlo.convolution")) == (products, convolutions)
        assert ('"stablehlo.gather"(' in text) == (platform == "cuda")
    pooled = jax.jit(functools.partial(pool, stride=(2, 2), padding=(1, 1)))
    one = (jnp.ones(()), jnp.zeros(()))
    traced = pooled.trace((x[:, None],), (jnp.zeros((3, 3, 1, 4)),), (one,))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count('"stablehlo.gather"(') == 18  # nine taps everywhere, which are reduced, and nine at the phase
    assert "stablehlo.convolution" not in text and "stablehlo.scatter" not in text


@pytest.mark.parametrize("form", ["reference", "gpu", "tpu"])
def test_devices_exchange_no_maps(form):
    """A gather that is indexed by map would collect those of all devices on each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("data",), ()))

    def program(function, shape, kernel):
        arrays = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=of) for s, of in ((shape, split), (kernel, whole)))
        return jax.jit(function, out_shardings=split).lower(*arrays).compile().as_text()

    def pooled(x, kernel):
        one = (jnp.ones(()), jnp.zeros(()))
        return pool((x,), (kernel,), (one,), stride=(2, 2), padding=(1, 1), implementation=form)

    largest = functools.partial(at_largest, implementation=form)
    number = 2 * len(jax.devices())
    for text in (
        program(largest, (number, 4, 6, 3), (2, 2, 3, 5)),
        program(pooled, (number, 2, 4, 6, 3), (3, 3, 1, 3)),
        program(lambda x, _: shifts.canonical(x), (number, 4, 6, 3), ()),
    ):
        assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@jax.jit
def filtered(x, kernel):
    """All phases in one array [2, 2, B, h/2, w/2, D]."""
    return jnp.array(convolved(x, filters(kernel)))


@pytest.mark.parametrize("size", [(6, 10), (2, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("taps", [2, 3])
def test_convolutions_at_all_phases(taps, size):
    x, kernel = RNG.normal(size=(2, *size, 3)), RNG.normal(size=(taps, taps, 3, 5))
    with jax.enable_x64(True):
        found, at = filtered(x, kernel), by_phase(jnp.asarray(everywhere(x, kernel)))
    np.testing.assert_allclose(found, at, rtol=0, atol=1e-12)
    for p, q in np.ndindex(2, 2):
        np.testing.assert_array_equal(at[p, q], everywhere(x, kernel)[:, p::2, q::2])


@pytest.mark.parametrize("taps", [2, 3])
def test_products_of_bfloat16_are_summed_in_float32(taps):
    """Small integers have exact products, and exact sums of thousands; bfloat16 would round them above 256."""
    x, kernel = RNG.integers(-8, 9, (1, 4, 6, 64)), RNG.integers(-3, 4, (taps, taps, 64, 3))
    found = filtered(x.astype(np.float32), kernel.astype(ml_dtypes.bfloat16))
    expected = everywhere(x, kernel)
    assert found.dtype == np.float32 and np.abs(expected).max() > 256 and (expected % 2 == 1).any()
    np.testing.assert_array_equal(found, np.asarray(by_phase(jnp.asarray(expected))))


@pytest.mark.parametrize(("taps", "share"), [(2, 9 / 16), (3, 4 / 9)])
def test_arithmetic_of_convolutions_at_all_phases(taps, share):
    """The transform of the kernel, of all taps once, is paid once for a map."""
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 56, 56, 96), (taps, taps, 96, 192)))
    found = costs.count(filtered, *shapes).macs
    definition = 56 * 56 * taps * taps * 96 * 192
    assert share <= found / definition < share + 0.02
