"""Files of weights: .pth, .npz and .safetensors."""

import json
import pathlib
import pickle
import pickletools
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from equivit.pretrained import reading
from tests.fuzz.attack import Files, Reader
from tests.fuzz.mutations import INTEGERS, TEXTS, damaged, document, rearrange
from tests.fuzz.zips import archive, npz, npz_saved, zipped

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.bias": np.arange(3, dtype=np.int64),
    "b": np.zeros((2, 2), np.float16),
}


def read(folder: pathlib.Path) -> Any:
    """The tensors of the only file."""
    (path,) = folder.iterdir()
    return reading.read(path)


# .pth: a pickle is assembled from pieces, as the official pickler would not write what an attack needs.


def plain(value: Any) -> bytes:
    """The opcodes of a value of Python's own types."""
    return pickle.dumps(value, 2)[2:-1]


def named(module: str, name: str) -> bytes:
    """The opcodes of a global."""
    return f"c{module}\n{name}\n".encode("utf-8", "replace")


def tensor(
    kind="FloatStorage", key="0", length=6, offset=0, size=(2, 3), stride=(3, 1), tag="storage", extra=b""
) -> bytes:
    """The opcodes of a tensor."""
    pid = b"(" + plain(tag) + named("torch", kind) + plain(key) + plain("cpu") + plain(length) + extra + b"tQ"
    rest = plain(offset) + plain(size) + plain(stride) + plain(False) + named("collections", "OrderedDict") + b")R"
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + pid + rest + b"tR"


STORAGES = [(b"\0\0\x80?" * 6), bytes(24), bytes(8)]
ENTRIES = [
    (plain("a.weight"), tensor()),
    (plain("a.bias"), tensor("LongStorage", "1", 3, 0, (3,), (1,))),
    (plain("b"), tensor("BFloat16Storage", "2", 4, 0, (2, 2), (2, 1))),
]
# fmt: off
HOSTILE = [
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("numpy", "dtype"), ("subprocess", "Popen"),
    ("", ""), ("torch", "Size"), ("torch", "FloatStorage"), ("torch", "BFloat16Storage"), ("argparse", "Namespace"),
    ("torch", "\n"), ("collections", "OrderedDict"), ("torch._utils", "_rebuild_parameter"), ("__torch__.a", "B"),
    ("__torch__", "B"), ("torch._utils", "_rebuild_tensor_v2"), ("copyreg", "_reconstructor"),
    ("ml_dtypes", "bfloat16"),
]
STATES = (
    (3, ">", None, None, None, -1, -1, 0), (3, "<", None, ("a",), {"a": 1}, 9, 1, 0), {"__setstate__": 1},
    {"itemsize": 9}, ({}, {"a": 1}), None, 1,
)
# fmt: on
# Opcodes that fit anywhere: single ones, sizes and places that lie, nesting without end, calls, states.
SINGLE = [bytes([code]) for code in b"()]}N012Rbosuaet\x85\x86\x87Q.\x81\x92\x93\x94\x8f\x90\x91\x97\x98"]
# fmt: off
LYING = [
    b"h\0", b"h\xff", b"g5\n", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f", b"r\xff\xff\0\0", b"p99999999999\n",
    b"P1\n", b"I99\n", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff", b"X\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x96" + b"\0" * 5 + b"\1\0\0", b"\x95" + b"\xff" * 8, b"\x82\1",
    b"\x84\1\0\0\0", b"F1e400\n", b"L" + b"9" * 5000 + b"L\n", b"S'a'\n", b"V\\ud800\n", b"idos\nsystem\n",
]
# fmt: on
TWICE = b")" + b"2\x86" * 60  # a tuple of 2^60 entries
# fmt: off
NESTED = [
    TWICE, b"}" + TWICE + b"Ns0", b"\x8f(" + TWICE + b"\x900", b"(" * 5000, b"]" * 5000, b"]2a", b"]" + b"2a" * 3,
    b"}" + b"2s" * 3, b"(" + b"]" * 2000 + b"a" * 1999, b"N" + b"\x85" * 100_000, plain((1,) * 70),
    plain([[1]] * 1000),
]
# fmt: on
VALUES = [plain(value) for value in (*INTEGERS, *TEXTS, None, (), {}, 1.5, b"abc")] + [named(*name) for name in HOSTILE]
KNOWN = st.sampled_from([named(*name) for name in HOSTILE])
CALLS = st.builds(
    lambda name, how: name + how + b"0",
    KNOWN,
    st.sampled_from((b")R", b")\x81", b"(NNNtR", b"(" + plain((2, 2)) + b"tR", b")}\x92")),
)
BUILT = st.builds(lambda name, state: name + plain(state) + b"b0", KNOWN, st.sampled_from(STATES))
PIECES = st.one_of(*map(st.sampled_from, (SINGLE, LYING, NESTED, VALUES)), CALLS, BUILT)


KEYS = [plain(text) for text in (*TEXTS, "a.weight")]
ORDERED, MODULE = named("collections", "OrderedDict") + b")R", named("__torch__", "M") + b")\x81"


@st.composite
def content(draw) -> bytes:
    """A pickle of a state dict, its tensors or its opcodes changed."""
    entries = list(ENTRIES)
    for _ in range(draw(st.integers(0, 2))):
        entries[draw(st.integers(0, 2))] = (draw(st.sampled_from(KEYS)), draw(tensors()))
    start = draw(st.sampled_from((b"\x80\2", b"\x80\4", b"\x80\5", b"", b"\x80\xff")))
    holder = draw(st.sampled_from((b"}", b"}", b"}", ORDERED, MODULE)))
    body = holder + b"(" + b"".join(key + value for key, value in entries) + (b"b" if holder is MODULE else b"u")
    inside, built = b"}" + plain("model") + body + b"s", body + plain({"a": 1}) + b"b"
    return start + draw(opcodes(draw(st.sampled_from((body, body, body, inside, built))))) + b"."


NUMBER = st.sampled_from(INTEGERS)
FIELDS = {
    "kind": st.sampled_from(("DoubleStorage", "BFloat16Storage", "BoolStorage", "Size", "ComplexFloatStorage")),
    "key": st.sampled_from(("1", "2", "9", "../data.pkl", "", 0, None, ("0",), "0\0")),
    "length": NUMBER | st.sampled_from((6, 12, 6.0, None, "6", 10**30)),
    "offset": NUMBER | st.sampled_from((0.0, None, "1", [1], 10**30)),
    "size": st.tuples(NUMBER, NUMBER)
    | st.sampled_from(((), (6,), [2, 3], None, (2.0, 3), ((2,), 3), "23", (1,) * 70, (0, 2**40))),
    "stride": st.tuples(NUMBER, NUMBER) | st.sampled_from(((), (1,), (0, 0), [3, 1], None, (3.0, 1), "31", (0,) * 70)),
    "tag": st.sampled_from(("module", None, b"storage", ("storage",))),
    "extra": st.sampled_from((b"N", plain((1, 2)))),
}


@st.composite
def tensors(draw) -> bytes:
    """A tensor of which one or two things are not as they should be."""
    names = sorted(draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=2)))
    return tensor(**{name: draw(FIELDS[name]) for name in names})


@st.composite
def opcodes(draw, body: bytes) -> bytes:
    """The pickle with opcodes left out, doubled, moved or put in between."""
    parts = None
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2, 3)))):
        parts = parts or _cut(body)
        kind = draw(st.sampled_from(("put", "put", "put", "instead", "drop", "double", "move")))
        k = draw(st.integers(0, len(parts) - 1))
        if kind in ("put", "instead"):
            parts[k : k + (kind == "instead")] = [draw(PIECES)]
        else:
            rearrange(draw, parts, k, kind)
    return body if parts is None else b"".join(parts)


def _cut(body: bytes) -> list[bytes]:
    """The opcodes of a whole pickle, with their arguments."""
    try:
        places = [place for _, _, place in pickletools.genops(body + b".")]
    except ValueError:  # with a damaged text in it
        return [body]
    return [body[begin:end] for begin, end in zip(places, places[1:], strict=False)]


@st.composite
def pth(draw) -> Files:
    """A .pth file."""
    members = _members(draw(content()))
    whole = zipped(members)
    if draw(st.integers(0, 3)) == 3:
        whole = draw(st.one_of(archive(members), damaged(whole)))
    return {draw(st.sampled_from(("w.pth", "w.pt", "w.pyth"))): whole}


def _members(pickled: bytes) -> list[tuple[str, bytes]]:
    members = [("w/data.pkl", pickled), ("w/byteorder", b"little"), ("w/version", b"3\n")]
    return members + [(f"w/data/{k}", data) for k, data in enumerate(STORAGES)]


VALID_PICKLE = b"\x80\2}(" + b"".join(key + value for key, value in ENTRIES) + b"u."

# .safetensors: the length of a header, the header in JSON, and the data.

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "a.bias": {"dtype": "I64", "shape": [3], "data_offsets": [24, 48]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [48, 56]},
}
TYPES = ("F64", "F16", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "U8", "BOOL", "C64", "U16", "f32", "V8", "O")


def with_header(header: bytes, data: bytes = bytes(56), length: int | None = None) -> bytes:
    """A .safetensors file."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@st.composite
def safetensors(draw) -> Files:
    """A .safetensors file."""
    header = draw(
        document(HEADER, more=(*TYPES, [0, 24], [24, 0], [0, 2**64], [2**63, 2**63], [], [0], [2**32, 2**32, 0]))
    )
    data = draw(st.sampled_from((bytes(56),) * 6 + (b"", bytes(55), bytes(57), bytes(48), b"\xff" * 56)))
    length = draw(st.sampled_from((None,) * 9 + tuple(n % 2**64 for n in INTEGERS)))
    whole = with_header(header, data, length)
    return {"w.safetensors": draw(damaged(whole)) if draw(st.integers(0, 7)) == 7 else whole}


READERS = (
    Reader("weights: .pth", {"w.pth": zipped(_members(VALID_PICKLE))}, pth(), read),
    Reader("weights: .npz", {"w.npz": npz_saved(ARRAYS)}, st.builds(lambda c: {"w.npz": c}, npz(ARRAYS)), read),
    Reader("weights: .safetensors", {"w.safetensors": with_header(json.dumps(HEADER).encode())}, safetensors(), read),
)
