"""Decoding: every kind of image file keeps its content, and unreadable files give one line."""

import io
import os
import subprocess

import numpy as np
import pytest
from PIL import Image

from equivit.data import directories, loader, reading, sources


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_images_are_read_as_grey_or_colour():
    colour = np.array([[[200, 0, 0]]], np.uint8)
    assert np.asarray(reading.decode(colour, 1)).tolist() == [[60]]  # luma
    assert np.asarray(reading.decode(colour[..., :1], 3)).tolist() == [[[200] * 3]]
    assert reading.decode(encoded(Image.new("RGB", (4, 4), (100,) * 3), "JPEG"), 1).getpixel((3, 3)) == 100


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


RAMP = np.linspace(0, 65535, 1760).astype(np.uint16).reshape(40, 44)  # every value of 8 bits, and what is between them
ROUNDED = np.round(RAMP / 257)


def test_16_bits_become_8_by_one_rule_however_they_are_read(section, tmp_path):
    """65535 / 257 = 255: black, white and all between stay what they are."""
    files = {"png": encoded(Image.fromarray(RAMP)), "tiff": encoded(Image.fromarray(RAMP), "TIFF")}
    files["pgm"] = encoded(Image.fromarray(RAMP.astype(np.int32)), "PPM")  # which Pillow opens as mode I
    files["motorola.tiff"] = encoded(Image.fromarray(RAMP.astype(">u2")), "TIFF")
    (tmp_path / "train" / "class").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / "train" / "class" / f"x.{name}").write_bytes(content)
    shared = {"classes": ["x"], "train_label": np.zeros(4, int)}
    blob = {"train_jpeg": np.frombuffer(b"".join(files.values()), np.uint8)}
    np.savez(tmp_path / "blob.npz", train_offset=np.cumsum([0, *map(len, files.values())]), **shared, **blob)
    np.savez(tmp_path / "array.npz", train_image=np.stack([RAMP[..., None]] * 4), **shared)
    for source in (f"folder:{tmp_path}", f"npz:{tmp_path / 'blob.npz'}", f"npz:{tmp_path / 'array.npz'}"):
        opened = sources.open_source(section(source=source), "train")
        for index in range(4):
            example, unreadable = reading.read(opened, index, 1)
            assert not unreadable and np.array_equal(np.asarray(example["image"]), ROUNDED), (source, index)
    assert np.array_equal(np.asarray(reading.decode(files["png"], 3))[..., 2], ROUNDED)
    assert np.array_equal(np.asarray(reading.decode(np.stack([RAMP] * 3, -1), 3))[..., 1], ROUNDED)


def test_unusual_tiff_files():
    white_is_zero = encoded(Image.fromarray(RAMP), "TIFF", tiffinfo={262: 0})
    assert np.array_equal(np.asarray(reading.decode(white_is_zero, 1)), 255 - ROUNDED)
    file = bytearray(encoded(Image.fromarray(RAMP), "TIFF"))
    place = file.index((258).to_bytes(2, "little"))  # bits of a value: tag, type, count, and 16
    file[place + 8] = 12
    with pytest.raises(ValueError, match="values of 12 bits; images have 8 or 16"):
        reading.decode(bytes(file), 1)


@pytest.mark.parametrize("values", [np.arange(12, dtype=np.int32), np.linspace(0, 1, 12, dtype=np.float32)])
def test_32_bits_are_refused_by_name(section, tmp_path, values):
    (tmp_path / "a").mkdir()
    Image.fromarray(values.reshape(3, 4)).save(tmp_path / "a" / "x.tiff")
    source = sources.open_source(section(source=f"folder:{tmp_path}"), "train")
    with pytest.raises(OSError, match=r"a/x.tiff: it has 32-bit .* mode [IF]\), .* have 8 or 16 bits: scale it"):
        reading.read(source, 0, 1)


@pytest.mark.parametrize(
    "image", [np.full((4, 4, 1), 0.9, np.float32), np.full((4, 4, 3), 300), np.zeros((4, 4), np.uint8)]
)
def test_arrays_of_another_range_or_shape_are_refused(image):
    with pytest.raises(ValueError, match=r"must be an array \[H, W, C\] of uint8 or uint16, not .* scale it"):
        reading.decode(image, 3)


@pytest.mark.parametrize("size", [(3000, 1), (2, 201)])
def test_a_strip_is_refused_before_it_takes_memory(size):
    with pytest.raises(ValueError, match="at most 100 times as long as wide"):
        reading.decode(encoded(Image.new("L", size)), 3)
    assert reading.decode(encoded(Image.new("L", (200, 2))), 3).size == (200, 2)


def test_modes_of_8_bits_stay_as_pillow_converts_them():
    colours = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
    for mode, kind in (("1", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("RGBA", "PNG"), ("CMYK", "TIFF")):
        image = Image.fromarray(colours).convert(mode)
        for channels, name in reading.MODES.items():
            assert np.array_equal(reading.decode(encoded(image, kind), channels), image.convert(name)), mode


def test_only_formats_of_the_endings_are_opened(monkeypatch):
    """Pillow has more, and starts Ghostscript for PostScript, whatever the ending of its file."""
    image = Image.new("RGB", (4, 4))
    kinds = {ending: encoded(image, kind) for ending, kind in directories.FORMATS.items()}
    assert all(reading.decode(content, 3).size == (4, 4) for content in kinds.values())
    monkeypatch.setattr(subprocess, "Popen", None)
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n%%EOF\n"
    for content in (script, encoded(image, "EPS"), encoded(image, "GIF"), encoded(image, "PCX"), encoded(image, "TGA")):
        for read in (reading.decode_map, lambda content: reading.decode(content, 3)):
            with pytest.raises(
                ValueError, match="it is not an image file: .*; formats are BMP, JPEG, PNG, PPM, TIFF, WEBP"
            ):
                read(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not an image file: 0 bytes that begin with b''"),
        (b"<html>not found</html>", "it is not an image file: 22 bytes that begin with b'<html>no'"),
        (
            encoded(Image.new("L", (40, 26))),
            "26 x 40 = 1,040 pixels, more than config.data.max_pixels=1000; make",
        ),
    ],
    ids=["empty", "text", "large"],
)
def test_what_is_wrong_with_a_file_is_told(section, tmp_path, content, reason):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(content)
    config = section(source=f"folder:{tmp_path}", max_pixels=1000, channels=1)
    with pytest.raises(OSError) as error:
        loader.train(config, batch_size=1, seed=0, entries=("image",))
    assert f"starting with {tmp_path / 'a' / 'x.png'}: " in str(error.value) and reason in str(error.value)
    with pytest.raises(OSError):
        next(loader.train(config, batch_size=1, seed=0).batches())
    config = section(source=f"folder:{tmp_path}", max_pixels=1000, channels=1, eval_split="train")
    with pytest.raises(OSError):
        next(loader.evaluate(config, batch_size=1).batches())


def test_too_little_memory_is_no_damage_of_an_image(section, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for name in "xy":
        (tmp_path / "a" / f"{name}.png").write_bytes(encoded(Image.new("L", (4, 4))))

    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(reading, "_eight_bits", exhausted)
    config = section(source=f"folder:{tmp_path}", channels=1)
    with pytest.raises(MemoryError, match="not enough memory to decode .*x.png; fewer data.workers or"):
        reading.read(sources.open_source(config, "train"), 0, 1)


def test_a_pipe_is_not_waited_for(section, tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "x.png")
    with pytest.raises(OSError, match="x.png: it is not a regular file"):
        reading.read(sources.open_source(section(source=f"folder:{tmp_path}"), "train"), 0, 1)
