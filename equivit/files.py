"""Atomic file writes: at every moment a reader finds the old file or the new one, whole."""

import contextlib
import glob
import json
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Any

from equivit import errors


def make_directory(path: pathlib.Path) -> None:
    """Make a directory if it is not there; OSError, which names it, if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path}: it, or what is before it, is a file; give a directory.") from error


def read_json(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file; ValueError, which names the file, unless it is whole and has the keys."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        missing = [key for key in keys if key not in found]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged ({errors.reason(error)}); remove it, and it is made again.") from error
    if missing:
        raise ValueError(f"{path}: is damaged, it has no {', '.join(missing)}; remove it, and it is made again.")
    return found


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file atomically (`replacing`)."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, content: bytes | bytearray) -> None:
    """Write a file atomically (`replacing`)."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield the path of a new file, which takes the place of `path` when the context ends without an error.

    The new file lies in the same directory, which is made if need be, has the same ending, and gets the permissions of
    the umask, whichever library writes it.  What is no regular file, such as /dev/null, is written in place.

    Raises:
      OSError: the file cannot be written; the error names `path`.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    target = pathlib.Path(os.path.realpath(path))  # a link stays a link
    make_directory(target.parent)
    unfinished = _aside(target)
    try:
        with unfinished.open("wb") as file:
            permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield unfinished
        unfinished.chmod(permissions)  # safetensors makes another file, which its owner alone may read
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
    """Yield a new directory, whose files take their places in the directory `path` when the context ends without error.

    If there is no such directory, the new one is renamed, so that all of its files are there or none.  An existing
    directory keeps its other files; the new ones replace files of the same name, one by one in the order of `names`.

    Raises:
      OSError: the directory cannot be made, or a file cannot be written.
    """
    path = pathlib.Path(path)
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
    """Where this process writes what becomes `target`; removes what processes that were killed have left there."""
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
    except PermissionError:  # of another user
        return True
    return True


def _sync(path: pathlib.Path) -> None:
    """Have the disk write a file, or a power cut after its renaming may leave it empty."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
