"""The lock of a run directory, released when its process ends."""

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator

import jax

from equivit import files

# Errors of file systems without locks, such as a bucket mounted as a folder.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_log = logging.getLogger("equivit")


class BusyError(ValueError):
    """Another process is using the directory."""


@contextlib.contextmanager
def held(path: pathlib.Path) -> Iterator[None]:
    """Hold a lock file and remove it at the end; the file of a killed process does not lock.

    The first process of a run takes the lock for all.  A file system without locks causes a warning.

    Raises:
      BusyError: another process holds it; the message gives its id, its host and its start time.
    """
    if jax.process_index() != 0:
        yield
        return
    files.make_directory(path.parent)
    file = _locked(path)
    try:
        os.ftruncate(file, 0)
        now = datetime.datetime.now().isoformat(" ", "seconds")
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}, since {now}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # if the disk failed, that error is already raised
            path.unlink()
        os.close(file)


def _locked(path):
    """Open and lock the file; retry if its former owner has just removed it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 1000).decode(errors="replace") or "another process"
            os.close(file)
            raise BusyError(
                f"{path.parent}: {owner}, is using this directory; wait until it finishes, or give another --workdir."
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(file)
                raise
            _log.warning("%s: the file system has no locks (%s); start no second run here.", path.parent, error)
            return file
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)
