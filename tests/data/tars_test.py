"""Tar shards: samples by key in the order of the shards, read at random, with labels from .cls or .json."""

import io
import json
import pickle
import tarfile

import pytest

from equivit.data import reading, sources, tars
from tests.data.contents import jpeg, labels_of, values_of


def write(path, files):
    """A tar file of (name, content)."""
    with tarfile.open(path, "w") as file:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def sample(key, value, label=None):
    rest = [] if label is None else [(f"{key}.cls", str(label).encode())]
    return [(f"{key}.jpg", jpeg(value)), *rest]


@pytest.fixture
def opened(section, tmp_path):
    def open_(pattern="{split}-*.tar", split="train", **changes):
        config = section(source=f"webdataset:{tmp_path}/{pattern}", eval_split="val", **changes)
        return sources.open_source(config, split)

    return open_


def test_samples_in_the_order_of_the_shards(opened, tmp_path):
    write(tmp_path / "train-001.tar", sample("b.0/x", 80, 2) + [("b/y.seg.png", b"map"), *sample("b/y", 100, "00")])
    write(tmp_path / "train-000.tar", [("._a.jpg", b"of macOS"), *sample("z", 40, 0), *sample("a", 60, 1)])
    write(tmp_path / "val-000.tar", sample("q", 20, 1))
    train = opened()
    assert (len(train), train.classes, labels_of(train)) == (4, ("0", "1", "2"), [0, 1, 2, 0])
    assert values_of(train) == [40, 60, 80, 100] and train.where(2) == f"{tmp_path}/train-001.tar: b.0/x"
    again = pickle.loads(pickle.dumps(train))
    assert [again[i] for i in (3, 0)] == [train[i] for i in (3, 0)]
    val = opened(split="val")
    assert labels_of(val) == [1] and val.classes == train.classes  # although class 2 is not there
    assert values_of(opened("train-{000..001}.tar")) == values_of(train)
    (tmp_path / "classes.txt").write_text("cat\ndog\neel\nfox\n")
    assert opened().classes == ("cat", "dog", "eel", "fox")


def test_names_in_json_and_images_without_labels(opened, tmp_path):
    labels = [json.dumps({"label": name, "width": 9}).encode() for name in ("fox", "cat")]
    write(tmp_path / "train-000.tar", [("0.json", labels[0]), *sample("0", 0), *sample("1", 1), ("1.json", labels[1])])
    assert opened().classes == ("cat", "fox") and labels_of(opened()) == [1, 0]
    write(tmp_path / "bare.tar", [*sample("0", 0), ("0.json", b"{}"), *sample("1", 1)])
    assert opened("bare.tar").labels is None and set(opened("bare.tar")[0]) == {"image"}


def test_a_damaged_image_is_replaced_as_in_other_sources(opened, tmp_path):
    write(tmp_path / "train-000.tar", [("0.jpg", b"no image"), *sample("1", 90)])
    read = reading.read(opened(), 0, 3)
    assert list(read.unreadable) == [f"{tmp_path}/train-000.tar: 0"]


@pytest.mark.parametrize("damage", ["a bit", "noise", "cut before", "cut within", "without an end"])
def test_no_sample_is_lost_behind_a_damaged_header(opened, tmp_path, damage):
    path = tmp_path / "train-000.tar"
    write(path, [*sample("0", 0), *sample("1", 1)])
    assert len(opened()) == 2
    with tarfile.open(path) as file:
        _, header = (member.offset for member in file)
        end = file.offset
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[header + 150] ^= 1  # of the checksum
    elif damage == "noise":
        content[header : header + 512] = b"x" * 512
    else:
        del content[{"cut before": header, "cut within": header + 300, "without an end": end}[damage] :]
    path.write_bytes(content)
    tars.indexed.cache_clear()
    with pytest.raises(ValueError, match="must be a whole tar file, .* at byte"):
        opened()


def test_names_of_classes_are_those_of_the_class_split(section, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write(tmp_path / split / "0.tar", [*sample("0", 0, 0), *sample("1", 1, 1)])
    (tmp_path / "train/classes.txt").write_text("cat\ndog\n")
    config = section(source=f"webdataset:{tmp_path}/{{split}}/0.tar", eval_split="val")
    assert [sources.open_source(config, split).classes for split in ("train", "val")] == [("cat", "dog")] * 2


WRONG = {
    "compressed": (None, "must be a whole tar file, without compression"),
    "cut": (sample("0", 0, 1), "must be a whole tar file"),
    "no image": ([("0.cls", b"1")], "0 must have one image, and one file of an extension, not: cls"),
    "two images": ([*sample("0", 0), ("0.png", b"")], "0 must have one image, .* not: jpg, png"),
    "twice": (sample("0", 0) * 2, "0 must have one image, and one file of an extension, not: jpg, jpg"),
    "one label": (sample("0", 0, 1) + sample("1", 0), "train-000.tar: 1 has no label, and other samples have one"),
    "bytes": ([*sample("0", 0), ("0.cls", b"\xff")], r"0.cls is no label \(UnicodeDecodeError"),
    "list": ([*sample("0", 0), ("0.json", b"[1]")], r"0.json is no label \(AttributeError"),
    "half": ([*sample("0", 0), ("0.json", b'{"label": 0.5}')], "the label 0.5 must be the number of a class"),
    "empty": ([*sample("0", 0), ("0.cls", b" ")], "the label '' must be the number of a class or its name"),
    "long": ([*sample("0", 0), ("0.cls", b"1" * 101)], "has 101 bytes; a label has at most 100"),
    "many": (sample("0", 0, 10**9), "1,000,000,001 classes are more than 1,000,000"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shards_are_one_line(opened, tmp_path, name):
    files, message = WRONG[name]
    path = tmp_path / "train-000.tar"
    if files is None:
        with tarfile.open(path, "w:gz") as file:
            file.addfile(tarfile.TarInfo("0.jpg"))
    else:
        write(path, files)
    if name == "cut":
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match=message) as error:
        opened()
    assert str(path.parent) in str(error.value) and "\n" not in str(error.value)


def test_splits_and_missing_shards(opened, tmp_path):
    write(tmp_path / "train-000.tar", sample("0", 0, 0))
    write(tmp_path / "val-000.tar", sample("0", 0, 3))
    with pytest.raises(ValueError, match="val-000.tar: 0: the label '3' is not one of the 1 classes"):
        opened(split="val")
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*/train-001.tar; \* stands for any names"):
        opened("train-{000..001}.tar")
    with pytest.raises(ValueError, match=r"there is no split 'val'; \{split\} in the pattern stands for the split"):
        opened("train-000.tar", "val")
    with pytest.raises(FileNotFoundError, match=r"there is no shard .*/\[t\]rain-\*.tar"):
        opened("[t]rain-*.tar")
    assert tars.shards("a{8..10}b{0..1}") == ("a8b0", "a8b1", "a9b0", "a9b1", "a10b0", "a10b1")
