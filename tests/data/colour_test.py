"""Changes of colour against independent formulas, their rates over 10,000 draws, and the device's."""

import colorsys

import jax
import numpy as np
import pytest
from PIL import Image

from equivit.data import colour, device_colour

DRAWS = 10_000
RATES = colour.Rates((0.4, 0.3, 0.2, 0.1), jitter_rate=0.8, grey=0.2, blur=0.9, solarise=0.3)


def pixels_of(height=23, width=31, channels=3, seed=0):
    """Smooth on the left and noise on the right, with black, white and grey pixels."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height, width, channels), np.uint8)
    smooth = np.asarray(image_of(rng.integers(0, 256, (3, 4, channels), np.uint8)).resize((width // 2, height)))
    noise[:, : width // 2] = smooth.reshape(height, width // 2, channels)
    noise[0, :3], noise[1, :3], noise[2, :4] = 0, 255, [[77], [128], [127], [1]]
    return noise


def image_of(pixels):
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def greys_of(pixels):
    """ITU-R 601 with weights of 16 bits, float64 [H, W, 1]."""
    if pixels.shape[-1] == 1:
        return pixels.astype(float)
    return np.floor(pixels @ np.array([19595, 38470, 7471]) / 65536 + 0.5)[..., None]


def blended(pixels, base, factor):
    return np.clip(np.floor(base + factor * (pixels - base)), 0, 255)


def jitter(name, value, pixels):
    return colour.changed(image_of(pixels), colour.Changes(((name, value),)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("factor", [0.0, 0.625, 1.0, 1.40625])
def test_brightness_contrast_and_saturation_blend_with_black_the_mean_grey_and_greys(channels, factor):
    pixels = pixels_of(channels=channels)
    greys = greys_of(pixels)
    bases = {"brightness": 0.0, "contrast": np.floor(greys.mean() + 0.5), "saturation": greys}
    for name, base in bases.items():
        assert np.array_equal(jitter(name, factor, pixels), blended(pixels.astype(float), base, factor)), name
    assert channels == 3 or np.array_equal(jitter("saturation", factor, pixels), pixels)


@pytest.mark.parametrize("share", [0.1, -0.1, 0.5, -0.37])
def test_hue_moves_in_hsv_of_eight_bits_and_goes_round(share):
    """By colorsys in float64, each of the three cut to 8 bits on the way.  A hue on a step may be cut to the one below:
    such pixels are left out, and seen to be few."""
    pixels = pixels_of()
    ours, compared = jitter("hue", share, pixels), 0
    for pixel, found in zip(pixels.reshape(-1, 3), ours.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        if pixel.max() > pixel.min() and abs(255 * hue - round(255 * hue)) < 1e-6:
            continue
        hue = (int(255 * hue) + int(255 * share)) % 256
        expected = colorsys.hsv_to_rgb(hue / 255, int(255 * saturation + 1e-9) / 255, value)
        assert np.array_equal(np.round(255 * np.array(expected)), found), (pixel, found)
        compared += 1
    assert compared > 0.95 * pixels[..., 0].size and not np.array_equal(ours, pixels)
    grey = pixels_of(channels=1)
    assert np.array_equal(jitter("hue", share, grey), grey)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_solarise(channels):
    pixels = pixels_of(channels=channels)
    grey = colour.changed(image_of(pixels), colour.Changes(grey=True))
    assert grey.dtype == np.uint8 and np.array_equal(grey, np.broadcast_to(greys_of(pixels), pixels.shape))
    solarised = colour.changed(image_of(pixels), colour.Changes(solarise=True))
    assert np.array_equal(solarised, np.where(pixels.astype(int) < 128, pixels, 255 - pixels.astype(int)))
    assert np.array_equal(colour.changed(image_of(pixels), colour.Changes()), pixels)


def convolved(pixels, sigma):
    """81 products at each pixel, in float64."""
    height, width, _ = pixels.shape
    weights = np.exp(-np.square(np.arange(-4, 5) / sigma) / 2)
    rows, columns = (np.abs(np.arange(-4, side + 4)) for side in (height, width))
    rows, columns = np.minimum(rows, 2 * (height - 1) - rows), np.minimum(columns, 2 * (width - 1) - columns)
    around = pixels.astype(float)[rows][:, columns]
    total = sum(weights[i] * weights[j] * around[i : i + height, j : j + width] for i in range(9) for j in range(9))
    return total / weights.sum() ** 2


@pytest.mark.parametrize("sigma", [0.1, 0.31, 0.5, 0.77, 1.3, 2.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_blur_is_a_convolution_with_nine_taps_rounded_once(sigma, channels):
    """Off by 0.5 at most, and by what float32 errs on values up to 255: some 1e-4."""
    pixels = pixels_of(channels=channels)
    ours = colour.changed(image_of(pixels), colour.Changes(sigma=sigma))
    assert ours.dtype == np.uint8 and np.abs(ours - convolved(pixels, sigma)).max() < 0.5 + 1e-4
    assert np.array_equal(ours, pixels) == (sigma == 0.1)
    wrong = {1.3: 1.4, 2.0: 2.1}.get(sigma, sigma + 0.2)
    assert np.abs(ours - convolved(pixels, wrong)).max() > 1


def test_a_blur_of_an_image_smaller_than_its_reach_keeps_flat_colours():
    pixels = np.full((1, 3, 3), 77, np.uint8)
    assert np.array_equal(colour.blurred(pixels, 2.0), pixels)


def assert_rate(count, rate, draws=DRAWS):
    assert abs(count / draws - rate) < 4 * np.sqrt(rate * (1 - rate) / draws), (count / draws, rate)


@pytest.fixture(scope="module")
def drawn():
    return [colour.draw(np.random.default_rng([3, i]), RATES) for i in range(DRAWS)]


def test_rates_of_all_changes(drawn):
    assert_rate(sum(bool(changes.jitter) for changes in drawn), 0.8)
    assert_rate(sum(changes.grey for changes in drawn), 0.2)
    assert_rate(sum(changes.sigma > 0 for changes in drawn), 0.9)
    assert_rate(sum(changes.solarise for changes in drawn), 0.3)
    assert_rate(sum(changes.grey and changes.solarise for changes in drawn), 0.06)  # apart from each other
    sigmas = np.array([changes.sigma for changes in drawn if changes.sigma])
    assert sigmas.min() >= 0.1 and sigmas.max() <= 2
    assert_rate((sigmas < 0.1 + 1.9 / 4).sum(), 0.25, len(sigmas))


def test_jitter_has_every_order_and_uniform_values(drawn):
    jitters = [changes.jitter for changes in drawn if changes.jitter]
    orders = [tuple(name for name, _ in jitter) for jitter in jitters]
    assert len(set(orders)) == 24
    for order in set(orders):
        assert_rate(orders.count(order), 1 / 24, len(orders))
    middles = dict(brightness=1.0, contrast=1.0, saturation=1.0, hue=0.0)
    for (name, middle), strength in zip(middles.items(), RATES.jitter, strict=True):
        values = np.array([dict(jitter)[name] for jitter in jitters])
        assert np.abs(values - middle).max() <= strength + 2**-13  # values are whole numbers of 2^-12
        for share in (0.25, 0.5, 0.75):
            assert_rate((values < middle - strength + 2 * share * strength).sum(), share, len(values))


def test_what_has_no_strength_is_left_out_and_factors_are_not_negative():
    for seed in range(50):
        changes = colour.draw(np.random.default_rng(seed), RATES._replace(jitter=(3.0, 0.0, 0.2, 0.0), jitter_rate=1))
        assert sorted(name for name, _ in changes.jitter) == ["brightness", "saturation"]
        assert 0 <= dict(changes.jitter)["brightness"] <= 4
    assert colour.draw(np.random.default_rng(0), colour.Rates((0.4,) * 4, 0, 0, 0, 0)) == colour.Changes()


apply = jax.jit(device_colour.apply)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_device_changes_colours_as_the_host_does(channels):
    """Crops [4, 6] with everything on.  Only ties of the blur and hues on a step may differ (see the module)."""
    rates = RATES._replace(jitter_rate=0.9, grey=0.2, blur=0.5, solarise=0.5)
    without_hue = rates._replace(jitter=(0.4, 0.3, 0.2, 0.0))
    pixels = np.stack([pixels_of(channels=channels, seed=seed) for seed in range(24)])
    changes = [colour.draw(np.random.default_rng(seed), (rates, without_hue)[seed % 2]) for seed in range(24)]
    host = np.stack([colour.changed(image_of(each), drawn) for each, drawn in zip(pixels, changes, strict=True)])
    numbers = colour.packed(changes)
    device = np.asarray(apply(pixels.reshape(4, 6, *pixels.shape[1:]), numbers.reshape(4, 6, -1)))
    assert device.dtype == np.uint8
    error = np.abs(device.reshape(pixels.shape).astype(int) - host)
    turned = np.array(["hue" in dict(drawn.jitter) for drawn in changes]) & (channels == 3)
    blurred = np.array([drawn.sigma > 0 for drawn in changes])
    assert (~turned & ~blurred).sum() > 4 and error[~turned & ~blurred].max() == 0 and error[~turned].max() <= 1
    assert (error[~turned] > 0).mean() < 1e-3
    assert (error > 2).mean() < 1e-3 and error.max() <= 12  # 6 levels, which contrast and saturation may stretch
    shown = numbers.copy()
    shown[:, :4] = numbers[:, 3::-1]  # another order is another picture
    other = np.asarray(apply(pixels.reshape(4, 6, *pixels.shape[1:]), shown.reshape(4, 6, -1)))
    assert (np.abs(other.reshape(pixels.shape).astype(int) - host) > 2).mean() > 0.1


def test_the_device_differs_in_hues_on_a_step_alone():
    """One step of hue on all colours of 16 levels a channel, and on those that are multiples of 5."""
    levels = np.stack([np.arange(16) * 17, np.arange(16) * 5])
    pixels = np.stack([np.stack(np.meshgrid(row, row, row), -1).reshape(64, 64, 3) for row in levels]).astype(np.uint8)
    pixels = pixels[:, : 23 * 2 : 2, : 31 * 2 : 2]
    changes = colour.Changes((("hue", 0.25),))
    host = np.stack([colour.changed(image_of(each), changes) for each in pixels]).astype(int)
    device = np.asarray(device_colour.JITTERS["hue"](pixels.astype(np.float32), np.float32(0.25)))
    value, chroma = pixels.max(-1).astype(int), np.ptp(pixels.astype(int), -1)
    hues = np.array([colorsys.rgb_to_hsv(*pixel)[0] for pixel in (pixels / 255).reshape(-1, 3)]).reshape(value.shape)
    step = (np.abs(255 * hues - np.round(255 * hues)) < 1e-6) & (chroma > 0)
    error = np.abs(device - host).max(-1)
    assert error[~step].max() == 0 and error[step].max() <= 6 and 0.0 < (error > 0).mean() < 0.5
