"""ImageNet-C's corruptions: a function of seed, image and place alone.  The library's own tests need it installed."""

import concurrent.futures
import importlib.util
import pickle
import sys
import types

import numpy as np
import pytest

from equivit.data import corruptions, loader

LIBRARY = importlib.util.find_spec("imagecorruptions") is not None
needs_library = pytest.mark.skipif(not LIBRARY, reason="imagecorruptions-imaug is not installed (an optional extra)")


@pytest.fixture
def stand_in(monkeypatch):
    """A library whose corruptions add noise: from numpy's global generator, or, where seeded, from their own."""

    def from_global(image, severity):
        return np.asarray(image) // 2 + np.random.randint(0, 10 * severity, np.asarray(image).shape)

    def from_own(image, severity, seed=None):
        return np.asarray(image) // 2 + np.random.default_rng(seed).integers(0, 10, np.asarray(image).shape)

    functions = {name: from_own if name in corruptions.SEEDED else from_global for name in corruptions.NAMES}
    monkeypatch.setitem(sys.modules, "imagecorruptions", types.SimpleNamespace(corruption_dict=functions))
    monkeypatch.setattr(corruptions, "_check_library", lambda: None)


PIXELS = np.random.default_rng(0).integers(0, 256, (33, 48, 3), np.uint8)


@pytest.mark.parametrize("name", ["shot_noise", "glass_blur"])
def test_draws_depend_on_seed_index_name_and_severity_only(stand_in, name):
    first = corruptions.Corruption(name, 5, seed=3)(PIXELS, 7)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    again = pickle.loads(pickle.dumps(corruptions.Corruption(name, 5, seed=3)))
    assert np.array_equal(again(PIXELS, 7), first) and first.shape == PIXELS.shape and first.dtype == np.uint8
    assert np.array_equal(np.random.get_state()[1], before)
    other = [again(PIXELS, 8), corruptions.Corruption(name, 4, seed=3)(PIXELS, 7)]
    other += [corruptions.Corruption(name, 5, seed=4)(PIXELS, 7), corruptions.Corruption("fog", 5, seed=3)(PIXELS, 7)]
    assert not any(np.array_equal(image, first) for image in other)


def test_threads_do_not_share_draws(stand_in):
    noise = corruptions.Corruption("gaussian_noise", 5, seed=0)
    alone = [noise(PIXELS, i) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(noise, [PIXELS] * 64, range(64)))
    assert np.array_equal(alone, together)


def test_grey_images_stay_grey(stand_in):
    assert corruptions.Corruption("frost", 1, seed=0)(PIXELS[..., :1], 0).shape == (33, 48, 1)


def by_index(config, **options):
    """The images of the test split by their place in it."""
    images = {}
    for batch in loader.evaluate(config, **options).batches():
        images |= {int(i): image for i, image in zip(batch["index"], batch["image"], strict=True) if i >= 0}
    return np.stack([images[i] for i in range(len(images))])


def test_order_and_batches_change_no_image(stand_in, section):
    config = section(image_size=(32, 40), eval_examples=20, corruption="gaussian_noise", severity=3)
    images = by_index(config, batch_size=8, seed=1)
    assert np.array_equal(by_index(config, batch_size=5, seed=1), images)
    shuffled = loader.evaluate(config, batch_size=8, seed=1, shuffle=True)
    assert next(shuffled.batches())["index"].tolist() != list(range(8))
    assert np.array_equal(by_index(config, batch_size=8, seed=1, shuffle=True), images)
    assert not np.array_equal(by_index(config, batch_size=8, seed=2), images)
    config.corruption = None
    assert not np.array_equal(by_index(config, batch_size=8, seed=1), images)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corruption": "gausian_noise"}, "corruption='gausian_noise' is not one of .* nearest is 'gaussian_noise'"),
        ({"corruption": "fog", "severity": 6}, "severity=6 is not one of 1, 2, 3, 4, 5"),
        ({"corruption": "fog"}, r"image_size=\(8, 8\): corruptions need at least 32 pixels"),
    ],
)
def test_impossible_corruptions_are_refused(section, changes, message):
    with pytest.raises(ValueError, match=message):
        loader.evaluate(section(**changes), batch_size=4)


@pytest.mark.skipif(LIBRARY, reason="imagecorruptions-imaug is installed")
def test_a_missing_library_is_told_before_anything_runs(section):
    with pytest.raises(ValueError, match="pip install imagecorruptions-imaug"):
        loader.evaluate(section(corruption="fog", image_size=(32, 32)), batch_size=4)


@needs_library
@pytest.mark.parametrize("name", corruptions.NAMES)
def test_each_corruption_of_the_library(name):
    images = {s: corruptions.Corruption(name, s, seed=3)(PIXELS, 7) for s in corruptions.SEVERITIES}
    for severity, image in images.items():
        assert image.shape == PIXELS.shape and image.dtype == np.uint8 and not np.array_equal(image, PIXELS)
        np.random.seed(severity)
        np.random.random(severity)  # nothing that others draw may count
        assert np.array_equal(corruptions.Corruption(name, severity, seed=3)(PIXELS, 7), image)
    assert not np.array_equal(images[1], images[5])
    drawn = name not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    assert drawn != np.array_equal(corruptions.Corruption(name, 5, seed=3)(PIXELS, 8), images[5])


@needs_library
@pytest.mark.parametrize("name", ["gaussian_noise", "glass_blur"])
def test_workers_change_no_image(section, name):
    config = section(image_size=(32, 40), eval_examples=20, corruption=name, severity=3)
    images = by_index(config, batch_size=8, seed=1)
    assert np.array_equal(by_index(config, batch_size=4, seed=1, shuffle=True, workers=2), images)


def test_training_images_stay_clean(stand_in, section):
    """Neighbours and probes read them as the evaluation's are read, but only those are corrupted."""
    kinds = ("fog", None)
    train, clean, test, test_clean = (
        next(loader.evaluate(section(image_size=(32, 40), corruption=kind), batch_size=8, split=split).batches())[
            "image"
        ]
        for split in ("train", "test")
        for kind in kinds
    )
    np.testing.assert_array_equal(train, clean)
    assert (test != test_clean).any()
