"""Damages that keep structure: of zip archives, and of arrays in .npz files."""

import io
import math
import struct
import zipfile
import zlib

import numpy as np
from hypothesis import strategies as st

from tests.fuzz.mutations import INTEGERS, TEXTS, damaged

NAMES = tuple(text.encode("utf-8", "replace") for text in TEXTS)
# fmt: off
DESCRIPTIONS = (
    "'<f4'", "'|u1'", "'<i8'", "'>i2'", "'|O'", "'<U3'", "'<U536870912'", "'|V0'", "'|V8'", "'|S0'", "'<M8[ns]'",
    "'|b1'", "'<c8'", "'<f2'", "'<f16'", "[('a', '<f4')]", "[('a', '|O')]", "[]", "('<f4', (2, 2))", "'<f4,<f4'", "1",
    "''",
)
SHAPES = (
    "()", "(0,)", "(-1,)", "(1,)", "(2, 3)", "(4294967296,)", "(9223372036854775807,)", "(0, 9223372036854775807)",
    "(65536, 65536, 65536, 65536)", "(True,)", "(2.0,)", "[2]", "2", "(1,)*40", "(" + "1," * 70 + ")", "((2,),)",
)
# fmt: on


def zipped(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive; names may be equal."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _bomb(size: int) -> dict:
    """A member of zeros, a thousand times smaller than what it becomes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return dict(method=8, size=size, crc=zlib.crc32(bytes(size)), data=packer.compress(bytes(size)) + packer.flush())


BOMB = _bomb(2**27)


@st.composite
def archive(draw, members: list[tuple[str, bytes]]) -> bytes:
    """A zip archive of these members, with names, flags, methods, sizes and offsets changed, or one member a bomb."""
    entries = [draw(_member(name, content)) for name, content in members]
    for _ in range(draw(st.integers(0, 2))):
        if not entries:
            break
        k = draw(st.integers(0, len(entries) - 1))
        kinds = ("name", "flags", "method", "size", "declared", "offset", "drop", "double", "bomb")
        entry, kind = dict(entries[k]), draw(st.sampled_from(kinds))
        if kind == "name":
            entry["name"] = draw(st.sampled_from((*(other["name"] for other in entries), *NAMES)))
        elif kind in ("flags", "method"):
            entry[kind] = draw(st.sampled_from((0, 1, 8, 9, 12, 14, 64, 93, 99, 2048, 65535)))
        elif kind in ("size", "declared", "offset"):
            entry[kind] = draw(st.sampled_from(INTEGERS)) % 2**32
        elif kind == "bomb":
            entry |= BOMB
        entries[k : k + 1] = {"drop": [], "double": [entry, entry]}.get(kind, [entry])
    return draw(damaged(_assembled(entries), 2)) if draw(st.integers(0, 5)) == 5 else _assembled(entries)


@st.composite
def _member(draw, name: str, content: bytes) -> dict:
    """A member, now and then deflated; `declared` is its size in the directory, if that is another one."""
    entry = dict(name=name.encode(), crc=zlib.crc32(content), size=len(content), flags=0, offset=0, declared=None)
    if draw(st.integers(0, 5)) == 5:
        return entry | dict(method=8, data=zlib.compress(content, wbits=-15))
    return entry | dict(method=0, data=content)


def _assembled(entries: list[dict]) -> bytes:
    body, directory = b"", b""
    for entry in entries:
        name, data, start = entry["name"], entry["data"], (len(body) + entry["offset"]) % 2**32
        common = (entry["flags"], entry["method"], 0, 33, entry["crc"], len(data))
        declared = entry["size"] if entry["declared"] is None else entry["declared"]
        body += b"PK\3\4" + struct.pack("<HHHHHIIIHH", 20, *common, entry["size"], len(name), 0) + name + data
        sizes = (declared, len(name), 0, 0, 0, 0, 0, start)
        directory += b"PK\1\2" + struct.pack("<HHHHHHIIIHHHHHII", 20, 20, *common, *sizes) + name
    count = len(entries)
    return body + directory + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)


@st.composite
def npy(draw, array: np.ndarray) -> bytes:
    """The .npy file of an array, with its header's entries or its data changed; often it is as it was."""
    descr, order, shape = repr(np.lib.format.dtype_to_descr(array.dtype)), "False", str(array.shape)
    data, version = array.tobytes(), 1
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2)))):
        kind = draw(st.sampled_from(("descr", "order", "shape", "data", "version", "entries", "values")))
        if kind == "descr":
            descr = draw(st.sampled_from(DESCRIPTIONS))
        elif kind == "order":
            order = draw(st.sampled_from(("True", "0", "None", "[]")))
        elif kind == "shape":
            shape = draw(
                st.sampled_from((*SHAPES, *(str(array.shape[k:]) for k in range(1, 3)), str((1, *array.shape))))
            )
        elif kind == "data":
            data = draw(
                st.sampled_from((data[:-1], data + b"\0", b"", data * 2, bytes(len(data)), b"\xff" * len(data)))
            )
        elif kind == "version":
            version = draw(st.sampled_from((0, 2, 3, 4, 255)))
        elif kind == "values" and array.size and array.dtype.kind in "iuf":
            array = array.copy()
            array.flat[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from(_fitting(array.dtype)))
            data = array.tobytes()
        else:
            descr += draw(st.sampled_from((", 'a': 1", "} #", ", 'descr': '<f8'", "[" * 200, "(" * 3000)))
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    size = 2 if version == 1 else 4
    text += " " * (-(len(text) + 7 + size + 1) % 64) + "\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(size, "little") + text.encode() + data


def _fitting(dtype: np.dtype) -> list:
    """The outermost values of a type of numbers."""
    if dtype.kind == "f":
        return [math.nan, math.inf, -math.inf, np.finfo(dtype).max, 0.5]
    return [np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1]


@st.composite
def npz(draw, arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz file of these arrays, one or two of them damaged, or the archive, or both."""
    hit = draw(st.sets(st.sampled_from(sorted(arrays)), max_size=2))
    members = [(f"{key}.npy", draw(npy(array)) if key in hit else written(array)) for key, array in arrays.items()]
    return draw(archive(members)) if draw(st.integers(0, 2)) == 2 else zipped(members)


def npz_saved(arrays: dict[str, np.ndarray]) -> bytes:
    """The .npz file of these arrays."""
    return zipped([(f"{key}.npy", written(array)) for key, array in arrays.items()])


def written(array: np.ndarray) -> bytes:
    """The .npy file of an array."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()
