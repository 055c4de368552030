"""Atomic file writes: readers always find the complete old file or the complete new one."""

import contextlib
import glob
import itertools
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Any

from equivit import errors


def make_directory(path: pathlib.Path) -> None:
    """Make a directory if it is missing; OSError, with its name, on failure."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path}: this path or a parent is a file; give a directory.") from error


def read_json(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """Read the JSON object in a file; ValueError, with the file's name, unless it is valid and has the keys."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        missing = [key for key in keys if key not in found]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({errors.reason(error)}); remove it to create it again.") from error
    if missing:
        raise ValueError(f"{path} is damaged, it has no {', '.join(missing)}; remove it to create it again.")
    return found


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file atomically (`replacing`)."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, content: bytes | bytearray) -> None:
    """Write a file atomically (`replacing`)."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def numbered(path: pathlib.Path) -> pathlib.Path:
    """For a file name.json, the first of name.1.json, name.2.json, ... that does not exist."""
    places = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
    return next(place for place in places if not place.exists())


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield the path of a new file, which replaces `path` if the context ends without an error.

    The new file is in the same directory, which is created if missing, has the same ending, and gets the permissions of
    the umask, whichever library writes it.  Special files, such as /dev/null, are written in place.

    Raises OSError if the file cannot be written; the error names `path`.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    target = pathlib.Path(os.path.realpath(path))  # keeps links
    make_directory(target.parent)
    unfinished = _aside(target)
    try:
        with unfinished.open("wb") as file:
            permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield unfinished
        unfinished.chmod(permissions)  # safetensors creates a file that only its owner may read
        _sync(unfinished)
        unfinished.replace(target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, unfinished, str(unfinished)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_in_directory(path: str | os.PathLike, names: Sequence[str]) -> Iterator[pathlib.Path]:
    """Yield a new directory, whose files move to the directory `path` if the context ends without an error.

    If `path` does not exist, the new directory is renamed, so either all or none of its files appear.  An existing
    directory keeps its other files; new files replace files of the same name, one by one in the order of `names`.

    Raises OSError if the directory cannot be created, or a file cannot be written.
    """
    path = pathlib.Path(path).absolute()  # "." has no name
    existing = path.exists()
    make_directory(path if existing else path.parent)
    unfinished = _aside(path / path.name if existing else path)
    unfinished.mkdir(exist_ok=True)
    try:
        yield unfinished
        if not existing:
            unfinished.rename(path)
            return
        for name in names:
            (unfinished / name).replace(path / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _aside(target: pathlib.Path) -> pathlib.Path:
    """The temporary path for writing `target`; also removes temporary files of killed processes."""
    for left in target.parent.glob(f".{glob.escape(target.stem)}-*-unfinished{glob.escape(target.suffix)}"):
        number = left.name.removeprefix(f".{target.stem}-").partition("-")[0]
        if number.isdecimal() and not _is_running(int(number)):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return target.with_name(f".{target.stem}-{os.getpid()}-unfinished{target.suffix}")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _sync(path: pathlib.Path) -> None:
    """Flush a file to disk, so that a power cut after the rename does not leave it empty."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
