"""Telling damaged files from a disk that does not answer, by the errors of Orbax and TensorStore."""

import errno
import os
import pathlib
import re
from collections.abc import Iterator

import jax

# A file that is missing, or is something else than a file, has been damaged; the disk itself has answered.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# TensorStore begins its messages with these where a store cannot be reached, or this process may not or cannot read it.
OUTAGE = re.compile(
    "(UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED):"
)
CODE = re.compile(r"os_error_code='(\d+)'")  # of TensorStore


def is_outage(error: BaseException, path: pathlib.Path) -> bool:
    """Whether reading the files below `path` failed for another reason than what is in them.

    Raises OSError if one of the files cannot be read now, which names it.
    """
    for one in _chain(error):
        code = _code(one)
        if code is not None and code not in DAMAGE:
            return True
        if isinstance(one, MemoryError | jax.errors.JaxRuntimeError) or (code is None and OUTAGE.match(str(one))):
            return True
    _read_all(path)  # readers may take a file for missing that they are not allowed to see
    return False


def reason(error: BaseException) -> str:
    """Why it came to an error, in few words."""
    for one in _chain(error):
        if (code := _code(one)) is not None:
            return os.strerror(code)
    last = error
    while cause := last.__cause__ or (None if last.__suppress_context__ else last.__context__):  # as a traceback shows
        last = cause
    text = str(last).strip().split("\n")[0][:200]
    if isinstance(last, LookupError) or not text:  # whose text is only what was looked for
        return f"{type(last).__name__}: {text}".removesuffix(": ")
    return text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(error):
    """The number of the operating system's error, if it is one."""
    if isinstance(error, OSError):
        return error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else None)
    found = CODE.search(str(error))
    return int(found[1]) if found else None


def _read_all(path):
    def fail(error):
        raise error

    for folder, _, files in os.walk(path, onerror=fail):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                while file.read(2**24):
                    pass
