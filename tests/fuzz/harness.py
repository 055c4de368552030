"""Tests of the attack itself, `python -m tests.fuzz.harness`: it notices each kind of fault, and no other.

They run outside of pytest, whose process may have threads, and then cannot be forked.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.fuzz import attack
from tests.fuzz.attack import Reader
from tests.fuzz.hunt import Hunt

VALID = {"a.txt": b"1"}


def by_kind(folder: pathlib.Path) -> int:
    """Does what the file says."""
    path = folder / "a.txt"
    word = path.read_text()
    if word in FAULTS:
        FAULTS[word][0](path)
    elif word == "refused":
        raise ValueError(f"{path}: {word}.")
    return 1


def fail(error: Exception) -> None:
    raise error


def loop(path):
    while True:
        pass


def flood(path):
    for k in range(100):
        warnings.warn(f"{path}, entry {k}", stacklevel=1)


def change_type(path):
    np.dtype(ml_dtypes.bfloat16).__setstate__((3, ">", None, None, None, -1, -1, 0))


def caught(path):
    try:
        return np.ones(2**29)
    except MemoryError as error:
        raise ValueError(f"{path}: too large.") from error


# What a reader may do wrong, and what is said of it.
FAULTS = {
    "two lines": (lambda path: fail(ValueError(f"{path}: one\ntwo")), "not one line"),
    "unnamed": (lambda path: fail(ValueError("damaged")), "does not name the file"),
    "other": (lambda path: fail(KeyError(f"{path}")), "a wrong kind of error, KeyError"),
    "large": (lambda path: np.ones(2**29), "asks for more than 500 MB"),
    "hidden": (caught, "asks for more than 500 MB"),
    "long": (loop, "more than 0.5 s of processor time"),
    "dead": (lambda path: os.abort(), "ended by SIGABRT"),
    "flood": (flood, "100 warnings"),
    "chatter": (lambda path: os.write(2, b"warning\n" * 1000), "bytes of output"),
    "program": (lambda path: subprocess.run(["true"]), "did subprocess.Popen"),
    "written": (lambda path: path.with_name("b").write_text(""), "did open"),
    "environment": (lambda path: os.environ.update(A="b"), "changed: environment"),
    "open": (lambda path: KEPT.append(path.open()), "changed: open files"),
    "random": (lambda path: np.random.seed(3), "changed: NumPy's random state"),
    "types": (change_type, "changed: types of numbers"),
    "packages": (lambda path: sys.modules.update(antigravity2=sys), "changed: packages"),
}
KEPT: list = []


def reader(words: st.SearchStrategy[str]) -> Reader:
    return Reader("test", VALID, st.builds(lambda word: {"a.txt": word.encode()}, words), by_kind)


def each_fault_is_noticed(room):
    for word, (_, said) in FAULTS.items():
        found = Hunt(reader(st.just(word)), room).run(1, seed=0)
        assert found.fault is not None and said in found.fault.text, (word, found.fault)


def values_and_good_errors_are_no_faults(room):
    found = Hunt(reader(st.sampled_from(("1", "2", "3", "refused"))), room).run(20, seed=0)
    assert found.fault is None and set(found.counts) == {"value", "refused"}


def a_fault_is_reduced_and_then_known(room):
    words = st.sampled_from(("1", "refused", "other"))
    files = st.lists(words, min_size=1, max_size=9).map(
        lambda drawn: {"a.txt": ("other" if "other" in drawn else "1").encode(), "b": str(drawn).encode()}
    )
    attacked = Reader("test", VALID, files, by_kind)
    found = Hunt(attacked, room).run(50, seed=0)
    assert found.files == {"a.txt": b"other", "b": b"['other']"}
    again = Hunt(attacked, room, frozenset([found.fault.place])).run(50, seed=0)
    assert again.fault is None and again.counts["fault"]


def a_valid_file_must_be_read(room):
    attacked = Reader("test", {"a.txt": b"refused"}, st.just(VALID), by_kind)
    assert "valid files: " in Hunt(attacked, room).run(5, seed=0).fault.text


if __name__ == "__main__":
    attack.SECONDS = 0.5
    for check in (
        each_fault_is_noticed,
        values_and_good_errors_are_no_faults,
        a_fault_is_reduced_and_then_known,
        a_valid_file_must_be_read,
    ):
        with tempfile.TemporaryDirectory() as place:
            check(pathlib.Path(place))
