"""Label maps from the patches of adaptive models: images and label maps that move together, and turn."""

import functools

import numpy as np
import pytest

from equivit.evaluation import frozen, predictions, runner
from equivit.training.config import get_base, validate
from tests.evaluation.predictors import random_model
from tests.models.adaptive import SWIN
from tests.models.backbones import model

SIZE, SPLITS = (16, 24), {"train": 12, "test": 5}
PROTOCOLS = ("patch_knn", "patch_linear")


def examples(number, size, seed):
    """Noise with a bright rectangle in a place of its own, and its label map."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 90, (number, *size, 3))
    maps = np.zeros((number, *size), np.uint8)
    for one in maps:
        one[:7, :9] = 1
        one[...] = np.roll(one, rng.integers(0, size), (0, 1))
    return (images + 120 * maps[..., None]).astype(np.uint8), maps


def written(folder, size, moving):
    """The name of a source; with `moving`, each example is shifted by its own pixels, the image as its map."""
    arrays = {"classes": np.array(["ground", "thing"])}
    for seed, (split, number) in enumerate(SPLITS.items()):
        steps = np.random.default_rng(7 + seed).integers(1, size, (number, 2)) * moving
        for kind, values in zip(("image", "map"), examples(number, size, seed), strict=True):
            moved = [np.roll(one, tuple(step), (0, 1)) for one, step in zip(values, steps, strict=True)]
            arrays[f"{split}_{kind}"] = np.stack(moved)
    path = folder / f"moving_{moving}.npz"
    np.savez(path, **arrays)
    return f"npz:{path}"


def config_of(source, size):
    config = get_base()
    config.update(batch_size=4, steps=1)
    config.data.update(source=source, image_size=size, mean=(0.3,), std=(0.3,))
    validate(config)
    return config


@functools.cache
def swin():
    return model("swin_t", **SWIN | dict(image_size=SIZE, num_classes=None))


@pytest.mark.slow
def test_moving_image_and_label_map_together_changes_nothing(tmp_path):
    """Each image is shifted by its own number of pixels, most of which no stride divides."""
    here, there = (
        runner.evaluate(swin(), config_of(written(tmp_path, SIZE, moving), SIZE), PROTOCOLS) for moving in (0, 1)
    )
    for name in PROTOCOLS:
        upright = [result[name]["miou_by_orientation"]["e"] for result in (here, there)]
        assert upright[0] == upright[1] and here[name]["miou_official"] == there[name]["miou_official"]
        assert here[name]["validation"] == there[name]["validation"] and upright[0] > 0.6


def test_grids_begin_elsewhere_and_the_maps_stay_on_the_image(tmp_path):
    config = config_of(written(tmp_path, SIZE, 1), SIZE)
    found = frozen.patches(runner.prepare(swin(), config, ["patch_knn"])["patch_knn"], "train")["e"]
    assert len(np.unique(found.grid.offset, axis=0)) > 3 and found.grid.offset.dtype == np.int32
    moved = [np.roll(one, tuple(-begin), (0, 1)) for one, begin in zip(found.maps, found.grid.offset, strict=True)]
    np.testing.assert_array_equal(found.grid.to_grid(found.maps), np.stack(moved))
    np.testing.assert_array_equal(found.grid.to_image(found.grid.to_grid(found.maps)), found.maps)


@pytest.mark.slow
def test_label_maps_of_an_octic_model_turn_with_the_image(tmp_path):
    """Each orientation lets the patches begin elsewhere; turned back, a map is the one of the upright image."""
    size = (8, 12)
    octic = random_model("D8", adaptive=True, num_classes=None, in_channels=3, image_size=size)
    found = runner.evaluate(octic, config_of(written(tmp_path, size, 0), size), PROTOCOLS)
    for result in found.values():
        assert result["same"] == 1 and result["delta"] == 0


@pytest.mark.slow
def test_offsets_of_extracted_features_are_integers(tmp_path):
    run = runner.prepare(swin(), config_of(written(tmp_path, SIZE, 0), SIZE), ["patch_knn"])["patch_knn"]
    extract = predictions.extractor(run.model, run.data.mean, run.data.std, run.precision)
    assert extract(next(iter(run.batches()))["image"]).patches.offset.dtype == np.int32
