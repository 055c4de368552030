"""The `data` section of a config, for the tests of this directory."""

import ml_collections
import pytest

SECTION = {
    "held_out": 0.0,
    "split_seed": 0,
    "source": "digits",
    "split": "train",
    "eval_split": "test",
    "image_size": (8, 8),
    "train_image_size": None,
    "channels": None,
    "train_examples": None,
    "eval_examples": None,
    "workers": 0,
    "max_pixels": 1000000,
    "repeats": 1,
    "resume": "same_order",
    "void": (255,),
    "fit": None,
    "eval_crop": "centre",
    "multiple": 1,
    "crop_ratio": 1.0,
    "interpolation": "bicubic",
    "corruption": None,
    "severity": 5,
    "mean": (0.5,),
    "std": (0.25,),
    "augment": {
        "crop": "none",
        "scale": (0.08, 1.0),
        "ratio": (3 / 4, 4 / 3),
        "fit_ratio": (0.5, 2.0),
        "max_share": 1.0,
        "flip": 0.0,
        "octic": False,
        "three_augment": False,
        "rand_augment": None,
        "color_jitter": 0.0,
        "photometric": False,
        "erase": 0.0,
        "circular_shift": 0.0,
        "device": False,
    },
    "views": {
        "locals": 8,
        "local_size": (96, 96),
        "local_scale": (0.05, 0.32),
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "jitter_rate": 0.8,
        "grey": 0.2,
        "blur": (1.0, 0.1, 0.5),
        "solarise": 0.2,
    },
}
EVERYTHING = {
    "crop": "random_resized",
    "flip": 0.5,
    "three_augment": True,
    "rand_augment": "rand-m9-mstd0.5-inc1",
    "color_jitter": 0.3,
    "photometric": True,
    "erase": 0.25,
    "circular_shift": 0.5,
}


@pytest.fixture
def section():
    """Makes a `data` section: `section(repeats=3, augment={"flip": 0.5})`; augment="everything" switches all on."""

    def make(augment=(), **changes):
        config = ml_collections.ConfigDict(SECTION)
        config.augment.update(EVERYTHING if augment == "everything" else dict(augment))
        with config.ignore_type():
            config.update(changes)
        return config

    return make
