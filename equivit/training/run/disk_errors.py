"""Distinguish damaged files from a failing disk by the errors of Orbax and TensorStore."""

import errno
import os
import pathlib
import re
from collections.abc import Iterator

import jax

# The file is missing or is a directory: damage, while the disk works.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
# TensorStore's messages begin with these if a store is unreachable or unreadable for this process.
OUTAGE = re.compile(
    "(UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED|CANCELLED):"
)
CODE = re.compile(r"os_error_code='(\d+)'")  # of TensorStore


def is_outage(error: BaseException, path: pathlib.Path) -> bool:
    """Whether reading the files below `path` failed for a reason other than their content.

    Raises OSError, with the file's name, if one of them cannot be read now.
    """
    for one in _chain(error):
        code = _code(one)
        if code is not None and code not in DAMAGE:
            return True
        if isinstance(one, MemoryError | jax.errors.JaxRuntimeError) or (code is None and OUTAGE.match(str(one))):
            return True
    _read_all(path)  # without permission a file looks missing to TensorStore
    return False


def reason(error: BaseException) -> str:
    """The cause of an error, in few words."""
    for one in _chain(error):
        if (code := _code(one)) is not None:
            return os.strerror(code)
    last = error
    while cause := last.__cause__ or (None if last.__suppress_context__ else last.__context__):  # as a traceback shows
        last = cause
    text = str(last).strip().split("\n")[0][:200]
    if isinstance(last, LookupError) or not text:  # its text is only the key
        return f"{type(last).__name__}: {text}".removesuffix(": ")
    return text


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(error):
    """The operating system's error number, if there is one."""
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
