"""Tensors out of a .pth file, without torch and without ever running what the file says.

A .pth file (torch 1.6 and later) is a zip archive: a pickle that describes the objects, and one raw file for each
storage.  Unpickling can call anything, so only these names are known here: tensors, storages, OrderedDict, and
argparse.Namespace, which comes back empty.  Any other name is an error.
"""

import collections
import io
import pathlib
import pickle
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


def read(path: pathlib.Path) -> Any:
    """The object that was saved, its tensors as numpy arrays.

    Raises:
      ValueError: the file is not such an archive, is damaged, or holds anything but tensors and plain containers.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: is not a zip archive, which .pth files are since torch 1.6; save it again with a newer torch, or "
            "as .safetensors."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _Unpickler(archive).load()
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can make its reader raise nearly anything
        raise ValueError(f"{path}: is damaged or not a torch file ({type(error).__name__}: {error}).") from error


class Refused(Exception):
    """The file asks for something that this module does not read."""


class _Unpickler(pickle.Unpickler):
    """Knows the few names of the module's docstring.

    `find_class` hands out new objects for each file: a pickle can set attributes of what it gets.
    """

    def __init__(self, archive: zipfile.ZipFile):
        (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"]
        super().__init__(io.BytesIO(archive.read(name)))
        self._archive, self._root, self._storages = archive, name.removesuffix("data.pkl"), {}
        if self._root + "byteorder" in archive.namelist() and archive.read(self._root + "byteorder") != b"little":
            raise Refused("was written in big-endian byte order; only little-endian is read.")
        self._known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("argparse", "Namespace"): type("Namespace", (), {}),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _tensor(*arguments),
            ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
            ("torch", "Size"): lambda *sizes: tuple(*sizes),
            **{("torch", storage): dtype for storage, dtype in STORAGES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; Refused for all but the known ones."""
        if (module, name) not in self._known:
            raise Refused(f"asks for {module}.{name}; only tensors and plain containers are read, and no code is run.")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The storage that a tensor refers to, flat: pid is ("storage", type, key, location, length)."""
        kind, dtype, key, _, length = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise Refused(f"refers to {kind!r}, which is not a storage.")
        if key not in self._storages:
            data = self._archive.read(f"{self._root}data/{key}")
            if len(data) != length * dtype.itemsize:
                raise Refused(f"storage {key} has {len(data)} bytes, not {length} x {dtype.itemsize}.")
            self._storages[key] = np.frombuffer(data, dtype)
        return self._storages[key]


def _tensor(storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None) -> np.ndarray:
    """The part of a storage that a tensor shows, copied."""
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise Refused(f"a tensor has offset {offset}, size {tuple(size)} and strides {tuple(stride)}.")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= len(storage):
        raise Refused(f"a tensor of size {tuple(size)} reads entry {last} of a storage of {len(storage)}.")
    view = storage[offset:] if 0 not in size else storage[:0]
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(view, tuple(size), strides).copy()
