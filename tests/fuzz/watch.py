"""Watches a process: what it does, from Python's audit events, and what a reader has changed in it."""

import builtins
import csv
import decimal
import gc
import os
import pathlib
import random
import signal
import sys
import threading
import warnings
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image, ImageFile

# Events that no reader has a reason for.  `pickle.find_class` comes from the standard unpickler, not from our own.
# fmt: off
FORBIDDEN = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile", "pty.", "socket.",
    "urllib.", "ftplib.", "http.", "smtplib.", "webbrowser.", "ctypes.dlopen", "pickle.find_class", "os.kill",
    "os.chdir", "os.putenv", "os.unsetenv", "signal.", "syslog.", "shutil.", "tempfile.", "sys.set",
)
WRITING = (
    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr",
)
# fmt: on
TWO_PATHS = ("os.rename", "os.link", "os.symlink")
CONTAINERS = frozenset((dict, list, set))
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Auditor:
    """Collects the forbidden events between `begin` and `end`.  A hook cannot be removed: one for each process."""

    def __init__(self):
        self._found: list[str] | None = None
        self._writable: pathlib.Path | None = None
        sys.addaudithook(self._hear)

    def begin(self, writable: pathlib.Path | None) -> None:
        """Listen; files may be written in the folder `writable`, or nowhere."""
        self._writable, self._found = writable, []

    def end(self) -> list[str]:
        """The recorded events."""
        found, self._found = self._found or [], None
        return found

    def _hear(self, event: str, arguments: tuple) -> None:
        if self._found is None:
            return
        writes = event in WRITING or (event == "open" and _writes(*arguments))
        paths = arguments[:2] if event in TWO_PATHS else arguments[:1]
        if event.startswith(FORBIDDEN) or (writes and not all(map(self._may_write, paths))):
            self._found.append(event)

    def _may_write(self, path: Any) -> bool:
        if self._writable is None or not isinstance(path, str | os.PathLike):
            return False
        place = pathlib.Path(os.path.abspath(path))
        return self._writable in (place, *place.parents)


def _writes(path: Any, mode: str | None, flags: int) -> bool:
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & FLAGS)


def state() -> dict[str, Any]:
    """The state that a reader must not change, by name; two of these are compared with ==."""
    number_types = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4")]
    found = {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "umask": _umask(),
        "open files": len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0,
        "threads": threading.active_count(),
        "NumPy's random state": _comparable(np.random.get_state()),
        "random state": random.getstate(),
        "filters of warnings": list(warnings.filters),
        "handlers of signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "recursion limit": sys.getrecursionlimit(),
        "garbage collector": gc.isenabled(),
        "search path": list(sys.path),
        "NumPy's errors": np.geterr(),
        "NumPy's printing": str(np.get_printoptions()),
        "types of numbers": [(t.str, t.itemsize, t.alignment, t.fields, t.metadata, hash(t)) for t in number_types],
        "sizes of CSV fields": csv.field_size_limit(),
        "decimal context": str(decimal.getcontext()),
        "Pillow's settings": (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, Image.WARN_POSSIBLE_FORMATS),
        "packages": {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names,
    }
    return found | _globals()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _globals() -> dict[str, Any]:
    """The globals of our modules, and the contents of their containers, by identity."""
    found = {"builtins": list(map(id, vars(builtins).values()))}
    for name, module in list(sys.modules.items()):
        if name == "equivit" or name.startswith("equivit."):
            values = [value for key, value in vars(module).items() if key[:2] != "__"]
            inside = [list(map(id, _contents(value))) for value in values if type(value) in CONTAINERS]
            found[f"globals of {name}"] = list(map(id, values)), inside
    return found


def _contents(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _comparable(values: tuple) -> tuple:
    return tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in values)
