import io
import pickle
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from equivit.data import directories, sources
from tests.data.contents import jpeg, labels_of, values_of


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
    for split in ("", ".", "train/..", str(tmp_path / "val")):  # a split is a folder inside the directory
        with pytest.raises(ValueError, match="there is no .*; folders: train, val"):
            sources.open_source(config, split)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="split 'empty' has no examples"):
        sources.open_source(config, "empty")
    write_images(tmp_path, ["val/d/3.png"])
    with pytest.raises(ValueError, match="classes that .*train does not have: d"):
        sources.open_source(config, "val")


def test_hidden_files_and_folders_named_as_images_are_none(section, tmp_path):
    write_images(tmp_path, ["cat/a.png", "cat/._a.png"])
    (tmp_path / "cat/b.png").mkdir()
    assert len(sources.open_source(section(source=f"folder:{tmp_path}"), "train")) == 1


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
    features = prepared / "tiny" / "1.10.0" / "features.json"
    text = features.read_text()
    for old, new in (("uint8", "float32"), ("jpeg", "png"), ('"3"\n', '"1"\n')):  # four bytes of a file are one value
        text = text.replace(old, new, 1)
    features.write_text(text)
    with pytest.raises(ValueError, match="tfds:tiny: images are float32, whose range is unknown; they must be uint8"):
        sources.open_source(config, "train")


DAMAGES = {
    "cut": ("features.json", lambda text: text[:100], "features.json: is damaged"),
    "deep": ("features.json", lambda text: "[" * 100_000, "features.json: is damaged"),
    "field": ("features.json", lambda text: text.replace("classLabel", "classLabels"), "ParseError"),
    "version": ("dataset_info.json", lambda text: text.replace("1.10.0", "1."), "Invalid version"),
    "bytes": ("dataset_info.json", lambda text: text.replace("tiny", "\udcff"), "'utf-8' codec can't decode"),
    "classes": ("features.json", lambda text: text.replace('Classes": "3"', 'Classes": "9000000000"'), "damaged"),
    "module": ("features.json", lambda text: text.replace("tensorflow_datasets", "this"), "not a TFDS feature"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tfds_data_set_is_one_line(section, prepared, name):
    file, change, message = DAMAGES[name]
    path = prepared / "tiny" / "1.10.0" / file
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    if name == "classes":
        (path.parent / "label.labels.txt").unlink()
    sys.modules.pop("this", None)
    with pytest.raises(ValueError, match=message) as error:
        sources.open_source(section(source="tfds:tiny"), "train")
    assert str(path.parent) in str(error.value) and "\n" not in str(error.value)
    assert "this" not in sys.modules  # a name in features.json imports nothing


def test_a_tfds_data_set_that_is_not_prepared(section, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        sources.open_source(section(source="tfds:imagenet2012"), "train")
    message = str(error.value)
    assert f"tfds:imagenet2012: nothing prepared in {tmp_path / 'imagenet2012'}" in message and "\n" not in message
    assert f"tfds build imagenet2012 --file_format=array_record --data_dir={tmp_path}" in message


@pytest.mark.parametrize("kind", ["folder", "pairs", "coco"])
def test_a_misspelt_directory_is_named_with_its_neighbour(section, tmp_path, kind):
    (tmp_path / "imagenet").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*/imagnet; the nearest is 'imagenet'\.$"):
        sources.open_source(section(source=f"{kind}:{tmp_path}/imagnet"), "train")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": "digit"}, ValueError, "source='digit' is not one of .* nearest is 'digits'"),
        ({"source": "npz"}, ValueError, "source='npz' must have the form 'npz:<file>'"),
        ({"source": "digits:x"}, ValueError, "source='digits:x' must have the form 'digits'"),
        ({"source": "npz:/nowhere.npz"}, FileNotFoundError, "no file /nowhere.npz; set config.data.source to a file"),
        ({"source": "npz:/nowhere/x.npz"}, FileNotFoundError, r"no file .*; there is no directory /nowhere either\.$"),
        ({"source": "folder:/nowhere"}, FileNotFoundError, "no directory /nowhere; set config.data.source"),
        *(
            ({"source": f"{kind}:~no-such-user/x"}, FileNotFoundError, "there is no .* ~no-such-user/x")
            for kind in ("folder", "npz", "pairs", "coco", "list", "csv")
        ),
        ({"split": "val"}, ValueError, "digits: there is no split 'val'; splits: train, test"),
        ({"train_examples": 1438}, ValueError, r"train_examples=1438 must be in 1\.\.1437"),
        ({"train_examples": 0}, ValueError, r"train_examples=0 must be in 1\.\.1437"),
    ],
)
def test_errors_name_the_thing_the_value_and_the_rule(section, changes, error, message):
    config = section(**changes)
    with pytest.raises(error, match=message):
        sources.open_source(config, config.split)


def test_folders_are_quick_to_send_to_workers(tmp_path):
    write_images(tmp_path, [f"train/{name}/{i}.png" for name in "ab" for i in range(50)])
    source = directories.Folder(str(tmp_path), "train", class_split="train")
    assert len(pickle.dumps(source)) < 3000
    assert labels_of(pickle.loads(pickle.dumps(source))) == [0] * 50 + [1] * 50


def test_a_split_that_is_also_the_evaluation_s_keeps_its_limit(section):
    def number(**limits):
        return len(sources.open_source(section(eval_split="train", **limits), "train"))

    assert (number(train_examples=64), number(train_examples=64, eval_examples=32)) == (64, 32)
