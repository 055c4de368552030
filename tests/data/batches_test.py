"""A new kind of batch is one new transform: several crops and block masks, as DINOv2 has them, with nothing else."""

import itertools

import numpy as np
import pytest

from equivit.data import batches, crops, loader
from equivit.data.config import CROPS


class MultiCrop:
    """Two large and four small crops of an image, and masks whose ratios are spread evenly over the whole batch."""

    def __init__(self, config, channels):
        self.size = config.image_size

    def __call__(self, example, rng):
        image, (height, width) = example["image"], self.size

        def crop(height, width, scale):
            place = crops.random_resized_crop(rng, image.size, height, width, scale=scale, ratio=(3 / 4, 4 / 3))
            return np.asarray(place(image)).reshape(height, width, -1)

        return {
            "global": np.stack([crop(height, width, (0.4, 1.0)) for _ in range(2)]),
            "local": np.stack([crop(height // 2, width // 2, (0.1, 0.4)) for _ in range(4)]),
            "label": example["label"],
        }

    def finish(self, batch, rng, share):
        """A mask [16] for each row; every count of masked patches is as frequent as any other in the global batch."""
        counts = rng.permutation(np.arange(share.batch_size) % 16)[share.rows]
        generators = rng.spawn(share.batch_size)[share.rows]
        masks = [each.permutation(16) < count for each, count in zip(generators, counts, strict=True)]
        return batch | {"mask": np.stack(masks), "brightness": batch["global"].mean((1, 2, 3, 4), np.float32)}


def take(pipeline, count, start=0):
    stream = pipeline.batches(start)
    try:
        return list(itertools.islice(stream, count))
    finally:
        stream.close()


def shapes_of(batch):
    return {name: (value.shape, value.dtype.name) for name, value in batch.items()}


def assert_equal(first, second):
    assert shapes_of(first) == shapes_of(second)
    for name in first:
        assert np.array_equal(first[name], second[name]), name


@pytest.fixture
def many(section):
    """A pipeline of several crops; epochs have 4 batches."""

    def make(process_index=0, process_count=1, workers=0, **changes):
        config = section(image_size=(8, 12), train_examples=256, **changes)
        processes = {"process_index": process_index, "process_count": process_count, "workers": workers}
        return loader.train(config, batch_size=64, seed=0, transform=MultiCrop, **processes)

    return make


def test_a_transform_of_several_crops(many):
    batch = take(many(), 1)[0]
    assert shapes_of(batch) == {
        "global": ((64, 2, 8, 12, 1), "uint8"),
        "local": ((64, 4, 4, 6, 1), "uint8"),
        "label": ((64,), "int32"),
        "mask": ((64, 16), "bool"),
        "brightness": ((64,), "float32"),
    }
    assert np.array_equal(np.bincount(batch["mask"].sum(1)), [4] * 16)
    assert len({crop.tobytes() for crop in batch["global"].reshape(128, -1)}) > 120  # 8 x 8 pixels have few boxes


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_whole_batches_are_the_same_for_any_workers_processes_and_start(many, workers, repeats):
    expected = take(many(repeats=repeats), 6)  # into the second epoch
    parts = [take(many(i, 2, repeats=repeats, workers=workers * i), 3, start=3) for i in range(2)]  # of one process
    for batch, halves in zip(expected[3:], zip(*parts, strict=True), strict=True):
        assert_equal({name: np.concatenate([half[name] for half in halves]) for name in batch}, batch)
    assert len({batch["mask"].tobytes() for batch in expected}) == 6


@pytest.fixture
def maps(section, tmp_path):
    """Five images with label maps, and no other labels."""
    rng = np.random.default_rng(0)
    content = {"classes": np.array(["cat", "dog"])}
    for split in ("train", "test"):
        content[f"{split}_image"] = rng.integers(0, 256, (5, 9, 7, 3), np.uint8)
        content[f"{split}_map"] = rng.integers(0, 2, (5, 9, 7), np.uint8)
    np.savez(tmp_path / "maps.npz", **content)
    return section(source=f"npz:{tmp_path / 'maps.npz'}", image_size=(9, 7), mean=(0.5,) * 3, std=(0.5,) * 3), content


def test_label_maps_are_evaluated_and_padding_is_zero(maps):
    config, content = maps
    first, second = loader.evaluate(config, batch_size=3).batches()
    assert np.array_equal(np.concatenate([first["map"], second["map"]])[:5], content["test_map"])
    assert np.array_equal(np.concatenate([first["image"], second["image"]])[:5], content["test_image"])
    assert second["weight"].tolist() == [1, 1, 0] and not second["map"][2].any() and not second["image"][2].any()
    assert "label" not in first


def test_a_share_that_is_all_padding_has_the_shapes_of_the_others(maps):
    config, _ = maps
    pipelines = [loader.evaluate(config, batch_size=4, process_index=i, process_count=2) for i in range(2)]
    first, second = (list(pipeline.batches())[-1] for pipeline in pipelines)
    assert shapes_of(first) == shapes_of(second) and second["index"].tolist() == [-1, -1]
    assert not any(second[name].any() for name in ("image", "map", "weight"))


@pytest.mark.parametrize("crop", CROPS)
def test_shapes_are_those_of_the_batches_and_need_no_data(section, crop):
    config = section(image_size=(8, 12), train_image_size=(6, 10), augment={"crop": crop}, channels=3)
    for training, pipeline in (
        (True, loader.train(config, batch_size=16, seed=0)),
        (False, loader.evaluate(config, batch_size=16)),
    ):
        assert shapes_of(pipeline.shapes()) == shapes_of(take(pipeline, 1)[0])
        with config.unlocked():
            absent = config.copy_and_resolve_references()
            absent.source = "npz:/nowhere.npz"
        assert loader.shapes(absent, 16, channels=3, training=training) == pipeline.shapes()


def test_shapes_are_those_of_the_global_batch(section, many, maps):
    assert many(1, 2).shapes() == many().shapes()
    assert shapes_of(many().shapes()) == shapes_of(take(many(), 1)[0])
    config = section(image_size=(8, 12))
    assert loader.shapes(config, 64, channels=1, transform=MultiCrop) == many().shapes()
    config, _ = maps
    for training, make in (
        (True, lambda **o: loader.train(config, seed=0, **o)),
        (False, lambda **o: loader.evaluate(config, **o)),
    ):
        shapes = loader.shapes(config, 4, channels=3, entries=("image", "map"), training=training)
        assert shapes == make(batch_size=4).shapes() == make(batch_size=4, process_count=2, process_index=1).shapes()
        assert (shapes["map"].shape, shapes["map"].dtype.name) == ((4, 9, 7), "int32")


def test_unknown_entries_are_refused(section):
    with pytest.raises(ValueError, match="entries='maps' is not one of image, label, map; the nearest is 'map'"):
        loader.shapes(section(), 4, channels=1, entries=("image", "maps"))


def test_rows_of_other_shapes_are_refused():
    rows = [{"local": np.zeros(shape)} for shape in ((2, 3), (2, 4))]
    with pytest.raises(
        ValueError, match=r"'local': all rows of a batch must have the same shape; there are \[\(2, 3\), \(2, 4\)\]"
    ):
        batches.collate(rows)
