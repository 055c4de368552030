"""Each augmentation against PIL on fixed images, and its rates over 10,000 draws.

Rates are compared within 5 standard deviations of a binomial (or a mean): a right rate would fail once in two million.
"""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from equivit.data import augment, crops, rand_augment, reading, transforms
from equivit.data.config import CROPS

DRAWS = 10_000


def image_of(height=37, width=50, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    small = rng.integers(40, 216, (height // 4, width // 4, channels), dtype=np.uint8)
    return reading.decode(small, channels).resize((width, height), Image.Resampling.BICUBIC)


def generators(count=DRAWS):
    return (np.random.default_rng([7, i]) for i in range(count))


def assert_rate(count, rate, draws=DRAWS):
    assert abs(count / draws - rate) < 5 * np.sqrt(rate * (1 - rate) / draws)


def equal(first, second):
    return np.array_equal(np.asarray(first), np.asarray(second))


class Fixed:
    """A generator that gives the same answers again and again."""

    def __init__(self, integers=0, uniform=None):
        self._integers, self._uniform = integers, uniform

    def integers(self, *_):
        return self._integers

    def uniform(self, low, high):
        return low if self._uniform is None else self._uniform


def test_boxes_of_random_resized_crop_have_the_asked_area_and_aspect():
    boxes = np.array([crops.random_resized_box(rng, 300, 400, (0.08, 1.0), (3 / 4, 4 / 3)) for rng in generators()])
    top, left, height, width = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 300).all() and (left + width <= 400).all()
    area, aspect = height * width / (300 * 400), width / height
    assert area.min() > 0.075 and aspect.min() > 0.74 and aspect.max() < 1.35  # sides are rounded to pixels
    # Small boxes always fit, so below a share of 0.5 the area is uniform.
    small = (area < 0.5).sum()
    assert_rate((area < 0.29).sum(), 0.5, small)
    assert_rate((aspect[area < 0.5] < 1).sum(), 0.5, small)


@pytest.mark.parametrize(("size", "expected"), [((10, 400), (0, 193, 10, 13)), ((400, 10), (193, 0, 13, 10))])
def test_an_image_too_long_for_any_box_gives_the_largest_centred_one(size, expected):
    for rng in generators(20):
        assert crops.random_resized_box(rng, *size, (0.9, 1.0), (3 / 4, 4 / 3)) == expected


def test_a_clipped_box_is_drawn_once():
    """MAE's crop without retries: mean area 0.52 at 375 x 500, where ten tries have 0.43 (both by simulation)."""
    rng = np.random.default_rng(0)
    for draw, mean in ((crops.clipped_random_box, 0.52), (crops.random_resized_box, 0.43)):
        boxes = np.array([draw(rng, 375, 500, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(4000)])
        top, left, height, width = boxes.T
        assert min(top.min(), left.min()) >= 0 and (top + height).max() <= 375 and (left + width).max() <= 500
        assert abs((height * width / (375 * 500)).mean() - mean) < 0.015  # 5 standard errors, and half a digit
    image = image_of()
    box = crops.clipped_random_box(np.random.default_rng(3), 37, 50, (0.9, 1.0), (3 / 4, 4 / 3))
    crop = crops.random_resized_crop(
        np.random.default_rng(3), image.size, 16, 24, scale=(0.9, 1.0), ratio=(3 / 4, 4 / 3), clipped=True
    )
    assert equal(crop(image), crops.resize(crops.cut(image, box), 16, 24))


def test_random_resized_crop_is_pil_crop_and_bicubic_resize():
    image, rng = image_of(), np.random.default_rng(3)
    box = crops.random_resized_box(np.random.default_rng(3), 37, 50, (0.3, 0.8), (3 / 4, 4 / 3))
    cropped = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    ours = crops.random_resized_crop(rng, image.size, 16, 24, scale=(0.3, 0.8), ratio=(3 / 4, 4 / 3))(image)
    assert equal(ours, cropped.resize((24, 16), Image.Resampling.BICUBIC))


def test_simple_random_crop_reflects_four_pixels():
    image = image_of(32, 40)
    padded = np.pad(np.asarray(image), ((4, 4), (4, 4), (0, 0)), mode="reflect")
    for rng, again in zip(generators(10), generators(10), strict=True):
        top, left = int(again.integers(40 - 32 + 1)), int(again.integers(48 - 32 + 1))
        assert equal(crops.simple_random_crop(rng, image.size, 32, 32)(image), padded[top : top + 32, left : left + 32])


def test_padded_crop_adds_four_black_pixels_and_reaches_every_place():
    image = Image.fromarray(np.full((6, 9), 255, np.uint8))
    shifts = set()
    for rng in generators(2000):
        pixels = np.asarray(crops.padded_crop(rng, 6, 9)(image))
        assert pixels.shape == (6, 9)
        shifts.add(((pixels.any(1) > 0).argmax(), (pixels.any(1)).sum(), (pixels.any(0)).argmax(), pixels.any(0).sum()))
    assert len(shifts) == 81  # 9 x 9 places


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_three_augment_is_one_of_pil_grey_solarise_blur(choice):
    image = image_of()
    expected = (
        ImageOps.grayscale(image).convert("RGB"),
        ImageOps.solarize(image, 128),
        image.filter(ImageFilter.GaussianBlur(1.3)),
    )[choice]
    assert equal(augment.three_augment(image, Fixed(choice, 1.3)), expected)


def test_three_augment_takes_each_as_often_as_the_others():
    image = Image.fromarray(np.array([[[200, 0, 0], [200, 0, 0]]], np.uint8))  # even: a blur leaves it alone
    grey, solarised = [60, 60, 60], [55, 0, 0]
    counts = {"grey": 0, "solarised": 0, "blurred": 0}
    for rng in generators():
        value = np.asarray(augment.three_augment(image, rng))[0, 0].tolist()
        counts["grey" if value == grey else "solarised" if value == solarised else "blurred"] += 1
    for count in counts.values():
        assert_rate(count, 1 / 3)


def test_colour_jitter_applies_pil_enhancers_in_the_order_drawn():
    image = expected = image_of()
    names = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for index, factor in augment.draw_jitter(np.random.default_rng(5), 0.3):
        expected = names[index](expected).enhance(factor)
    ours = augment.colour_jitter(image, np.random.default_rng(5), 0.3)
    assert equal(ours, expected) and not equal(ours, image)


def test_colour_jitter_draws_every_order_and_uniform_factors():
    drawn = [augment.draw_jitter(rng, 0.3) for rng in generators()]
    orders = [tuple(index for index, _ in draw) for draw in drawn]
    assert len(set(orders)) == 6
    for order in set(orders):
        assert_rate(orders.count(order), 1 / 6)
    factors = np.array([[factor for _, factor in draw] for draw in drawn])
    assert factors.min() >= 0.7 and factors.max() <= 1.3
    assert_rate((factors[:, 0] < 0.85).sum(), 0.25)


def test_erasing_boxes_have_the_asked_area_and_aspect():
    boxes = [augment.erasing_box(rng, 120, 200) for rng in generators()]
    area = np.array([box.height * box.width / (120 * 200) for box in boxes])
    aspect = np.array([box.height / box.width for box in boxes])
    assert area.min() > 0.018 and area.max() < 0.345 and aspect.min() > 0.28 and aspect.max() < 3.6
    fits = area < 0.15  # smaller boxes nearly always fit at once
    assert_rate((area[fits] < 0.085).sum(), 0.5, fits.sum())
    assert all(box.top + box.height <= 120 and box.left + box.width <= 200 for box in boxes)


def test_erased_pixels_are_standard_normal_after_normalisation():
    pixels, mean, std = np.full((200, 300, 3), 77, np.uint8), np.array([0.5, 0.45, 0.55]), np.array([0.1, 0.12, 0.08])
    erased, rng = [], np.random.default_rng(0)
    for _ in range(5):
        result = augment.random_erasing(pixels, rng, 1.0, mean, std)
        changed = (result != 77).any(-1)
        rows, columns = changed.any(1).nonzero()[0], changed.any(0).nonzero()[0]
        erased.append(result[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].reshape(-1, 3))
    noise = (np.concatenate(erased) / 255 - mean) / std
    assert (pixels == 77).all()  # the original is left alone
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 / np.sqrt(len(noise)))
    np.testing.assert_allclose(noise.std(0), 1, atol=0.02)  # rounding to whole grey levels adds under 0.1 %


def test_rate_of_random_erasing():
    pixels = np.full((8, 8, 1), 255, np.uint8)
    changed = [(augment.random_erasing(pixels, rng, 0.25, 0.5, 0.01) != 255).any() for rng in generators()]
    assert_rate(sum(changed), 0.25)


def pil_operations(image, level, sign):
    """The operations as PIL has them, written from timm's description at magnitude 10 * level."""
    width, height = image.size
    affine = {"method": Image.Transform.AFFINE, "resample": Image.Resampling.BICUBIC, "fillcolor": (9, 8, 7)}
    factor = max(0.1, 1 + sign * 0.9 * level)
    pixels = np.asarray(image).astype(int)
    return {
        "auto_contrast": ImageOps.autocontrast(image),
        "equalize": ImageOps.equalize(image),
        "invert": 255 - pixels,
        "rotate": image.rotate(sign * 30 * level, Image.Resampling.BICUBIC, fillcolor=(9, 8, 7)),
        "posterize": ImageOps.posterize(image, 4 - int(4 * level)),
        "solarize": np.where(pixels < 256 - int(256 * level), pixels, 255 - pixels),
        "solarize_add": np.where(pixels < 128, np.minimum(255, pixels + int(110 * level)), pixels),
        "colour": ImageEnhance.Color(image).enhance(factor),
        "contrast": ImageEnhance.Contrast(image).enhance(factor),
        "brightness": ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": ImageEnhance.Sharpness(image).enhance(factor),
        "shear_x": image.transform((width, height), data=(1, sign * 0.3 * level, 0, 0, 1, 0), **affine),
        "shear_y": image.transform((width, height), data=(1, 0, 0, sign * 0.3 * level, 1, 0), **affine),
        "translate_x": image.transform((width, height), data=(1, 0, sign * 0.45 * level * width, 0, 1, 0), **affine),
        "translate_y": image.transform((width, height), data=(1, 0, 0, 0, 1, sign * 0.45 * level * height), **affine),
    }


@pytest.mark.parametrize("name", rand_augment.OPERATIONS)
@pytest.mark.parametrize(("level", "sign"), [(0.9, 1), (0.55, -1)])
def test_operations_of_rand_augment_are_pils(name, level, sign):
    image = image_of()
    ours = rand_augment.OPERATIONS[name](image, level, sign, (9, 8, 7))
    assert equal(ours, pil_operations(image, level, sign)[name])
    assert not equal(ours, image)


@pytest.mark.parametrize("name", rand_augment.OPERATIONS)
def test_operations_of_rand_augment_take_grey_images_at_full_magnitude(name):
    assert rand_augment.OPERATIONS[name](image_of(channels=1), 1.0, 1, 128).size == (50, 37)


def test_rates_of_rand_augment():
    policy = rand_augment.parse("rand-m9-mstd0.5-inc1", (128, 128, 128))
    drawn = [policy.draw(rng) for rng in generators()]
    applied = [operation for draw in drawn for operation in draw]
    names, levels, signs = zip(*applied, strict=True)
    assert set(names) == set(rand_augment.OPERATIONS) and len(rand_augment.OPERATIONS) == 15
    for name in rand_augment.OPERATIONS:
        assert_rate(names.count(name), 0.5 / 15, 2 * DRAWS)
    for count, rate in enumerate((0.25, 0.5, 0.25)):
        assert_rate(sum(len(draw) == count for draw in drawn), rate)
    assert_rate(signs.count(1), 0.5, len(signs))
    levels = np.array(levels)
    assert levels.max() == 1.0 and abs(np.median(levels) - 0.9) < 0.005
    assert_rate((levels < 0.85).sum(), 0.1587, len(levels))  # one standard deviation below


@pytest.mark.parametrize(
    "spec", ["auto-m9-inc1", "rand-m9", "rand-m11-inc1", "rand-mx-inc1", "rand-z3-inc1", "rand-n0-inc1", ""]
)
def test_other_specs_of_rand_augment_are_refused(spec):
    with pytest.raises(ValueError, match="must be like 'rand-m9-mstd0.5-inc1'"):
        rand_augment.parse(spec, (0,))


def test_rate_of_flips_and_that_flips_are_exact(section):
    transform = transforms.Train(section(image_size=(1, 2), augment={"flip": 0.3}), channels=1)
    image = Image.fromarray(np.array([[10, 20]], np.uint8))
    flipped = [transform({"image": image}, rng)["image"][0, 0, 0] == 20 for rng in generators()]
    assert_rate(sum(flipped), 0.3)


def test_octic_draws_each_of_eight_orientations_and_maps_turn_with_their_image(section):
    pixels = np.array([[10, 60, 30], [200, 90, 40], [7, 8, 9]], np.uint8)
    example = {"image": Image.fromarray(pixels), "map": Image.fromarray(pixels.astype(np.int32))}
    known = [np.rot90(each, k).tobytes() for each in (pixels, pixels.T) for k in range(4)]
    transform = transforms.Train(section(image_size=(3, 3), augment={"octic": True}), channels=1)
    rows = [transform(example, rng) for rng in generators(4000)]
    counts = np.bincount([known.index(row["image"][..., 0].tobytes()) for row in rows], minlength=8)
    for count in counts:
        assert_rate(count, 1 / 8, 4000)
    assert all(np.array_equal(row["image"][..., 0], row["map"]) for row in rows)
    with pytest.raises(ValueError, match=r"data.train_image_size=\(3, 5\) must be square for .*octic=True, as \(5, 5"):
        transforms.Train(section(image_size=(3, 3), train_image_size=(3, 5), augment={"octic": True}), channels=1)


@pytest.mark.parametrize("crop", ["none", "pad"])
def test_an_image_of_the_right_size_is_not_resampled(section, crop, monkeypatch):
    config = section(image_size=(37, 50), mean=(0.5,) * 3, std=(0.2,) * 3, augment={"crop": crop})
    image = image_of()
    monkeypatch.setattr(Image.Image, "resize", None)  # would fail if called
    pixels = transforms.Train(config, 3)({"image": image}, np.random.default_rng(0))["image"]
    assert pixels.shape == (37, 50, 3) and pixels.dtype == np.uint8
    assert crop == "pad" or equal(pixels, image)
    assert equal(transforms.Evaluation(config)({"image": image})["image"], image)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_crop_with_everything_on_gives_the_size_and_depends_on_the_generator_alone(section, crop, channels):
    config = section(image_size=(24, 40), augment="everything")
    config.augment.crop = crop
    transform, image = transforms.Train(config, channels), image_of(channels=channels)
    first, second, other = (transform({"image": image}, np.random.default_rng(s))["image"] for s in (1, 1, 2))
    assert first.shape == (24, 40, channels) and first.dtype == np.uint8
    assert equal(first, second) and not equal(first, other)


def test_the_centre_crop_of_training_is_that_of_evaluation(section):
    """At the size of training images; only the flip is random."""
    options = dict(crop_ratio=0.8, interpolation="bilinear", image_size=(28, 36))
    evaluated = transforms.Evaluation(section(**options))
    for height, width in ((100, 64), (40, 90)):
        image = image_of(height, width)
        expected = evaluated({"image": image})["image"]
        transform = transforms.Train(section(**options, augment={"crop": "centre", "flip": 0.5}), channels=3)
        found = {transform({"image": image}, rng)["image"].tobytes() for rng in generators(20)}
        assert found == {expected.tobytes(), expected[:, ::-1].tobytes()}
        options["image_size"], options["train_image_size"] = (50, 50), (28, 36)


def test_circular_shifts_are_uniform_up_to_their_share_of_each_side(section):
    """A marked pixel shows the offset: -3 to 3 rows of 6, and -4 to 4 columns of 9 (half of it, 4.5, rounded)."""
    config = section(image_size=(6, 9), augment={"circular_shift": 0.5})
    pixels = np.zeros((6, 9), np.uint8)
    pixels[0, 0] = 255
    transform, image = transforms.Train(config, channels=1), Image.fromarray(pixels)
    rows = [transform({"image": image}, rng)["image"] for rng in generators(4000)]
    assert all(row.shape == (6, 9, 1) and row.sum() == 255 for row in rows)
    places = np.array([np.unravel_index(row.argmax(), row.shape)[:2] for row in rows])
    assert set(places[:, 0]) == set(range(6)) and set(places[:, 1]) == set(range(9))
    assert_rate((places[:, 0] == 3).sum(), 2 / 7, 4000)  # reached from both sides
    assert_rate((places[:, 0] == 5).sum(), 1 / 7, 4000)
    assert_rate((places[:, 1] == 5).sum(), 1 / 9, 4000)
    assert_rate(((places[:, 0] == 1) & (places[:, 1] == 4)).sum(), 1 / 63, 4000)  # the axes are independent


def test_a_circular_shift_is_last_and_changes_nothing_before(section):
    config, image = section(image_size=(24, 40), augment="everything"), image_of()
    shifted = transforms.Train(config, 3)({"image": image}, np.random.default_rng(1))["image"]
    config.augment.circular_shift = 0.0
    plain = transforms.Train(config, 3)({"image": image}, np.random.default_rng(1))["image"]
    found = [
        (down, right) for down, right in np.ndindex(24, 40) if equal(np.roll(plain, (down, right), (0, 1)), shifted)
    ]
    assert len(found) == 1 and found != [(0, 0)]


@pytest.mark.parametrize(
    ("size", "resized", "corner"),
    [((100, 300), (31, 93), (2, 28)), ((90, 64), (56, 40), (14, 2)), ((32, 40), (32, 40), (2, 2))],
)
def test_evaluation_covers_and_cuts_the_centre(section, size, resized, corner):
    image = image_of(*size)
    expected = np.asarray(image.resize(resized[::-1], Image.Resampling.BICUBIC))
    top, left = corner
    transform = transforms.Evaluation(section(image_size=(28, 36), crop_ratio=0.9))  # 31 x 40 is covered
    pixels = transform({"image": image})["image"]
    assert equal(pixels, expected[top : top + 28, left : left + 36])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": {"crop": "randomresized"}}, "nearest is 'random_resized'"),
        ({"augment": {"flip": 1.5}}, r"augment.flip=1.5 must be in \[0, 1\]"),
        ({"augment": {"circular_shift": 8.0}}, r"augment.circular_shift=8.0 must be in \[0, 1\]; the nearest is 1"),
        ({"augment": {"scale": (0.5, 0.2)}}, r"augment.scale=\(0.5, 0.2\) must be .smallest, largest."),
        ({"augment": {"scale": (0.5, 2.0)}}, r"augment.scale=.* must be two numbers in \(0, 1\]"),
        ({"augment": {"rand_augment": "rand-m9"}}, "rand_augment='rand-m9' must be like"),
        ({"augment": {"ratio": (0.0, 1.0)}}, "augment.ratio"),
        ({"augment": {"color_jitter": -1.0}}, "augment.color_jitter"),
        ({"mean": (0.5, 0.5)}, "mean=.* and config.data.std=.* must have one entry per channel"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.5)}, "mean=.* must hold 1 numbers"),
        ({"mean": (1.5,)}, r"mean=1.5 must be in \[0, 1\]"),
        ({"std": (0.0,)}, r"std=0.0 must be in \(0, 1\]"),
        ({"image_size": (8,)}, "image_size=.*height, width"),
        ({"image_size": (8, 0)}, "image_size=.*height, width"),
    ],
)
def test_impossible_values_are_refused(section, changes, message):
    with pytest.raises(ValueError, match=message):
        transforms.Train(section(**changes), channels=1)


def test_impossible_crop_ratio_is_refused(section):
    with pytest.raises(ValueError, match=r"crop_ratio=1.2 must be in \(0, 1\]"):
        transforms.Evaluation(section(crop_ratio=1.2))
