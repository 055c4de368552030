"""Npz files: both layouts are read, and opening a wrong file names its fault."""

import io
import pickle
import zipfile

import numpy as np
import pytest

from equivit import archives
from equivit.data import label_maps, reading, sources
from tests.data.contents import jpeg, labels_of, values_of


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
    maps = np.random.default_rng(0).integers(0, 2, (5, 7, 9), np.uint8)
    np.savez(npz, **content, **{f"train_{kind}": maps})
    source = pickle.loads(pickle.dumps(sources.open_source(section(source=f"npz:{npz}"), "train")))
    examples = [reading.read(source, i, 3).example for i in range(5)]
    assert np.array_equal(np.stack([example["map"] for example in examples]), maps)
    assert [example.get("label") for example in examples] == ([0, 1, 0, 1, 0] if labelled else [None] * 5)
    if not labelled:
        with pytest.raises(ValueError, match="there is no split 'test'; splits: train"):
            sources.open_source(section(source=f"npz:{npz}"), "test")


def test_names_in_bytes_and_images_with_transparency(section, tmp_path):
    shared = dict(train_label=np.zeros(1, int), classes=np.array(["cät".encode()]))
    for name, channels in (("grey", 2), ("colour", 4)):
        image = np.full((1, 7, 9, channels), 255, np.uint8)
        image[..., :-1] = 80
        np.savez(tmp_path / f"{name}.npz", train_image=image, **shared)
    grey, colour = (sources.open_source(section(source=f"npz:{tmp_path}/{n}.npz"), "train") for n in ("grey", "colour"))
    assert grey.classes == ("cät",) and (grey.channels, colour.channels) == (1, 3)
    assert values_of(grey) == values_of(colour) == [80]


JPEG = np.zeros(8, np.uint8)


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
        ({"classes": np.array([b"\xff", b"x"])}, "`classes` must be text in UTF-8"),
        ({"classes": np.array("cat")}, r"`classes` must be a list of names, .* not <U3 \[\]"),
        (
            {"classes": np.full(2, 2**31, np.uint32).view("<U1")},
            "holds text with the invalid character 0x80000000",
        ),
        ({"classes": np.array(["x", "\ud800"])}, "the invalid character 0xd800"),
        ({"classes": np.array(["x", 1], object)}, "data.npz: 'classes' holds Python objects.*dtype=str for names"),
        ({"a_label": np.array([0, 1, 0], object)}, "data.npz: 'a_label' holds Python objects"),
        ({"a_label": np.array([0, 0.5, 1])}, r"a_label\[1\]=0.5 must be a whole number, .* 1 of 3 labels are not"),
        ({"a_label": np.array([0, np.nan, np.inf])}, r"a_label\[1\]=nan must be a whole number"),
        ({"a_label": np.array(["x", "y", "x"])}, r"a_label must be int \[N\], not <U1 \[3\]; give the index of each"),
        ({"a_label": np.eye(3, 2)}, r"a_label must be int \[N\], not float64 \[3, 2\]; .* use argmax\(-1\)"),
        ({"a_label": np.array([-1, 0, 0])}, r"a_label is in -1\.\.0; .* count from 0"),
        ({"a_image": np.zeros((3, 0, 4, 1), np.uint8)}, r"at least one pixel, not uint8 \[3, 0, 4, 1\]"),
        ({"a_image": np.zeros((0, 4, 4, 1), np.uint8)}, r"at least one pixel, not uint8 \[0, 4, 4, 1\]"),
        ({"a_image": np.zeros((3, 1, 4, 8), np.uint8)}, r"C = 1 \(grey\) or 3 \(RGB\), .*not uint8 \[3, 1, 4, 8\]"),
        ({"a_image": np.zeros((3, 4, 4, 1), np.int32)}, "image must be uint8 .* not int32 .*scale others to 0..255"),
        ({"a_jpeg": JPEG}, "`a_offset`, int .N . 1., .* is missing; keys: a_image, a_jpeg, a_label, classes"),
        ({"a_jpeg": JPEG, "a_offset": np.array(3)}, r"a_offset must be int \[N \+ 1\] .* not int64 \[\]"),
        ({"a_jpeg": JPEG, "a_offset": np.array([0, 4, 2, 8])}, "image 1 is empty: it goes from 4 to 2"),
        ({"a_jpeg": JPEG, "a_offset": np.array([0, 4, 6, 9])}, r"a_offset is in 0\.\.9; .* of 8 bytes allows 0\.\.8"),
        ({"a_jpeg": JPEG[None], "a_offset": np.array([0, 8])}, r"a_jpeg must be uint8 \[bytes\], not uint8 \[1, 8\]"),
    ],
)
def test_a_wrong_npz_is_refused(section, tmp_path, changes, message):
    content = {"a_image": np.zeros((3, 4, 4, 1), np.uint8), "a_label": np.array([0, 1, 0]), "classes": ["x", "y"]}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    np.savez(tmp_path / "data.npz", **content)
    with pytest.raises(ValueError, match=message) as error:
        sources.open_source(section(source=f"npz:{tmp_path / 'data.npz'}"), "a")
    assert str(tmp_path / "data.npz") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [np.float32, np.bool_, np.uint8])
def test_whole_labels_of_any_type_are_taken(section, tmp_path, kind):
    content = {"a_image": np.zeros((3, 4, 4, 1), np.uint8), "a_label": np.array([0, 1, 0], kind), "classes": ["x", "y"]}
    np.savez(tmp_path / "data.npz", **content)
    source = sources.open_source(section(source=f"npz:{tmp_path / 'data.npz'}"), "a")
    assert labels_of(source) == [0, 1, 0] and sources.present(source).tolist() == [0, 1]


def test_a_map_of_another_size_than_its_image_file_is_told(section, tmp_path):
    content = {"classes": ["x"], "train_map": np.zeros((1, 4, 4), int), "train_offset": np.array([0, len(jpeg(0))])}
    np.savez(tmp_path / "data.npz", train_jpeg=np.frombuffer(jpeg(0), np.uint8), **content)
    source = sources.open_source(section(source=f"npz:{tmp_path / 'data.npz'}"), "train")
    with pytest.raises(label_maps.MapError, match=r"data.npz train\[0\]: its label map is 4x4 for an image of 7x9"):
        reading.read(source, 0, 3)


def test_a_file_that_is_no_npz_is_refused(section, tmp_path):
    config = section(source=f"npz:{tmp_path / 'data.npz'}")
    for content in (b"text", b"PK\x03\x04", b"\x93NUMPY", b""):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(ValueError, match="is damaged or not an .npz file"):
            sources.open_source(config, "train")


def entries(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path, entries):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_damaged_bytes_are_told_by_file_and_key(section, npz):
    content = npz.read_bytes()
    place = content.index(b"train_label.npy") + len("train_label.npy") + 30  # in the compressed data
    npz.write_bytes(content[:place] + bytes(byte ^ 255 for byte in content[place : place + 20]) + content[place + 20 :])
    with pytest.raises(ValueError, match="data.npz: is damaged, or 'train_label' is not a plain array"):
        sources.open_source(section(source=f"npz:{npz}"), "train")


def test_a_header_that_lies_is_refused_before_memory_is_taken(section, npz):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**13,)})
    name = next(name for name in ("train_image.npy", "train_jpeg.npy") if name in entries(npz))
    write(npz, entries(npz) | {name: header.getvalue() + bytes(16)})
    with pytest.raises(ValueError, match=r"data.npz: 'train_\w+' declares uint8 \[10{13}\] and holds 16 bytes"):
        sources.open_source(section(source=f"npz:{npz}"), "train")


def test_what_does_not_fit_into_memory_is_told(section, npz, monkeypatch):
    def read(stream, allow_pickle):
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(np.lib.format, "read_array", read)
    with pytest.raises(ValueError, match=r"data.npz: 'classes' does not fit into .* memory \(Unable to allocate 9 GiB"):
        sources.open_source(section(source=f"npz:{npz}"), "train")


def test_what_a_file_becomes_is_in_proportion(section, npz, monkeypatch):
    """Zeros compress a thousand times; nothing of them is inflated, and without compression they are read."""
    found = entries(npz)
    with np.load(npz) as file:
        content = dict(file)
    labels = np.zeros(10**6, np.int64)
    for save in (np.savez_compressed, np.savez):
        save(npz, **content | {"train_label": labels})
        monkeypatch.setattr(archives, "FREE", 10**6)
        with pytest.raises(ValueError) as error:
            sources.open_source(section(source=f"npz:{npz}"), "train")
        expected = "may expand to; write it again" if save is np.savez_compressed else "1000000 entries for 5"
        assert expected in str(error.value)
    # The size that the directory of the archive declares is no more than what is inflated.
    write(npz, found | {"train_label.npy": b"0" * 10**6})
    changed = npz.read_bytes().replace((10**6).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    npz.write_bytes(changed)
    with archives.Archive(npz, "") as archive:
        inflated = []
        monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda self, data: inflated.append(len(data)))
        archive.read("train_label.npy")
    assert max(inflated) <= 100
