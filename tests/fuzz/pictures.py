"""Image files and label maps: headers, sizes, chunks, and other formats under these names."""

import contextlib
import io
import pathlib
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from equivit.data import directories, reading
from equivit.data.npz import Npz
from equivit.data.pairs import Pairs
from tests.fuzz.attack import Files, Reader
from tests.fuzz.mutations import INTEGERS, damaged, one_of_files, rearrange
from tests.fuzz.zips import npz, npz_saved

MAX_PIXELS = 1_000_000
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
RGB, GREY = Image.fromarray(PIXELS), Image.fromarray(PIXELS[..., 0])
SIXTEEN = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
PALETTE = RGB.quantize(7)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


# fmt: off
PNG = [
    saved(RGB, "PNG"), saved(GREY, "PNG"), saved(SIXTEEN, "PNG"), saved(PALETTE, "PNG", transparency=1),
    saved(RGB.convert("RGBA"), "PNG"),
]
JPEG = [
    saved(RGB, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\3\0\0\0\0\0\0"),
    saved(RGB, "JPEG", progressive=True), saved(GREY, "JPEG"), saved(RGB.convert("CMYK"), "JPEG"),
]
TIFF = [
    saved(RGB, "TIFF"), saved(GREY, "TIFF", compression="tiff_lzw"), saved(RGB, "TIFF", compression="jpeg"),
    saved(SIXTEEN, "TIFF"), saved(GREY.convert("1"), "TIFF", compression="group4"),
    saved(RGB, "TIFF", compression="tiff_adobe_deflate"),
]
OTHERS = [
    saved(RGB, "BMP"), saved(PALETTE, "BMP"), saved(RGB, "WEBP"), saved(RGB, "WEBP", lossless=True), saved(RGB, "PPM"),
    saved(GREY, "PPM"), b"P3 2 2 255 1 2 3 4 5 6 7 8 9 10 11 12\n", b"P1 2 2 1 0 0 1\n",
    b"P7 332\n#END\n2 2 255\nabcd", b"Pf\n2 2\n-1.0\n" + bytes(16), b"P2 4000000000 4000000000 255 1",
    b"P5 1000001 1 255 " + bytes(9), b"P6 900 900 255\n", b"P5 2 2 65535 " + bytes(8),
]
# fmt: on


# fmt: off
WRITTEN = (
    "GIF", "ICO", "PCX", "TGA", "SGI", "DDS", "ICNS", "IM", "JPEG2000", "AVIF", "EPS", "MPO", "PDF", "SPIDER", "BLP",
)
# fmt: on
COLOURS = {"SPIDER": "F", "BLP": "P"}
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9000 9000\n%%EndComments\n(x) (w) file\nshowpage\n"


def _disguises() -> list[bytes]:
    """Files of other formats, also of those for which Pillow starts programs."""
    found = [POSTSCRIPT, b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 30, 90) + bytes(18) + POSTSCRIPT, b"%PDF-1.4\n"]
    found += [b"\xd7\xcd\xc6\x9a" + bytes(6) + b"\x09\0\x09\0\x48\0" + bytes(30), b"<svg/>"]  # the first is WMF
    found += [b"\1\0\0\0" + bytes(36) + b" EMF" + bytes(60)]
    for form in WRITTEN:
        image = PALETTE if COLOURS.get(form) == "P" else RGB.convert(COLOURS.get(form, "RGB"))
        with warnings.catch_warnings(), contextlib.suppress(OSError, ValueError, KeyError):  # which Pillow may lack
            warnings.simplefilter("ignore")
            found.append(saved(image, form))
    return found


DISGUISES = _disguises()
BOMB = zlib.compress(bytes(2**26), 9)
# fmt: off
CHUNKS = [
    b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"gAMA", b"acTL",
    b"fcTL", b"fdAT", b"pHYs", b"xxxx",
]
BODIES = [
    b"", b"\0" * 13, b"a\0\0" + BOMB, b"a\0\1\0\0\0" + BOMB, b"x" * 5000, b"a\0", b"\0\0\0\2\0\0\0\1",
    struct.pack(">II", 2**31 - 1, 2**31 - 1) + b"\x08\2\0\0\0",
]
# fmt: on


@st.composite
def png(draw, files: Sequence[bytes] = PNG) -> bytes:
    """A PNG file with chunks changed, moved, doubled or left out, their sums right."""
    chunks = _chunks(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 3))):
        k, kind = (
            draw(st.integers(0, len(chunks) - 1)),
            draw(st.sampled_from(("size", "depth", "new", "body", "drop", "double", "move"))),
        )
        name, body = chunks[k]
        if kind == "size" and len(chunks[0][1]) == 13:
            sides = [draw(st.sampled_from((1, 5, 6, *INTEGERS))) % 2**32 for _ in range(2)]
            chunks[0] = (chunks[0][0], struct.pack(">II", *sides) + chunks[0][1][8:])
        elif kind == "depth" and len(chunks[0][1]) == 13:
            chunks[0] = (
                chunks[0][0],
                chunks[0][1][:8] + bytes(draw(st.sampled_from((0, 1, 2, 3, 4, 6, 8, 16, 255))) for _ in range(5)),
            )
        elif kind == "new":
            chunks.insert(k, (draw(st.sampled_from(CHUNKS)), draw(st.sampled_from(BODIES))))
        elif kind == "body":
            chunks[k] = (name, draw(st.one_of(st.sampled_from(BODIES), damaged(body))))
        else:
            rearrange(draw, chunks, k, kind)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def _chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at < len(content):
        (size,) = struct.unpack_from(">I", content, at)
        found.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + size]))
        at += size + 12
    return found


@st.composite
def tiff(draw) -> bytes:
    """A TIFF file with entries of its directory changed."""
    content = bytearray(draw(st.sampled_from(TIFF)))
    (at,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, at)
    for _ in range(draw(st.integers(1, 3))):
        entry = at + 2 + 12 * draw(st.integers(0, count - 1))
        place, form, size = draw(
            st.sampled_from(((0, "<H", 2**16), (2, "<H", 2**16), (4, "<I", 2**32), (8, "<I", 2**32), (8, "<H", 2**16)))
        )
        number = draw(
            st.sampled_from(
                (*INTEGERS, 3, 4, 5, 8, 34712, 256, 257, 258, 259, 273, 277, 279, 322, 324, 339, 50000, at, 100)
            )
        )
        struct.pack_into(form, content, entry + place, number % size)
    if draw(st.integers(0, 5)) == 5:
        struct.pack_into(
            "<I", content, at + 2 + 12 * count, draw(st.sampled_from((at, 8, 1, 2**32 - 1)))
        )  # another page, or this
    return bytes(content)


@st.composite
def jpeg(draw) -> bytes:
    """A JPEG file with segments changed, doubled or left out."""
    content = draw(st.sampled_from(JPEG))
    parts = content.split(b"\xff")
    for _ in range(draw(st.integers(1, 3))):
        k, kind = (
            draw(st.integers(1, len(parts) - 1)),
            draw(st.sampled_from(("damage", "marker", "size", "drop", "double", "move"))),
        )
        frames = [j for j, part in enumerate(parts) if part[:1] in (b"\xc0", b"\xc2") and len(part) > 9]
        if kind == "damage":
            parts[k] = draw(damaged(parts[k], 1))
        elif kind == "marker":
            parts[k] = bytes([draw(st.integers(0xC0, 0xFF))]) + parts[k][1:]
        elif kind == "size" and frames:
            j, sides = frames[0], [draw(st.sampled_from(INTEGERS)) % 2**16 for _ in range(2)]
            parts[j] = parts[j][:4] + struct.pack(">HH", *sides) + parts[j][8:]
        elif kind == "drop" and len(parts) > 2:
            del parts[k]
        elif kind == "double":
            parts.insert(k, parts[k])
        else:
            parts.insert(draw(st.integers(1, len(parts) - 1)), parts.pop(k))
    return b"\xff".join(parts)


@st.composite
def headed(draw) -> bytes:
    """A file of another format with its first bytes damaged, or of one that is not read."""
    content = draw(st.sampled_from(OTHERS + DISGUISES))
    return draw(damaged(content[:64])) + content[64:] if draw(st.booleans()) else content


def picture() -> st.SearchStrategy[bytes]:
    """The bytes of an image file."""
    whole = st.sampled_from(PNG + JPEG + TIFF + OTHERS + DISGUISES)
    return st.one_of(png(), tiff(), jpeg(), headed(), whole, whole.flatmap(damaged))


@st.composite
def image(draw) -> Files:
    """One image, under a name of any format."""
    return {f"x{draw(st.sampled_from(directories.EXTENSIONS))}": draw(picture())}


def read_image(folder: pathlib.Path) -> Any:
    """The image in a folder, grey and in colour."""
    source = directories.Folder(str(folder), "train", class_split="train")
    return [reading.read(source, 0, channels, MAX_PIXELS) for channels in (1, 3)]


MAPS = [
    saved(Image.fromarray(PIXELS[..., 0] % 3), "PNG"),
    saved(Image.fromarray(PIXELS[..., 0] % 3).convert("P"), "PNG"),
]
PAIR = {"images/train/x.png": PNG[0], "labels/train/x.png": MAPS[0], "classes.txt": b"one\ntwo\nthree\n"}
MAP = st.one_of(png(MAPS), st.sampled_from(MAPS), st.sampled_from(MAPS).flatmap(damaged), picture())


def read_pair(folder: pathlib.Path) -> Any:
    """The image and the label map of the only pair."""
    source = Pairs(str(folder), "train", void=(255,))
    return [reading.read(source, 0, channels, MAX_PIXELS) for channels in (1, 3)]


BLOB = np.frombuffer(JPEG[0] + PNG[0], np.uint8)
ARRAYS = {
    "train_image": PIXELS[None],
    "train_label": np.array([1]),
    "train_map": PIXELS[None, ..., 0] % 3,
    "files_jpeg": BLOB,
    "files_offset": np.array([0, len(JPEG[0]), len(BLOB)]),
    "files_label": np.array([0, 2]),
    "classes": np.array(["one", "two", "three"]),
}


def read_npz(folder: pathlib.Path) -> Any:
    """Both splits of a file of images."""
    found = [Npz(str(folder / "x.npz"), split, void=(255,)) for split in ("train", "files")]
    return [reading.read(source, k, 3, MAX_PIXELS) for source in found for k in range(min(len(source), 9))]


READERS = (
    Reader("images", {"x.png": PNG[0]}, image(), read_image),
    Reader("label maps", PAIR, one_of_files(PAIR, {"labels/train/x.png": MAP}), read_pair),
    Reader(
        "images: .npz",
        {"x.npz": npz_saved(ARRAYS)},
        st.builds(lambda content: {"x.npz": content}, npz(ARRAYS)),
        read_npz,
    ),
)
