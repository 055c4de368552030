"""The views that self-distillation trains on."""

import itertools

import numpy as np
import pytest
from PIL import Image

from equivit.data import colour, loader, views

PLAIN = {"jitter_rate": 0.0, "grey": 0.0, "blur": (0.0, 0.0, 0.0), "solarise": 0.0}


def image_of(height=37, width=50, channels=3):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


@pytest.fixture
def make(section):
    """Makes `Views`: `make(augment={...}, locals=2, ...)`, small and with two local views unless said."""

    def transform(augment=(), channels=3, image_size=(12, 20), **changes):
        config = section(image_size=image_size, augment={"crop": "random_resized", **dict(augment)})
        config.views.update({"locals": 2, "local_size": (6, 9), **changes})
        return views.Views(config, channels)

    return transform


@pytest.mark.parametrize("channels", [1, 3])
def test_a_row_has_the_views_and_what_else_the_source_gives(make, channels):
    transform, image = make(channels=channels), image_of(channels=channels)
    example = {"image": image, "label": 3, "map": image, "patient": 17}
    first, second, other = (transform(example, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert {name: np.shape(value) for name, value in first.items()} == {
        "patient": (),
        "global_crops": (2, 12, 20, channels),
        "local_crops": (2, 6, 9, channels),
    }
    for name in ("global_crops", "local_crops"):
        assert first[name].dtype == np.uint8 and np.array_equal(first[name], second[name])
        assert not np.array_equal(first[name], other[name]) and not np.array_equal(first[name][0], first[name][1])
    assert "local_crops" not in make(locals=0)(example, np.random.default_rng(0))


def test_views_have_the_size_of_training_images(section):
    config = section(image_size=(32, 32), train_image_size=(8, 12), augment={"crop": "random_resized"})
    row = views.Views(config, 3)({"image": image_of()}, np.random.default_rng(0))
    assert row["global_crops"].shape == (2, 8, 12, 3) and row["local_crops"].shape == (8, 96, 96, 3)


def test_each_view_is_cut_by_its_own_scale(make):
    """In an image whose values grow to the right, the range of a view's values shows its width."""
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    transform = make({"scale": (0.5, 1.0), "ratio": (1.0, 1.0)}, 1, (8, 8), local_scale=(0.1, 0.2), **PLAIN)
    rows = [transform({"image": ramp}, np.random.default_rng(seed)) for seed in range(200)]
    for name, (least, most) in {"global_crops": (0.5, 1.0), "local_crops": (0.1, 0.2)}.items():
        crops = np.stack([row[name] for row in rows]).reshape(400, -1)
        share = (np.ptp(crops, 1) / 256 / (1 - 1 / np.sqrt(crops.shape[1]))) ** 2
        assert share.min() > 0.85 * least and share.max() < 1.15 * most  # of few pixels, antialiased
        assert np.ptp(share) > 0.7 * (most - least)


def test_kinds_of_views_have_the_rates_of_the_section(make):
    jitter = (0.1, 0.2, 0.3, 0.4)
    transform = make(locals=3, jitter=jitter, jitter_rate=0.7, grey=0.15, blur=(0.0, 0.9, 0.5), solarise=0.25)
    shared = (jitter, 0.7, 0.15)
    assert [kind.rates for kind in transform.kinds] == [
        (colour.Rates(*shared, 0.0, 0.0), colour.Rates(*shared, 0.9, 0.25)),
        (colour.Rates(*shared, 0.5, 0.0),) * 3,
    ]


def test_views_without_changes_are_random_resized_crops(make):
    """The first view of an image of one column and another one: mirrored as often as `flip` says, and nothing else."""
    pixels = np.repeat(np.array([[[10, 60, 200], [90, 30, 20]]], np.uint8), 2, 0)
    transform = make({"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.3}, 3, (2, 2), locals=0, **PLAIN)
    rows = [transform({"image": Image.fromarray(pixels)}, np.random.default_rng(s)) for s in range(1000)]
    flips = [np.array_equal(view, pixels[:, ::-1]) for row in rows for view in row["global_crops"]]
    same = [np.array_equal(view, pixels) for row in rows for view in row["global_crops"]]
    assert sum(flips) + sum(same) == 2000 and abs(sum(flips) - 600) < 4 * np.sqrt(2000 * 0.3 * 0.7)


def test_octic_views_have_each_of_eight_orientations_as_often_as_the_others(make):
    pixels = np.array([[10, 60], [200, 90]], np.uint8)
    known = [np.rot90(mirrored, k).tobytes() for mirrored in (pixels, pixels.T) for k in range(4)]
    augment = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "octic": True, "flip": 0.0}
    transform = make(augment, 1, (2, 2), locals=0, **PLAIN)
    rows = [transform({"image": Image.fromarray(pixels)}, np.random.default_rng(s)) for s in range(1000)]
    counts = np.bincount([known.index(view.tobytes()) for row in rows for view in row["global_crops"]], minlength=8)
    assert np.abs(counts - 250).max() < 4 * np.sqrt(2000 * 7 / 64)


def test_colours_for_the_device_are_those_that_the_host_would_have_changed(make):
    """Brightness alone, and inverted in the second view, so that the host's views follow from the numbers."""
    rates = dict(jitter=(0.4, 0.0, 0.0, 0.0), jitter_rate=1.0, grey=0.0, blur=(0.0, 0.0, 0.0), solarise=1.0)
    host, device = (
        make({"device": device}, **rates)({"image": image_of()}, np.random.default_rng(5)) for device in (False, True)
    )
    assert device["global_colours"].shape == (2, 11) and device["local_colours"].shape == (2, 11)
    for name, inverted in {"global": [0, 1], "local": [0, 0]}.items():
        numbers = device[f"{name}_colours"]
        assert numbers.dtype == np.float32 and numbers[:, -1].tolist() == inverted
        factors = numbers[:, 4, None, None, None]
        assert len(set(factors.ravel())) == 2 and np.array_equal(numbers[:, :4], [[0, -1, -1, -1]] * 2)
        brighter = np.clip(np.floor(factors * device[f"{name}_crops"]), 0, 255)
        inverts = numbers[:, -1, None, None, None] * (brighter >= 128)
        assert np.array_equal(host[f"{name}_crops"], np.where(inverts, 255 - brighter, brighter))


def test_batches_depend_on_the_seed_and_their_number_alone(section):
    def batch(index, count):
        config = section(train_examples=64, augment={"crop": "random_resized"})
        config.views.update(locals=1, local_size=(4, 6))
        made = dict(batch_size=16, seed=0, transform=views.Views, entries=("image",))
        stream = loader.train(config, **made, process_index=index, process_count=count).batches(start=2)
        return next(itertools.islice(stream, 1))

    whole, halves = batch(0, 1), [batch(i, 2) for i in range(2)]
    assert {name: (value.shape, value.dtype.name) for name, value in whole.items()} == {
        "global_crops": ((16, 2, 8, 8, 1), "uint8"),
        "local_crops": ((16, 1, 4, 6, 1), "uint8"),
    }
    for name, value in whole.items():
        assert np.array_equal(np.concatenate([half[name] for half in halves]), value)


@pytest.mark.parametrize(
    ("augment", "changes", "message"),
    [
        ({"crop": "pad"}, {}, "data.augment.crop='pad': views need 'random_resized'."),
        ({"erase": 0.25}, {}, "data.augment.erase=0.25 has no effect on views; set it to 0.0"),
        ({"rand_augment": "rand-m9-inc1"}, {}, "rand_augment='rand-m9-inc1' has no effect on views; set it to None"),
        ({"octic": True}, {}, r"data.image_size=\(12, 20\) must be square for data.augment.octic=True, as \(20, 20\)"),
        ({}, {"locals": 2**31 - 1}, r"must be a whole number in \[0, 256\]; the nearest is 256"),
        ({}, {"locals": -1}, r"data.views.locals=-1 must be a whole number in \[0, 256\]; the nearest is 0"),
        ({}, {"local_size": (0, 9)}, r"data.views.local_size=\(0, 9\) must be .height, width. in pixels, .* \(1, 9\)"),
        ({}, {"local_scale": (0.3, 0.1)}, r"views.local_scale=\(0.3, 0.1\) must be .smallest, largest., as \(0.1, 0.3"),
        ({}, {"jitter": (0.4, 0.4, 0.2, 0.6)}, r"views.jitter=.* hue at most 0.5, such as \(0.4, 0.4, 0.2, 0.5\)"),
        ({}, {"jitter": (0.4, 0.4, 0.2)}, r"views.jitter=\(0.4, 0.4, 0.2\) must be \(brightness, contrast, saturation"),
        ({}, {"blur": (1.0, 1.5, 0.5)}, r"views.blur=\(1.0, 1.5, 0.5\) must be three .* such as \(1.0, 1, 0.5\)"),
    ],
)
def test_errors_name_the_value_and_the_nearest_fix(make, augment, changes, message):
    with pytest.raises(ValueError, match=message):
        make(augment, **changes)
