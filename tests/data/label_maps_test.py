"""The meaning of numbers in label maps; a wrong map ends the run with one line instead of being replaced."""

import pickle

import numpy as np
import pytest

from equivit.data import loader, reading, sources
from equivit.data.crops import VOID
from equivit.data.label_maps import Legend, MapError
from tests.data.contents import png


@pytest.fixture
def camera(section, tmp_path):
    """Makes a `data` section of two images in each split with the given map, whose last class is called void."""

    def make(labels, void=(3,), **changes):
        maps = np.broadcast_to(np.asarray(labels), (2, 5, 7))
        images = np.zeros((2, 5, 7, 3), np.uint8)
        content = {
            f"{split}_{kind}": x for split in ("train", "test") for kind, x in (("image", images), ("map", maps))
        }
        np.savez(tmp_path / "data.npz", classes=["sky", "road", "car", "void"], **content)
        source = f"npz:{tmp_path / 'data.npz'}"
        return section(source=source, void=void, image_size=(5, 7), mean=(0.5,) * 3, std=(0.5,) * 3, **changes)

    return make


def test_void_numbers_become_void_and_the_others_are_counted_without_gaps():
    numbers = np.array([[0, 1, 2], [3, 255, VOID]])
    for void, expected, classes in (
        ((255,), [[0, 1, 2], [3, -1, -1]], "abcd"),
        ((3, 255), [[0, 1, 2], [-1, -1, -1]], "abc"),
        ((0, 255), [[-1, 0, 1], [2, -1, -1]], "bcd"),
        ((255, 1), [[0, -1, 1], [2, -1, -1]], "acd"),
    ):
        legend = Legend(tuple("abcd"), void)
        assert legend.classes == tuple(classes) and legend.labels(numbers).tolist() == expected
        assert legend.labels(numbers).dtype == np.int32
        assert [numbers.item(i) for i in np.flatnonzero(legend.labels(numbers) >= 0)] == list(legend.numbers)


def test_some_class_must_be_left():
    with pytest.raises(ValueError, match=r"data.void=\(0, 1\) leaves none of the classes a, b"):
        Legend(("a", "b"), (0, 1))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int64])
def test_a_void_class_of_an_npz_file_is_none(camera, kind):
    labels = np.random.default_rng(0).integers(0, 4, (5, 7)).astype(kind)
    config = camera(labels)
    batch = next(loader.train(config, batch_size=2, seed=0, entries=("map",)).batches())
    assert (
        np.array_equal(batch["map"][1], np.where(labels == 3, VOID, labels.astype(int)))
        and batch["map"].dtype == np.int32
    )
    source = sources.open_source(config, "train")
    assert source.classes == ("sky", "road", "car") and sources.open_source(camera(labels, (255,)), "train").classes[3]
    config.train_examples = 1
    for each in (source, pickle.loads(pickle.dumps(source)), sources.open_source(config, "train")):
        assert np.array_equal(reading.read(each, 0, 3).example["map"], batch["map"][0])


@pytest.mark.parametrize("found", [4, 254, -2])
def test_a_number_that_means_nothing_ends_the_run(camera, found):
    labels = np.zeros((5, 7), int)
    labels[3, 2] = found
    config = camera(labels, void=(3, 255))
    said = rf"its label map holds {found}, but the 3 classes are 0..2 and data.void=\(3, 255\); .*, 255, {found}\)"
    for split, pipeline in (
        ("train", loader.train(config, batch_size=2, seed=0)),
        ("test", loader.evaluate(config, batch_size=2)),
    ):
        with pytest.raises(MapError, match=rf"data.npz {split}\[\d\]: {said}") as error:
            next(pipeline.batches())
        assert "\n" not in str(error.value) and not pipeline.unreadable


@pytest.mark.parametrize("palette", [False, True])
def test_indices_of_png_files_are_labels(palette):
    labels = np.random.default_rng(0).integers(0, 256, (5, 7))
    assert np.array_equal(reading.decode_map(png(labels, palette)), labels)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            png(np.zeros((5, 7, 3))),
            r"one channel, not the shape \[5, 7, 3\] \(mode RGB\); save the index of each pixel's",
        ),
        (png(np.zeros((5, 7, 2))), r"not the shape \[5, 7, 2\] \(mode LA\)"),
        (np.zeros((5, 7)), "must hold whole numbers, not float64"),
        (png(np.zeros((6, 7))), "its label map is 6x7 for an image of 5x7; they must have the same size"),
    ],
)
def test_a_map_that_cannot_be_one_ends_the_run(labels, message):
    class One:
        classes, channels = ("a",), 3

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return {"image": np.zeros((5, 7, 3), np.uint8), "map": labels}

        def where(self, index):
            return "it"

    with pytest.raises(MapError, match=f"it: .*{message}"):
        reading.read(One(), 0, 3)


def test_a_damaged_map_is_unreadable(section, tmp_path):
    for i in range(2):
        for folder in ("images", "labels"):
            (tmp_path / folder / "train").mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "train" / f"{i}.png").write_bytes(png(np.full((5, 7), i)))
    (tmp_path / "labels" / "train" / "0.png").write_bytes(png(np.zeros((5, 7)))[:-30])
    (tmp_path / "classes.txt").write_text("a\nb\n")
    example, unreadable = reading.read(sources.open_source(section(source=f"pairs:{tmp_path}"), "train"), 0, 1)
    assert np.asarray(example["map"]).tolist() == [[1] * 7] * 5 and "labels/train/0.png" in next(iter(unreadable))


def test_labels_of_images_and_a_void_class_do_not_go_together(camera, tmp_path):
    config = camera(np.zeros((5, 7), int))
    with np.load(tmp_path / "data.npz") as file:
        content = dict(file)
    np.savez(tmp_path / "data.npz", **content, train_label=np.zeros(2, int))
    with pytest.raises(ValueError, match=r"train_label: .* 4 classes, of which data.void=\(3,\) would leave 3"):
        sources.open_source(config, "train")


def test_training_needs_a_pixel_with_a_class_and_no_rand_augment(camera):
    """The classes of the second image alone are enough."""
    with pytest.raises(ValueError, match=r"no pixel of the split 'train' has a class, with data.void=\(3,\)"):
        loader.train(camera(3), batch_size=2, seed=0, entries=("map",))
    last = np.full((2, 5, 7), 3)
    last[1, 4, 6] = 0
    assert loader.train(camera(last), batch_size=2, seed=0, entries=("map",)).num_classes == 3
    policy = camera(0, augment={"rand_augment": "rand-m9-inc1"})
    with pytest.raises(ValueError, match="rand_augment='rand-m9-inc1': label maps cannot follow it; set it to None"):
        loader.train(policy, batch_size=2, seed=0, entries=("map",))


def test_the_default_void_leaves_out_no_class_of_many():
    with pytest.raises(
        ValueError, match=r"data.void=\(255,\) would leave out the class '255', one of 300; set data.void"
    ):
        Legend(tuple(map(str, range(300))), (255,))
    assert Legend(tuple(map(str, range(256))), (255,)).numbers == tuple(range(255))
    assert len(Legend(tuple(map(str, range(300))), ()).numbers) == 300
