"""Folders of images and label maps: the layouts of ADE20K, of VOC2012, and any other."""

import io
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds

from equivit.data import loader, pairs, reading, sources
from tests.data.contents import png

OBJECTS = (
    "Idx\tRatio\tTrain\tVal\tName\n1\t0.1576\t11664\t1172\twall\n"
    "2\t0.1072\t6046\t612\tbuilding, edifice\n3 \t0.05\t9\t1\tsky \n"
)


def write(root, names):
    """Files whose images are of grey level 10 i and whose maps have label i."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(np.full((5, 7), i if name.endswith("png") else 10 * i), palette="Class" in name))


def ade(root):
    for split, count in (("training", 4), ("validation", 2)):
        write(root, [f"images/{split}/ADE_{i}.jpg" for i in range(count)])
        write(root, [f"annotations/{split}/ADE_{i}.png" for i in range(count)])
    (root / "objectInfo150.txt").write_text(OBJECTS)


def voc(root):
    write(root, [f"JPEGImages/2007_{i}.jpg" for i in range(4)])  # more than are segmented
    write(root, [f"SegmentationClass/2007_{i}.png" for i in range(3)])
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_2\n2007_0\n")
    (lists / "val.txt").write_text("2007_1\n")


def other(root):
    for folder, extension in (("images", "jpeg"), ("labels", "png")):
        write(root, [f"{folder}/{split}/{name}.{extension}" for split in ("train", "val") for name in ("a", "sub/a")])
    (root / "images" / "train" / "notes.txt").write_text("no image")
    (root / "classes.txt").write_text("sky\nlarge car\nroad\nsea\n")


def examples(source):
    """The label and the grey level, divided by 10, of each example."""
    read = [reading.read(source, i, 1).example for i in range(len(source))]
    return [(each["map"].getpixel((6, 4)), each["image"].getpixel((6, 4)) // 10) for each in read]


@pytest.mark.parametrize(
    ("make", "splits", "classes", "found", "held_out"),
    [
        (ade, ("training", "validation"), ("wall", "building", "sky"), [(-1, 0), (0, 1), (1, 2), (2, 3)], 2),
        (voc, ("train", "val"), pairs.VOC, [(2, 2), (0, 0)], 1),
        (other, ("train", "val"), ("sky", "large car", "road", "sea"), [(0, 0), (1, 1)], 2),
    ],
    ids=["ADE20K", "VOC2012", "other"],
)
def test_layouts(section, tmp_path, make, splits, classes, found, held_out):
    make(tmp_path / "data")
    config = section(source=f"pairs:{tmp_path / 'data'}", split=splits[0], eval_split=splits[1])
    source = sources.open_source(config, splits[0])
    assert (source.classes, source.channels, len(source)) == (classes, 3, len(found))
    assert examples(source) == examples(pickle.loads(pickle.dumps(source))) == found
    first, second = source.where(0).split(" with ")
    for path, content in ((first, source[0]["image"]), (second, source[0]["map"])):
        assert pathlib.Path(path).read_bytes() == content
    assert len(sources.open_source(config, splits[1])) == held_out
    with pytest.raises(ValueError, match=f"there is no split 'tset'; splits: {splits[0]}, {splits[1]}"):
        sources.open_source(config, "tset")
    with pytest.raises(ValueError, match=r"pairs:.*: it must have images, labels, .*; take .*data"):
        sources.open_source(section(source=f"pairs:{tmp_path}"), splits[0])


def test_void_of_the_config_and_of_ade20k(section, tmp_path):
    ade(tmp_path)
    source = sources.open_source(section(source=f"pairs:{tmp_path}", void=(2,)), "training")
    assert source.classes == ("wall", "sky") and [label for label, _ in examples(source)] == [-1, 0, -1, 1]


def test_voc_has_the_21_classes_and_255_is_void(section, tmp_path):
    voc(tmp_path)
    (tmp_path / "SegmentationClass" / "2007_1.png").write_bytes(png(np.full((5, 7), 255)))
    config = section(source=f"pairs:{tmp_path}", split="train", eval_split="val", image_size=(5, 7))
    (batch,) = loader.evaluate(config, batch_size=1).batches()
    assert (batch["map"] == -1).all() and len(pairs.VOC) == len(set(pairs.VOC)) == 21 and pairs.VOC[15] == "person"


def remove(*names):
    return lambda root: [(root / name).unlink() for name in names]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            remove("labels/train/a.png"),
            ValueError,
            "labels/train: there is no label map 'a'; 1 of 2 are missing.*the same name",
        ),
        (remove("images/train/sub/a.jpeg"), ValueError, "images/train: there is no image 'sub/a'; 1 of 2 are missing"),
        (
            lambda root: write(root, ["images/train/a.bmp"]),
            ValueError,
            "a.jpeg and a.bmp|a.bmp and a.jpeg.* have the same name",
        ),
        (
            lambda root: (root / "classes.txt").write_text("\n"),
            ValueError,
            "classes.txt: it must have one class name per line",
        ),
        (lambda root: (root / "classes.txt").write_text("a\n\nb"), ValueError, "classes.txt: .* class 0 first"),
        (
            lambda root: (root / "classes.txt").write_bytes(b"caf\xe9"),
            ValueError,
            "classes.txt: it must be text in UTF-8",
        ),
        (remove("classes.txt"), ValueError, "it must have images, labels, classes.txt, or .*; it has images, labels"),
    ],
)
def test_what_is_wrong_with_folders_is_told(section, tmp_path, change, error, message):
    other(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=message) as raised:
        sources.open_source(section(source=f"pairs:{tmp_path}"), "train")
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_directory_that_is_missing_and_an_odd_list_of_ade20k(section, tmp_path):
    with pytest.raises(FileNotFoundError, match="pairs:/nowhere: there is no directory /nowhere"):
        sources.open_source(section(source="pairs:/nowhere"), "train")
    ade(tmp_path)
    (tmp_path / "objectInfo150.txt").write_text("Name\nwall\n")
    with pytest.raises(ValueError, match="objectInfo150.txt: it must have the columns Idx, Ratio, Train, Val and Name"):
        sources.open_source(section(source=f"pairs:{tmp_path}"), "training")


class SceneParse(tfds.core.GeneratorBasedBuilder):
    """With the features that TFDS has, but for the channels of its maps; its own name is taken."""

    VERSION = tfds.core.Version("1.0.0")
    CHANNELS = 1

    def _info(self):
        shapes = {"image": (None, None, 3), "annotation": (None, None, self.CHANNELS)}
        features = {key: tfds.features.Image(shape=shape, encoding_format="png") for key, shape in shapes.items()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        labels = np.zeros((5, 7, 3) if self.CHANNELS == 3 else (5, 7), np.uint8)
        labels[0, 0] = 150
        yield 0, {"image": io.BytesIO(png(np.full((5, 7, 3), 9))), "annotation": io.BytesIO(png(labels))}


@pytest.mark.parametrize("channels", [1, 3])
def test_scene_parsing_of_tfds_needs_maps_of_its_150_classes(section, tmp_path, monkeypatch, channels):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    config = section(source="tfds:scene_parse150")
    with pytest.raises(FileNotFoundError, match="nothing prepared .*100 kinds .* use data.source='pairs:<dir>'"):
        sources.open_source(config, "train")
    monkeypatch.setattr(SceneParse, "CHANNELS", channels)
    SceneParse(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    (tmp_path / "scene_parse").rename(tmp_path / "scene_parse150")
    if channels == 3:
        with pytest.raises(ValueError, match="tfds:scene_parse150: TFDS prepares .*'pairs:<dir>'"):
            sources.open_source(config, "train")
        return
    source = sources.open_source(config, "train")
    labels = np.asarray(reading.read(source, 0, 3).example["map"])
    assert len(source.classes) == 150 and labels[0, 0] == 149 and (labels.ravel()[1:] == -1).all()
