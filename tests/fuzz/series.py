"""Time series: .ts, .tsv and .npz of the UCR and UEA archives."""

import pathlib
from typing import Any

import numpy as np
from hypothesis import strategies as st

from equivit.data import series
from tests.fuzz.attack import Reader
from tests.fuzz.mutations import lines, one_of_files
from tests.fuzz.zips import npz, npz_saved

# fmt: off
TS = [
    ["@problemName a"], ["@timestamps false"], ["@univariate false"], ["@classLabel true a b"], ["@data"],
    ["1,2,3", "4,5,6", "a"], ["1,?,3", "4,5", "b"], ["1,2", "NaN,5,6", "a"], ["0,0,0", "1,1,1", "b"],
]
# fmt: on
TSV = [["1", "0.5", "2", "3"], ["2", "1", "NaN", "3"], ["1", "0", "0", "NaN"], ["2", "4", "5", "6"]]
# fmt: off
CELLS = (
    "@data", "@timestamps true", "@classLabel false", "@targetLabel true", "1e39", "inf", "1_0", "(1,2)", "1," * 3000,
    "#", "a:b", "@", "?",
)
# fmt: on
WORDS = ["1,2,3:4,5,6:a", "1,?,3:4,5:b"]


def _text(rows: list[list[str]], separator: str) -> bytes:
    return "\n".join(map(separator.join, rows)).encode()


def _both(content: Any, suffix: str) -> dict[str, Any]:
    return {f"a_{split}{suffix}": content for split in ("TRAIN", "TEST")}


ARRAYS = {
    "train_x": np.arange(24, dtype=np.float32).reshape(4, 2, 3),
    "train_y": np.array([0, 1, 0, 1]),
    "train_len": np.array([3, 2, 1, 3]),
    "test_x": np.arange(24, dtype=np.float64).reshape(4, 2, 3),
    "test_y": np.array([0, 1, 1, 1]),
    "classes": np.array(["a", "b"]),
}


def read(folder: pathlib.Path) -> Any:
    return series.load("a", directory=str(folder), normalize="training")


def _reader(kind: str, rows: list[list[str]], separator: str) -> Reader:
    files = _both(_text(rows, separator), kind)
    return Reader(f"series: {kind}", files, one_of_files(files, _both(lines(rows, separator, CELLS), kind)), read)


READERS = (
    _reader(".ts", TS, ":"),
    _reader(".tsv", TSV, "\t"),
    Reader(
        "series: .npz", {"a.npz": npz_saved(ARRAYS)}, st.builds(lambda content: {"a.npz": content}, npz(ARRAYS)), read
    ),
)
