import io
import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from equivit.data import directories, reading, sources


def jpeg(value, size=(9, 7)):
    buffer = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


def labels_of(source):
    return [source[i]["label"] for i in range(len(source))]


def values_of(source):
    """The grey level of the first pixel of each image, as read."""
    return [reading.read(source, i, 1).example["image"].getpixel((0, 0)) for i in range(len(source))]


def test_digits_are_all_there_and_the_splits_are_apart(section):
    train, test = (sources.open_source(section(), split) for split in ("train", "test"))
    assert (len(train), len(test), train.channels, train.classes) == (1437, 360, 1, tuple("0123456789"))
    assert np.bincount(labels_of(train)).min() > 120 and np.bincount(labels_of(test)).min() > 20
    images = np.concatenate([train.images, test.images])
    assert images.dtype == np.uint8 and images.max() == 255 and len(images) == 1797
    assert len({image.tobytes() for image in images}) > 1790  # so a permutation, and no copies
    assert np.array_equal(train[5]["image"], sources.Digits("train")[5]["image"])


@pytest.mark.parametrize(("size", "channels"), [((16, 16), None), ((20, 48), 1)])
def test_the_label_of_a_synthetic_image_can_be_seen_in_it(section, size, channels):
    source = sources.open_source(section(source="synthetic", image_size=size, channels=channels), "train")
    images = np.stack([source[i]["image"] for i in range(300)])
    assert images.shape == (300, *size, channels or 3) and images.dtype == np.uint8
    bright = (images[..., 0] >= 160).sum((1, 2))
    expected = np.pi * (min(size) * (0.05 + 0.04 * np.array(labels_of(source)[:300]))) ** 2
    np.testing.assert_allclose(bright, expected, atol=10)
    assert set(labels_of(source)[:300]) == set(range(10))
    test = sources.open_source(section(source="synthetic", image_size=size, channels=channels), "test")
    assert not np.array_equal(source[0]["image"], test[0]["image"])


def test_limits_take_a_fixed_subset(section):
    config = section(train_examples=100, eval_examples=7)
    source = sources.open_source(config, "train")
    assert len(source) == 100 and len(sources.open_source(config, "test")) == 7
    assert labels_of(source) == labels_of(sources.open_source(config, "train"))
    assert np.bincount(labels_of(source), minlength=10).min() > 0
    whole = sources.Digits("train")
    assert any(np.array_equal(source[0]["image"], whole[i]["image"]) for i in range(len(whole)))


@pytest.fixture(params=["image", "jpeg"])
def npz(request, tmp_path):
    """Five images in train and two in test, in both layouts; their grey levels are 40 i."""
    content = {"classes": np.array(["cat", "dog"])}
    for split, count in (("train", 5), ("test", 2)):
        content[f"{split}_label"] = np.arange(count) % 2
        if request.param == "image":
            levels = (40 * np.arange(count, dtype=np.uint8))[:, None, None, None]
            content["train_image" if split == "train" else "test_image"] = np.broadcast_to(levels, (count, 7, 9, 3))
        else:
            files = [jpeg(40 * i) for i in range(count)]
            content[f"{split}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
            content[f"{split}_offset"] = np.cumsum([0, *map(len, files)])
    np.savez_compressed(tmp_path / "data.npz", **content)
    return tmp_path / "data.npz"


def test_both_layouts_of_npz(section, npz):
    config = section(source=f"npz:{npz}")
    source = sources.open_source(config, "train")
    assert (len(source), source.classes, source.channels) == (5, ("cat", "dog"), 3)
    assert labels_of(source) == [0, 1, 0, 1, 0]
    np.testing.assert_allclose(values_of(source), 40 * np.arange(5), atol=2)  # JPEG is not exact
    assert values_of(pickle.loads(pickle.dumps(source))) == values_of(source)
    assert len(pickle.dumps(source)) < 1000  # a worker opens the file itself
    with pytest.raises(ValueError, match="there is no split 'val'; splits: test, train"):
        sources.open_source(config, "val")


@pytest.mark.parametrize(("kind", "labelled"), [("map", False), ("mask", True)])
def test_npz_with_label_maps(section, npz, kind, labelled):
    with np.load(npz) as file:
        content = {key: file[key] for key in file if labelled or not key.endswith("_label")}
    maps = np.random.default_rng(0).integers(0, 3, (5, 7, 9), np.uint8)
    np.savez(npz, **content, **{f"train_{kind}": maps})
    source = pickle.loads(pickle.dumps(sources.open_source(section(source=f"npz:{npz}"), "train")))
    examples = [reading.read(source, i, 3).example for i in range(5)]
    assert np.array_equal(np.stack([example["map"] for example in examples]), maps)
    assert [example.get("label") for example in examples] == ([0, 1, 0, 1, 0] if labelled else [None] * 5)
    if not labelled:
        with pytest.raises(ValueError, match="there is no split 'test'; splits: train"):
            sources.open_source(section(source=f"npz:{npz}"), "test")


def test_label_maps_are_read_exactly_and_must_fit_their_images():
    for kind, labels in ((np.uint8, [[0, 255]]), (np.uint16, [[0, 40000]]), (np.int32, [[-1, 70000]])):
        labels, buffer = np.array(labels, kind), io.BytesIO()
        assert np.array_equal(reading.decode_map(labels), labels)
        if kind is not np.int32:
            Image.fromarray(labels).save(buffer, "PNG")
            assert np.array_equal(reading.decode_map(buffer.getvalue()), labels)
    buffer = io.BytesIO()
    palette = Image.fromarray(np.array([[3, 250]], np.uint8)).convert("P")
    palette.putpalette(bytes(range(256)) * 3)
    palette.save(buffer, "PNG")
    assert np.asarray(reading.decode_map(buffer.getvalue())).tolist() == [[3, 250]]
    with pytest.raises(ValueError, match=r"a label map must have one channel, not the shape \[9, 7, 3\]"):
        reading.decode_map(np.zeros((9, 7, 3), np.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_map": np.zeros((2, 4, 4), np.uint8)}, "a_map has 2 entries for 3 images"),
        ({"a_map": np.zeros((3, 4, 4, 1), np.uint8)}, r"a_map must be int \[N, H, W\], not uint8 \[3, 4, 4, 1\]"),
        ({"a_mask": np.zeros((3, 4, 4))}, r"a_mask must be int \[N, H, W\], not float64 \[3, 4, 4\]"),
        ({"a_map": np.zeros((3, 4, 5), np.uint8)}, r"a_map is 4x5 for images of 4x4"),
        ({"a_image": np.zeros((3, 4, 4), np.uint8)}, r"image must be uint8 \[N, H, W, C\], not uint8 \[3, 4, 4\]"),
        ({"a_image": np.zeros((3, 4, 4, 1), np.float32)}, r"image must be uint8 .* not float32"),
        ({"a_label": np.zeros(2, int)}, "a_label has 2 entries for 3 images"),
        ({"a_label": np.array([0, 1, 2])}, r"a_label is in 0\.\.2; 2 classes allow 0\.\.1"),
        ({"classes": None}, "`classes`, the names of the classes, is missing"),
    ],
)
def test_a_wrong_npz_is_refused(section, tmp_path, changes, message):
    content = {"a_image": np.zeros((3, 4, 4, 1), np.uint8), "a_label": np.array([0, 1, 0]), "classes": ["x", "y"]}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    np.savez(tmp_path / "data.npz", **content)
    with pytest.raises(ValueError, match=message):
        sources.open_source(section(source=f"npz:{tmp_path / 'data.npz'}"), "a")


def test_a_map_of_another_size_than_its_image_file_is_told(section, tmp_path):
    content = {"classes": ["x"], "train_map": np.zeros((1, 4, 4), int), "train_offset": np.array([0, len(jpeg(0))])}
    np.savez(tmp_path / "data.npz", train_jpeg=np.frombuffer(jpeg(0), np.uint8), **content)
    source = sources.open_source(section(source=f"npz:{tmp_path / 'data.npz'}"), "train")
    with pytest.raises(OSError, match="image and label map differ in size"):
        reading.read(source, 0, 3)


def test_a_file_that_is_no_npz_is_refused(section, tmp_path):
    config = section(source=f"npz:{tmp_path / 'data.npz'}")
    for content in (b"text", b"PK\x03\x04", b"\x93NUMPY", b""):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(ValueError, match="this is not an .npz file, or it is damaged"):
            sources.open_source(config, "train")


def write_images(root, names):
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 7), (10 * i,) * 3).save(path)


def test_class_folders_with_splits(section, tmp_path):
    write_images(tmp_path, ["train/b/x.png", "train/a/z.PNG", "train/a/ÿ.png", "train/c/1.bmp", "val/c/2.png"])
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    config = section(source=f"folder:{tmp_path}", eval_split="val")
    train, test = (sources.open_source(config, split) for split in ("train", "val"))
    assert train.classes == test.classes == ("a", "b", "c")
    assert labels_of(train) == [0, 0, 1, 2] and values_of(train) == [10, 20, 0, 30]
    assert labels_of(test) == [2]  # although c is the only class there
    assert train.where(1).endswith("train/a/ÿ.png")
    with pytest.raises(ValueError, match="there is no .*test; folders: train, val"):
        sources.open_source(config, "test")
    write_images(tmp_path, ["val/d/3.png"])
    with pytest.raises(ValueError, match="classes that .*train does not have: d"):
        sources.open_source(config, "val")


def test_class_folders_without_splits_are_training_data_only(section, tmp_path):
    write_images(tmp_path, ["b/x.png", "a/y.png"])
    config = section(source=f"folder:{tmp_path}")
    assert labels_of(sources.open_source(config, "train")) == [0, 1]
    with pytest.raises(ValueError, match="folders: a, b. Images belong in <split>/<class>/"):
        sources.open_source(config, "test")


class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.10.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=["a", "b", "c"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"train": self._generate_examples(10), "test": self._generate_examples(4)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": io.BytesIO(jpeg(20 * i)), "label": i % 3}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    Tiny(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path


def test_a_prepared_tfds_data_set(section, prepared):
    (prepared / "tiny" / "1.9.0").mkdir()
    (prepared / "tiny" / "1.9.0" / "features.json").write_text("an older version, which must not be chosen")
    config = section(source="tfds:tiny")
    source = sources.open_source(config, "train")
    assert (len(source), source.classes, source.channels) == (10, ("a", "b", "c"), 3)
    assert isinstance(source[0]["image"], bytes)
    np.testing.assert_allclose(sorted(values_of(source)), 20 * np.arange(10), atol=2)
    assert labels_of(source) == [round(value / 20) % 3 for value in values_of(source)]
    assert values_of(pickle.loads(pickle.dumps(source))) == values_of(source)
    assert len(sources.open_source(section(source="tfds:tiny:1.10.0"), "train[:30%]")) == 3
    with pytest.raises(ValueError, match="tfds:tiny: there is no split 'val'; splits: test, train"):
        sources.open_source(config, "val")


def test_a_tfds_data_set_that_is_not_prepared(section, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        sources.open_source(section(source="tfds:imagenet2012"), "train")
    message = str(error.value)
    assert f"tfds:imagenet2012: nothing prepared in {tmp_path / 'imagenet2012'}" in message and "\n" not in message
    assert f"tfds build imagenet2012 --file_format=array_record --data_dir={tmp_path}" in message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": "digit"}, ValueError, "source='digit' is not one of .* nearest is 'digits'"),
        ({"source": "npz"}, ValueError, "source='npz' must have the form 'npz:<file>'"),
        ({"source": "digits:x"}, ValueError, "source='digits:x' must have the form 'digits'"),
        ({"source": "npz:/nowhere.npz"}, FileNotFoundError, "there is no file /nowhere.npz"),
        ({"source": "folder:/nowhere"}, FileNotFoundError, "there is no directory /nowhere"),
        ({"split": "val"}, ValueError, "digits: there is no split 'val'; splits: train, test"),
        ({"train_examples": 1438}, ValueError, r"train_examples=1438 must be in 1\.\.1437"),
        ({"train_examples": 0}, ValueError, r"train_examples=0 must be in 1\.\.1437"),
    ],
)
def test_errors_name_the_thing_the_value_and_the_rule(section, changes, error, message):
    config = section(**changes)
    with pytest.raises(error, match=message):
        sources.open_source(config, config.split)


def test_images_are_read_as_grey_or_colour():
    colour = np.array([[[200, 0, 0]]], np.uint8)
    assert np.asarray(reading.decode(colour, 1)).tolist() == [[60]]  # luma
    assert np.asarray(reading.decode(colour[..., :1], 3)).tolist() == [[[200] * 3]]
    assert reading.decode(jpeg(100), 1).getpixel((3, 3)) == 100


def test_folders_are_quick_to_send_to_workers(tmp_path):
    write_images(tmp_path, [f"train/{name}/{i}.png" for name in "ab" for i in range(50)])
    source = directories.Folder(str(tmp_path), "train", class_split="train")
    assert len(pickle.dumps(source)) < 3000
    assert labels_of(pickle.loads(pickle.dumps(source))) == [0] * 50 + [1] * 50
