"""Data sets of Hugging Face, from local folders; these need the library `datasets`, an extra that may be absent."""

import pickle
import sys

import pytest

from equivit.data import sources
from tests.data.contents import jpeg, labels_of, values_of


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets")


@pytest.fixture
def made(datasets):
    """A data set of images of these grey levels; label i % 3, or those given."""

    kinds = {"photo": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}

    def make(values, labels=None):
        images = [{"bytes": jpeg(value), "path": None} for value in values]
        labels = [i % 3 for i in range(len(values))] if labels is None else labels
        return datasets.Dataset.from_dict({"photo": images, "label": labels}, features=datasets.Features(kinds))

    return make


def test_folders_of_save_to_disk_and_of_parquet(section, datasets, made, tmp_path):
    whole = datasets.DatasetDict({"train": made(range(0, 200, 40)), "test": made([8, 16], labels=[-1, -1])})
    whole.save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    whole["train"].to_parquet(tmp_path / "files" / "train.parquet")
    whole["train"].save_to_disk(tmp_path / "one")
    for name in ("saved", "files", "one"):
        train = sources.open_source(section(source=f"hf:{tmp_path}/{name}"), "train")
        assert (len(train), train.channels, train.classes) == (5, 3, ("a", "b", "c"))
        assert labels_of(train) == sources.labels(train).tolist() == [0, 1, 2, 0, 1]
        assert values_of(train) == [0, 40, 80, 120, 160] and train.where(3).endswith(f"{name} train[3]")
        assert values_of(pickle.loads(pickle.dumps(train))) == values_of(train)
    test = sources.open_source(section(source=f"hf:{tmp_path}/saved"), "test")
    assert test.labels is None and test.classes == () and values_of(test) == [8, 16]
    with pytest.raises(ValueError, match="saved: there is no split 'val'; splits: train, test"):
        sources.open_source(section(source=f"hf:{tmp_path}/saved"), "val")


def test_other_columns_and_places_are_one_line(section, datasets, made, tmp_path):
    wrong = {
        "names": (made([0]).cast_column("label", datasets.Value("string")), "'label' is Value.* class_encode_column"),
        "two": (made([0]).map(lambda x: {"other": x["photo"]}), "one column of images, not photo, other"),
        "none": (made([0]).select_columns("label"), "one column of images, not none"),
        "some": (made([0, 1], labels=[0, -1]), "1 of 2 images of split 'train' have no label"),
    }
    for name, (data, message) in wrong.items():
        data.save_to_disk(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            sources.open_source(section(source=f"hf:{tmp_path}/{name}"), "train")
    places = {"a/b/c/d": "must be a folder, hf:ORG/NAME", "org/name": r"hf:org/name: cannot be loaded \("}
    for place, message in places.items():
        with pytest.raises(ValueError, match=message) as error:
            sources.open_source(section(source=f"hf:{place}"), "train")
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="there is no folder /nowhere"):
        sources.open_source(section(source="hf:/nowhere"), "train")


def test_without_the_library(section, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'hf:org/name: the library datasets is not installed .*pip install "datasets'):
        sources.open_source(section(source="hf:org/name"), "train")
