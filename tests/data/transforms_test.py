"""A label map goes through the same geometry as its image."""

import jax
import numpy as np
import pytest
from PIL import Image

from equivit.data import config as data_config
from equivit.data import crops, reading, transforms


def example_of(height, width, seed=0):
    """Random labels 0..9 in blocks of 8 x 8 pixels, and an image whose grey level is 20 times the label plus 20."""
    blocks = np.random.default_rng(seed).integers(0, 10, (-(-height // 8), -(-width // 8)))
    labels = np.kron(blocks, np.ones((8, 8), int))[:height, :width].astype(np.uint8)
    return {"image": reading.decode(20 * labels[..., None] + 20, 1), "map": reading.decode_map(labels), "name": "x"}


def labels_in(image):
    """The labels that the grey levels show; black shows -1."""
    return np.round(image[..., 0].astype(int) / 20) - 1


@pytest.mark.parametrize("crop", ["simple_random", "pad", "none", "centre", "shifted"])
def test_without_resampling_a_map_equals_its_image(section, crop):
    augment = {"crop": "none", "circular_shift": 1.0} if crop == "shifted" else {"crop": crop}
    transform = transforms.Train(section(image_size=(24, 41), augment=augment | {"flip": 0.5}), channels=1)
    example = example_of(24, 41)
    rows = [transform(example, np.random.default_rng(i)) for i in range(20)]
    for row in rows:
        assert row["map"].dtype == np.int32 and np.array_equal(row["map"], labels_in(row["image"]))
    assert len({row["map"].tobytes() for row in rows}) == (2 if crop in ("none", "centre") else 20)
    assert (min(row["map"].min() for row in rows) == crops.VOID) == (crop == "pad")


def assert_nearly_equal(row, shape):
    """Nearest neighbour and bicubic differ only at the edges of blocks, where bicubic would make labels in between."""
    assert row["map"].shape == shape and row["map"].dtype == np.int32
    assert np.mean(row["map"] == labels_in(row["image"])) > 0.75


@pytest.mark.parametrize("crop", data_config.CROPS)
def test_with_resampling_a_map_still_fits_its_image(section, crop):
    augment = {"crop": crop, "flip": 0.5, "scale": (0.5, 1.0)}
    config = section(image_size=(100, 120), mean=(0.0,), augment=augment)  # what is filled up is black: label -1
    transform = transforms.Train(config, channels=1)
    for i in range(10):
        row = transform(example_of(64, 96), np.random.default_rng(i))
        assert_nearly_equal(row, (100, 120))
        assert row["name"] == "x"


def test_resizing_a_map_makes_no_new_labels():
    labels = reading.decode_map(np.array([[0, 300], [7, 300]]))
    for size in ((5, 9), (1, 2), (2, 3)):
        assert set(np.unique(np.asarray(crops.resize(labels, *size)))) <= {0, 7, 300}


def test_evaluation_cuts_a_map_as_its_image(section):
    transform = transforms.Evaluation(section(image_size=(48, 56), crop_ratio=0.9))
    assert_nearly_equal(transform(example_of(64, 96)), (48, 56))


def test_bilinear_resizing_is_antialiased(section):
    """Against the same filter in float32: PIL rounds to whole levels after each of two passes."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    exact = {
        kind: jax.image.resize(pixels.astype(np.float32), (20, 28, 3), kind, antialias=True)
        for kind in ("bilinear", "bicubic")
    }
    for kind, expected in exact.items():
        transform = transforms.Evaluation(section(image_size=(20, 28), interpolation=kind))
        found = transform({"image": reading.decode(pixels, 3)})["image"]
        assert np.abs(found - np.clip(expected, 0, 255)).max() < 2
    assert np.abs(exact["bilinear"] - exact["bicubic"]).max() > 10
    with pytest.raises(ValueError, match="data.interpolation='linear' is not one of bicubic, bilinear; the nearest"):
        transforms.Evaluation(section(interpolation="linear"))


def test_a_map_does_not_change_what_happens_to_the_image(section):
    config = section(image_size=(20, 30), augment="everything")
    config.augment.rand_augment = None
    transform, example = transforms.Train(config, channels=1), example_of(40, 50)
    alone = {name: value for name, value in example.items() if name != "map"}
    first, second = (transform(each, np.random.default_rng(4))["image"] for each in (example, alone))
    assert np.array_equal(first, second)


def test_rand_augment_is_refused_for_a_map(section):
    transform = transforms.Train(section(augment={"rand_augment": "rand-m9-inc1"}), channels=1)
    with pytest.raises(ValueError, match="rand_augment: label maps cannot follow it; set it to None"):
        transform(example_of(8, 8), np.random.default_rng(0))


def test_colours_on_the_device_are_refused(section):
    """An ordinary crop would keep its colours, and nobody would notice."""
    with pytest.raises(ValueError, match="data.augment.device=True: only the views of DINOv2 .* set it to False"):
        transforms.Train(section(augment={"device": True}), channels=1)


def test_transforms_leave_their_example_alone(section):
    example = example_of(16, 16)
    before = {name: np.asarray(value) for name, value in example.items()}
    transforms.Train(section(augment={"crop": "pad"}), channels=1)(example, np.random.default_rng(0))
    transforms.Evaluation(section())(example)
    assert isinstance(example["image"], Image.Image) and isinstance(example["map"], Image.Image)
    assert all(np.array_equal(example[name], value) for name, value in before.items())
