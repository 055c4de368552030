"""Sets of time series: files of every kind, values that are missing, normalisation, halves of the test set."""

import sys
import types

import numpy as np
import pytest

from equivit.data import series, series_formats
from equivit.data.series_formats import Missing

NAN = np.nan

TS = """#a comment
% another
@problemName Vowels
@timeStamps false
@missing true
@univariate false
@classLabel true b a
@data
1,2,3:10,20,30:b
4,?:40,50,NaN,70:a
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Vowels").mkdir()
    for split in ("TRAIN", "TEST"):
        (tmp_path / "Vowels" / f"Vowels_{split}.ts").write_text(TS)
        (tmp_path / f"Italy_{split}.tsv").write_text("10\t1.0\t2.0\t4.0\n9\t3.0\tNaN\t5.0\n9\t7\t8\tNaN\n")
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    arrays = dict(x=x, y=np.array([0, 1, 0, 1]), len=np.array([3, 2, 3, 1]))
    np.savez(
        tmp_path / "Plain.npz",
        classes=np.array(["walk", "run"]),
        **{f"{split}_{kind}": a for split in ("train", "test") for kind, a in arrays.items()},
    )
    return tmp_path


def test_ts(folder):
    first, second = series.read("Vowels", str(folder))["train"].series
    np.testing.assert_array_equal(first, [[1, 2, 3], [10, 20, 30]])
    np.testing.assert_array_equal(second, [[4, NAN, NAN, NAN], [40, 50, NAN, 70]])
    data = series.load("Vowels", directory=str(folder), normalize="none")
    assert data.classes == ("a", "b") and data.train.labels.tolist() == [1, 0]
    assert data.train.series.dtype == np.float32 and data.train.labels.dtype == np.int32
    expected = [[[1, 10], [2, 20], [3, 30], [3, 30]], [[4, 40], [4, 50], [4, 60], [4, 70]]]
    np.testing.assert_array_equal(data.train.series, expected)


def test_tsv(folder):
    data = series.load("Italy", directory=str(folder), normalize="none")
    assert data.classes == ("9", "10") and data.train.labels.tolist() == [1, 0, 0]  # numbers in their order
    np.testing.assert_array_equal(data.train.series[..., 0], [[1, 2, 4], [3, 4, 5], [7, 8, 8]])


def test_npz_repeats_the_last_value_of_a_short_series(folder):
    data = series.load("Plain", directory=str(folder), normalize="none")
    assert data.classes == ("run", "walk") and data.train.labels.tolist() == [1, 0, 1, 0]
    np.testing.assert_array_equal(data.train.series[1], [[6, 9], [7, 10], [7, 10]])
    np.testing.assert_array_equal(data.train.series[3], [[18, 21]] * 3)


def test_fill():
    x = np.array([[NAN, 2, NAN, NAN, 8, NAN], [NAN] * 6, [1, 2, 3, 4, 5, 6.0]])[..., None]
    filled = series.fill(x)[..., 0]
    np.testing.assert_array_equal(filled, [[2, 2, 4, 6, 8, 8], [0] * 6, [1, 2, 3, 4, 5, 6]])
    assert np.isnan(x[0, 0, 0])  # what was given stays


@pytest.mark.parametrize("normalize", series.NORMALIZE)
def test_normalisation_is_that_of_the_values_that_are_there(folder, normalize):
    data = series.load("Plain", directory=str(folder), normalize=normalize)
    x = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
    there = [[case[c, :length] for case, length in zip(x, (3, 2, 3, 1), strict=True)] for c in (0, 1)]
    for channel, parts in enumerate(there):
        for n, part in enumerate(parts):
            whole = {"training": np.concatenate(parts), "series": part, "none": np.array([-1.0, 1.0])}[normalize]
            expected = (part - whole.mean()) / (whole.std() or 1)  # a series of one value is constant
            np.testing.assert_allclose(data.train.series[n, : len(part), channel], expected, rtol=1e-6)


def test_the_test_set_is_normalised_by_the_training_series(tmp_path):
    x = np.random.default_rng(0).normal(5, 3, (6, 1, 8)).astype(np.float32)
    labels = dict(train_y=np.zeros(6, int), test_y=np.zeros(6, int), classes=np.array(["one"]))
    np.savez(tmp_path / "a.npz", train_x=x, test_x=x + 100, **labels)
    data = series.load("a", directory=str(tmp_path))
    assert abs(data.train.series.mean()) < 1e-6 and abs(data.train.series.std() - 1) < 1e-6
    assert data.test.series.mean() > 20


def test_halves_have_equal_shares_of_every_class():
    labels = np.array([0] * 7 + [1] * 3 + [2] * 1 + [3] * 10, np.int32)
    split = series.Split(np.arange(21.0).reshape(-1, 1, 1), labels)
    first, second = series.halve(split, 0)
    assert sorted([*first.series.ravel(), *second.series.ravel()]) == list(range(21))
    for half in (first, second):
        np.testing.assert_array_equal(half.labels, labels[half.series.ravel().astype(int)])
    assert max(abs(np.bincount(first.labels, minlength=4) - np.bincount(second.labels, minlength=4))) <= 1
    assert abs(len(first.labels) - len(second.labels)) <= 1
    np.testing.assert_array_equal(series.halve(split, 0)[0].series, first.series)
    assert not np.array_equal(series.halve(split, 1)[0].series, first.series)


def test_synthetic_is_the_same_every_time():
    data, again = series.load("synthetic"), series.load("synthetic")
    assert data.train.series.shape == (96, 40, 2) and len(data.classes) == 3
    np.testing.assert_array_equal(data.train.series, again.train.series)


def pretend_aeon(monkeypatch, folder, load_classification):
    """A package `aeon` in a folder, whose sets this function reads."""
    package, module = types.ModuleType("aeon"), types.ModuleType("aeon.datasets")
    module.load_classification, module.__file__ = load_classification, str(folder / "__init__.py")
    module.tsc_datasets, package.datasets = types.SimpleNamespace(tsc_zenodo={"Elsewhere": 1, "Vowels": 2}), module
    monkeypatch.setitem(sys.modules, "aeon", package)
    monkeypatch.setitem(sys.modules, "aeon.datasets", module)


def test_aeon_by_name(monkeypatch, tmp_path):
    def load_classification(name, split, extract_path, load_equal_length, load_no_missing):
        assert not (load_equal_length or load_no_missing)
        assert name == "Three" and extract_path is None
        return [np.full((2, length), length) for length in (3, 5)], np.array(["x", split])

    pretend_aeon(monkeypatch, tmp_path, load_classification)
    data = series.load("Three", normalize="none")
    assert data.train.series.shape == (2, 5, 2) and data.classes == ("test", "train", "x")


def test_a_directory_comes_before_aeon(monkeypatch, folder, tmp_path):
    """aeon reads the sets that the directory lacks, or downloads them to it; what it bundles it need not download."""

    def load_classification(name, split, extract_path, load_equal_length, load_no_missing):
        assert not (load_equal_length or load_no_missing)
        if name not in ("Three", "Bundled"):
            (folder / name).mkdir(exist_ok=True)  # as aeon leaves it where a download fails
            raise OSError("no such set")
        assert extract_path == (None if name == "Bundled" else str(folder))
        return [np.full((2, 3), 1.0)], np.array([split])

    pretend_aeon(monkeypatch, tmp_path / "aeon", load_classification)
    (tmp_path / "aeon" / "data" / "Bundled").mkdir(parents=True)
    assert series.read("Three", str(folder))["test"].labels == ["test"]
    assert series.read("Bundled", str(folder))["test"].labels == ["test"]
    assert series.load("Vowels", directory=str(folder)).name == "Vowels"
    with pytest.raises(Missing, match="neither Vowel.npz nor .*the nearest is 'Vowels'.*aeon has no .*'Vowels'.$"):
        series.load("Vowel", directory=str(folder))
    for _ in range(2):  # the empty folder of the first is no set
        with pytest.raises(Missing, match=r"_TEST as .ts or .tsv\.  Without them.* could not read"):
            series.load("Elsewhere", directory=str(folder))


def test_a_set_that_ships_inside_aeon():
    pytest.importorskip("aeon")
    data = series.load("JapaneseVowels", normalize="none")
    assert data.train.series.shape == (270, 29, 12) and len(data.classes) == 9
    np.testing.assert_allclose(data.train.series[0, 19:, 0], 1.261441)  # it is 20 steps long


def test_without_aeon(monkeypatch):
    monkeypatch.setitem(sys.modules, "aeon", None)
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)
    with pytest.raises(Missing, match=r"'Crop': reading a data set by name needs aeon \(.*\); pip install aeon, or"):
        series.load("Crop")


def test_an_aeon_that_cannot_be_imported(monkeypatch):
    class Broken:
        def find_spec(self, name, path, target=None):
            if name == "aeon":
                raise ImportError("Numba needs an older NumPy.")

    monkeypatch.delitem(sys.modules, "aeon", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(Missing, match=r"needs aeon \(.*Numba needs an older NumPy.*\); pip install aeon, or"):
        series.load("Crop")


def test_a_name_that_is_not_there(folder):
    with pytest.raises(FileNotFoundError, match="neither Vowel.npz nor .* the nearest is 'Vowels'"):
        series.load("Vowel", directory=str(folder))
    with pytest.raises(ValueError, match="normalize='serie' is not one of training, series, none"):
        series.load("Vowels", directory=str(folder), normalize="serie")


@pytest.mark.parametrize(
    "text,message",
    [
        ("@timeStamps true\n@data\n", "time stamps are not supported"),
        ("@classLabel false\n@data\n", "there are no class labels"),
        ("@classLabel true a\n@data\n1,x:a\n", "line 3: could not convert string to float: 'x'"),
        ("@classLabel true a\n@data\n1,2:a\n1,-1e39:a\n", "line 4: a value is infinite in float32"),
        ("@classLabel true a\n@data\n1,inf:a\n", "line 3: a value is infinite in float32"),
        ("@classLabel true a\n@data\nlabel\n", "line 3: there are no values"),
        ("@classLabel true a\n@data\n", "no series"),
    ],
)
def test_bad_ts_files(tmp_path, text, message):
    (tmp_path / "a_TRAIN.ts").write_text(text)
    with pytest.raises(ValueError, match=message):
        series_formats.read_ts(tmp_path / "a_TRAIN.ts")


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(train_y=None), "the array `train_y` is missing"),
        (dict(test_x=np.zeros((4, 3))), r"a.npz: `test_x` must be numbers \[N, .*\] and .* is float64 \[4, 3\]"),
        (dict(test_y=np.zeros(3, int)), "for 3 labels"),
        (dict(train_y=np.full(4, 2)), "`train_y` must be integers in 0..1"),
        (dict(train_x=np.zeros(())), r"a.npz: `train_x` must be .* it is float64 \[\]"),
        (dict(test_y=np.array(0)), r"a.npz: `test_y` must be int \[N\] and not empty, but it is int64 \[\]"),
        (dict(test_y=np.zeros(4)), r"a.npz: `test_y` must be int \[N\] .* float64 \[4\]"),
        (dict(classes=np.array("a")), r"a.npz: `classes` must be names \[K\] and not empty, but it is <U1 \[\]"),
        (dict(train_x=np.zeros((0, 2, 5)), train_y=np.zeros(0, int)), r"`train_x` must be .* float64 \[0, 2, 5\]"),
        (dict(train_x=np.full((4, 2, 5), "a")), r"`train_x` must be numbers .* <U1 \[4, 2, 5\]"),
        (dict(train_len=np.array(5)), r"`train_len` must be int \[N\] .* int64 \[\]"),
        (dict(train_len=np.array([5, 5, 0, 6])), r"`train_len` is in 0..6; series of length 5 allow 1..5"),
        (dict(train_x=np.full((4, 2, 5), 1e39)), r"a.npz: `train_x` has values that are infinite in float32"),
        (
            dict(classes=np.full(2, 2**31, np.uint32).view("<U1")),
            r"'classes' holds text with the invalid character",
        ),
        (dict(test_x=np.zeros((4, 3, 5))), r"the same number of channels, not \[2, 3\]"),
    ],
)
def test_bad_npz_files(tmp_path, change, message):
    x, y = np.zeros((4, 2, 5)), np.zeros(4, int)
    arrays = dict(train_x=x, train_y=y, test_x=x, test_y=y, classes=np.array(["a", "b"])) | change
    np.savez(tmp_path / "a.npz", **{key: array for key, array in arrays.items() if array is not None})
    with pytest.raises(ValueError, match=message) as error:
        series.load("a", directory=str(tmp_path))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_npz_file(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="is damaged or not an .npz file"):
        series.load("a", directory=str(tmp_path))


@pytest.mark.parametrize("read, ending", [(series_formats.read_ts, "ts"), (series_formats.read_tsv, "tsv")])
def test_text_that_is_not_utf_8_is_refused_by_name(tmp_path, read, ending):
    (tmp_path / f"x.{ending}").write_bytes(b"\xff\xfe1\t2")
    with pytest.raises(ValueError, match=f"x.{ending}: it must be text in UTF-8"):
        read(tmp_path / f"x.{ending}")
