"""Pairs for segmentation: maps stay aligned with their images, crops balance classes, colours follow the formulas.

An image shows its own map: the grey level of label k is 20 k + 20, and black is VOID.  After any geometry the two must
agree wherever the map is constant as far as a filter reaches.
"""

import colorsys
import itertools

import numpy as np
import pytest
from PIL import Image

from equivit.data import augment, crops, loader, reading, transforms
from tests.data.contents import png

REACH = 4  # pixels: bilinear filters reach 1 pixel of the larger of both grids, here at most 2.5, and rounding adds one


def pair_of(height, width, seed=0):
    """Blocks of 24 x 24 pixels with labels 0 to 9, a part of them without a class."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(-1, 10, (-(-height // 24), -(-width // 24)))
    labels = np.kron(blocks, np.ones((24, 24), int))[:height, :width]
    return {
        "image": reading.decode((20 * labels[..., None] + 20).astype(np.uint8), 1),
        "map": reading.decode_map(labels),
    }


def inner(labels):
    """Where a map is constant over REACH pixels around; not at the border, for a filter sees what a crop leaves out."""
    side = 2 * REACH + 1
    around = np.lib.stride_tricks.sliding_window_view(np.pad(labels, REACH, constant_values=-2), (side, side))
    return around.min((2, 3)) == around.max((2, 3))


def assert_aligned(row, folder):
    """Fails with a picture of the pair: the image, its map, and in white where they differ."""
    shown = np.round(row["image"][..., 0] / 20).astype(int) - 1
    same, counted = shown == row["map"], inner(row["map"])
    if counted.sum() < 50 or not same[counted].all():
        levels = (20 * row["map"] + 20).astype(np.uint8)
        picture = np.hstack([row["image"][..., 0], levels, np.where(counted & ~same, 255, 0).astype(np.uint8)])
        Image.fromarray(picture).save(folder / "pair.png")
        raise AssertionError(f"{(counted & ~same).sum()} of {counted.sum()} pixels differ: {folder / 'pair.png'}")


GEOMETRIES = {
    "none": {"crop": "none"},
    "random_resized": {"crop": "random_resized", "scale": (0.4, 1.0)},
    "random_resized_clipped": {"crop": "random_resized_clipped", "scale": (0.4, 1.0)},
    "simple_random": {"crop": "simple_random"},
    "pad": {"crop": "pad"},
    "centre": {"crop": "centre"},
    "shifted": {"crop": "none", "circular_shift": 1.0},
    "scaled": {"crop": "scaled"},
    "scaled down": {"crop": "scaled", "fit_ratio": (0.5, 0.6)},  # always filled up
    "balanced": {"crop": "scaled", "max_share": 0.5},
    "everything": {"crop": "scaled", "max_share": 0.5, "circular_shift": 0.3},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("size", [(131, 170), (97, 83)])
def test_a_map_stays_aligned_with_its_image(section, tmp_path, name, size):
    config = section(
        image_size=(101, 119),
        fit=(170, 115),
        mean=(0.0,),
        interpolation="bilinear",
        augment={"flip": 0.5, **GEOMETRIES[name]},
    )
    transform, pair = transforms.Train(config, channels=1), pair_of(*size)
    rows = [transform(pair, np.random.default_rng(i)) for i in range(6)]
    for row, again in zip(rows, (transform(pair, np.random.default_rng(i)) for i in range(6)), strict=True):
        assert row["map"].shape == (101, 119) and row["map"].dtype == np.int32 and row["image"].shape == (101, 119, 1)
        assert all(np.array_equal(row[key], again[key]) for key in row)
        assert_aligned(row, tmp_path)
    assert len({row["map"].tobytes() for row in rows}) > 1


def test_a_pair_out_of_line_is_caught_and_shown(section, tmp_path):
    row = transforms.Train(section(image_size=(101, 119)), channels=1)(pair_of(101, 119), np.random.default_rng(0))
    for wrong in (np.roll(row["map"], REACH + 1, 0), row["map"][:, ::-1], np.full_like(row["map"], 3)):
        with pytest.raises(AssertionError, match=f"pixels differ: {tmp_path / 'pair.png'}"):
            assert_aligned({**row, "map": wrong}, tmp_path)
        with Image.open(tmp_path / "pair.png") as picture:
            assert picture.size == (3 * 119, 101)
        (tmp_path / "pair.png").unlink()


@pytest.mark.parametrize(
    ("size", "fit", "ratio", "expected"),
    [  # (width, height), as MMSegmentation gives them but turned round: (height, width)
        ((683, 512), (2048, 512), 1.0, (512, 683)),
        ((640, 480), (2048, 512), 1.0, (512, 683)),
        ((480, 640), (2048, 512), 1.0, (683, 512)),
        ((640, 480), (2048, 512), 0.5, (256, 341)),
        ((2000, 300), (2048, 512), 1.0, (307, 2048)),  # a long image: the longer side is the bound
        ((240, 180), None, 1.5, (270, 360)),
        ((300, 1), (100, 50), 1.0, (1, 100)),
    ],
)
def test_images_are_resized_to_fit(size, fit, ratio, expected):
    assert crops.fitted(size, fit, ratio) == expected


def test_the_scaled_crop_is_a_resize_and_a_cut(section):
    """All its ratios and places occur, and a place beyond the image is never cut."""
    image = pair_of(60, 90)["image"]
    sizes = set()
    for i in range(300):
        options = dict(fit=(80, 50), ratio=(0.5, 2.0), interpolation="bilinear")
        crop = crops.scaled_crop(np.random.default_rng(i), image, 40, 64, **options)(image)
        resized = crops.fitted(image.size, (80, 50), np.random.default_rng(i).uniform(0.5, 2.0))
        whole = np.asarray(image.resize(resized[::-1], Image.Resampling.BILINEAR))
        box = min(40, resized[0]), min(64, resized[1])
        windows = np.lib.stride_tricks.sliding_window_view(whole, box)
        found = np.argwhere((windows == np.asarray(crop)).all((2, 3))) if i < 20 else [(0, 0)]
        assert crop.size == box[::-1] and len(found)
        sizes.add(resized)
    assert min(sizes) == (25, 38) and max(sizes)[0] in (99, 100) and len(sizes) > 50


def test_smaller_images_are_filled_up_with_the_mean_colour_and_void(section):
    config = section(image_size=(40, 50), mean=(0.2, 0.4, 0.6), std=(0.2,) * 3)
    config.augment.update(crop="scaled", fit_ratio=(0.5, 0.5), photometric=True, flip=0.5)
    pair = {
        "image": reading.decode(np.full((30, 44, 3), 90, np.uint8), 3),
        "map": reading.decode_map(np.ones((30, 44), int)),
    }
    row = transforms.Train(config, channels=3)(pair, np.random.default_rng(0))
    outside = row["map"] == crops.VOID
    assert not outside[:15, :22].any() and outside[15:].all() and outside[:, 22:].all()  # below and on the right
    assert np.array_equal(np.unique(row["image"][outside], axis=0), [[51, 102, 153]])  # after changes of colour


def test_a_class_has_at_most_its_share_if_eleven_crops_find_one(section):
    """Class 1 is a corner, so few crops have enough of it: one of eleven has it with 1 - (1 - p)^11."""
    labels = np.zeros((48, 72), int)
    labels[:16, :16], labels[40:] = 1, crops.VOID
    pair = {"image": reading.decode(np.zeros((48, 72, 1), np.uint8), 1), "map": reading.decode_map(labels)}
    found = {}
    for limit in (1.0, 0.75):
        augment = {"crop": "scaled", "fit_ratio": (1.0, 1.0), "max_share": limit}
        transform = transforms.Train(section(image_size=(20, 24), augment=augment), channels=1)
        maps = [transform(pair, np.random.default_rng(i))["map"] for i in range(600)]
        found[limit] = np.mean([crops.largest_share(each) <= 0.75 for each in maps])
    windows = np.lib.stride_tricks.sliding_window_view(labels, (20, 24))
    p = np.mean([crops.largest_share(window) <= 0.75 for row in windows for window in row])
    for limit, rate in ((1.0, p), (0.75, 1 - (1 - p) ** 11)):
        assert 0.02 < rate < 0.98 and abs(found[limit] - rate) < 5 * np.sqrt(rate * (1 - rate) / 600)


def test_the_share_of_the_largest_class():
    assert crops.largest_share(np.array([[0, 0, 3], [3, 3, -1]])) == 0.6
    assert crops.largest_share(np.full((2, 3), crops.VOID)) == 1.0 == crops.largest_share(np.zeros((2, 3), int))


def in_hsv(pixel, saturation=1.0, degrees=0.0):
    hue, amount, value = colorsys.rgb_to_hsv(*pixel)  # of one pixel, by the standard library
    return colorsys.hsv_to_rgb((hue + degrees / 360) % 1, min(1.0, amount * saturation), value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("brightness", -20.5),
        ("contrast", 1.4),
        *itertools.product(["saturation"], [0.5, 1.5]),
        ("hue", -36.0),
        ("hue", 35.0),
    ],
)
def test_distortions_follow_their_formulas(name, value):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1, 300, 3)).astype(np.float32)
    pixels[0, :4] = [[0, 0, 0], [255, 255, 255], [7, 7, 7], [200, 200, 100]]  # no hue, and two channels alike
    expected = {
        "brightness": lambda: pixels + value,
        "contrast": lambda: pixels * value,
        "saturation": lambda: 255 * np.array([in_hsv(pixel, saturation=value) for pixel in pixels[0] / 255]),
        "hue": lambda: 255 * np.array([in_hsv(pixel, degrees=value) for pixel in pixels[0] / 255]),
    }[name]()
    found = np.moveaxis(augment.DISTORTIONS[name](np.moveaxis(pixels, -1, 0), value), 0, -1)
    expected = expected.reshape(pixels.shape)
    np.testing.assert_allclose(found, expected, atol=1e-3)  # of 255, in float32
    assert np.abs(found - pixels).max() > 10


def test_distortions_are_drawn_in_their_order_half_of_the_time():
    drawn = [augment.draw_distortion(np.random.default_rng(i)) for i in range(4000)]
    names = [tuple(name for name, _ in steps) for steps in drawn]
    allowed = [("brightness", "contrast", "saturation", "hue"), ("brightness", "saturation", "hue", "contrast")]
    for steps in set(names):
        assert any(tuple(name for name in order if name in steps) == steps for order in allowed)
    both = [steps for steps in names if {"contrast", "hue"} <= {*steps}]
    bounds = {"brightness": (-32, 32), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5), "hue": (-36, 36)}
    for share, count in (
        *((sum(name in steps for steps in names) / 4000, 4000) for name in bounds),
        (sum(steps.index("contrast") < steps.index("hue") for steps in both) / len(both), len(both)),
    ):
        assert abs(share - 0.5) < 5 * np.sqrt(0.25 / count)
    for name, (low, high) in bounds.items():
        values = [value for steps in drawn for key, value in steps if key == name]
        assert low <= min(values) < low + 0.01 * (high - low) and high - 0.01 * (high - low) < max(values) <= high


@pytest.mark.parametrize("channels", [1, 3])
def test_photometric_distortion_is_the_steps_with_clipping_between(channels):
    pixels = np.random.default_rng(3).integers(0, 256, (6, 9, channels)).astype(np.uint8)
    image, changed = reading.decode(pixels, channels), 0
    for i in range(20):
        expected = np.moveaxis(pixels, -1, 0).astype(np.float32)
        for name, value in augment.draw_distortion(np.random.default_rng(i)):
            expected = np.clip(augment.DISTORTIONS[name](expected, value), 0, 255)
        found = augment.photometric_distortion(image, np.random.default_rng(i))
        expected = np.round(np.moveaxis(expected, 0, -1))
        assert np.array_equal(np.asarray(found).reshape(pixels.shape), expected) and found.mode == image.mode
        changed += not np.array_equal(found, image)
    assert changed > 10


@pytest.mark.parametrize(("multiple", "expected"), [(1, (37, 55)), (16, (48, 64))])
def test_whole_images_are_fitted_and_rounded_up_and_their_maps_kept(section, multiple, expected):
    options = dict(fit=(60, 37), multiple=multiple, eval_crop="whole", interpolation="bilinear")
    example = pair_of(101, 151)
    row = transforms.Evaluation(section(**options))(example)
    assert np.array_equal(row["image"][..., 0], crops.resize(example["image"], *expected, "bilinear"))
    assert np.array_equal(row["map"], example["map"]) and row["map"].dtype == np.int32
    assert transforms.Evaluation(section(eval_crop="whole"))(example)["image"].shape == (101, 151, 1)


def test_whole_images_of_several_sizes_are_evaluated_one_by_one(section, tmp_path):
    for i, size in enumerate([(20, 31), (25, 30), (20, 31)]):
        for folder, value in (("images", 50), ("labels", i)):
            (tmp_path / folder / "test").mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "test" / f"{i}.png").write_bytes(png(np.full(size, value)))
    (tmp_path / "classes.txt").write_text("a\nb\nc")
    config = section(source=f"pairs:{tmp_path}", eval_crop="whole", multiple=8)
    batches = list(loader.evaluate(config, batch_size=1).batches())
    assert [batch["image"].shape[1:3] for batch in batches] == [(24, 32), (32, 32), (24, 32)]
    assert [(*batch["map"].shape[1:], batch["map"].max()) for batch in batches] == [
        (20, 31, 0),
        (25, 30, 1),
        (20, 31, 2),
    ]
    with pytest.raises(ValueError, match="'image': all rows .* same shape; .*; with batch_size=1 they may differ"):
        next(loader.evaluate(config, batch_size=2).batches())


@pytest.mark.parametrize("filter", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_resizing_gives_exactly_the_size(filter):
    image = pair_of(100, 61)["image"]
    for height, width in ((31, 77), (100, 61), (7, 140)):
        resized = crops.resize(image, height, width, filter)
        assert resized.size == (width, height) and resized.mode == image.mode
        resampled = image.resize((width, height), Image.Resampling[filter.upper()])
        assert np.array_equal(resized, resampled)
    stripes = Image.fromarray(np.tile(np.array([[0, 255]], np.uint8), (8, 64)))  # finer than the result can show
    spread = np.ptp(np.asarray(crops.resize(stripes, 8, 31, filter))[:, 4:-4].astype(int))
    assert (spread > 100) == (filter == "nearest")  # antialiased: grey all over


def test_resizing_keeps_labels_and_refuses_unknown_filters():
    labels = pair_of(50, 61)["map"]
    assert set(np.unique(crops.resize(labels, 33, 90))) <= set(np.unique(labels))
    with pytest.raises(ValueError, match="resize: filter='bicubi' is not one of .*; the nearest is 'bicubic'"):
        crops.resize(labels, 3, 3, "bicubi")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fit": (512, 2048)}, r"data.fit=\(512, 2048\) must be \(longer, shorter side\), as \(2048, 512\)"),
        ({"fit": (0, 0)}, r"data.fit=\(0, 0\) must be \(longer, shorter side\) in pixels"),
        ({"fit": (20000, 500)}, "fit_ratio=.* more than 32768 pixels .* its second number may be 1.638"),
        ({"multiple": 0}, "data.multiple=0 must be a whole number in"),
        ({"eval_crop": "hole"}, "eval_crop='hole' is not one of centre, squash, whole; the nearest is 'whole'"),
        ({"void": ()}, "data.void=.* must be one or more finite whole numbers"),
        ({"void": (1.5,)}, "data.void=1.5 must be a finite whole number|data.void=1.5 must be"),
        ({"augment": {"fit_ratio": (2.0, 0.5)}}, r"fit_ratio=\(2.0, 0.5\) must be \(smallest, largest\)"),
        ({"augment": {"max_share": 0.0}}, "max_share=0.0 must be in"),
    ],
)
def test_impossible_values_are_refused(section, changes, message):
    with pytest.raises(ValueError, match=message):
        transforms.Evaluation(section(**changes))
