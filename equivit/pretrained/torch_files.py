"""Reading tensors from a .pth file, without torch and without running code from the file.

A .pth file (torch 1.6 and later) is a zip archive: a pickle that describes the objects, and one raw file for each
storage; older files have the same parts in sequence (`old_torch_files.py`).  Unpickling can call anything, so only
these names are known here: tensors, storages, OrderedDict, and argparse.Namespace, whose values are dropped.  Any other
name is an error.  Memory is bounded in proportion to the file's size (`archives.py`), and the pickle reader cannot
reach objects of this process (`pickles.py`).

A TorchScript archive has code and such a pickle, which describes a tree of modules.  The code is not read; the tree
becomes a state dict, with parameters and buffers named by module paths.
"""

import dataclasses
import math
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from equivit.archives import Archive, Refused
from equivit.errors import shown
from equivit.pretrained.old_torch_files import OldArchive
from equivit.pretrained.pickles import Machine, Name, Shell

FIX = "save it again with torch.save, uncompressed, with tensors as .contiguous() copies"
MOST_AXES = 32
LARGEST = 2**63 - 1
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
    """Read the saved object, with tensors as numpy arrays.

    Raises:
      ValueError: the file is neither, is damaged, holds anything but tensors and plain containers, or needs
        memory out of proportion to its size.
    """
    sizes = {name: dtype.itemsize for name, dtype in STORAGES.items()}
    try:
        with Archive(path, FIX) if zipfile.is_zipfile(path) else OldArchive(path, FIX, sizes) as archive:
            return _Reader(archive).load()
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can make its reader raise nearly anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: is damaged or not a torch file ({what}).") from error


class Namespace(Shell):
    """Placeholder for an argparse.Namespace."""


class Module(Shell):
    """Placeholder for a module of a TorchScript archive, without its code."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """The storage that tensors are views of."""

    dtype: np.dtype
    content: bytes

    def __len__(self) -> int:
        return len(self.content) // self.dtype.itemsize


class _Reader:
    """Resolves the few names in the module's docstring."""

    def __init__(self, archive: Archive | OldArchive):
        (self._pickle,) = [n for n in archive.names if n.endswith("/data.pkl") or n == "data.pkl"]
        self._archive, self._root = archive, self._pickle.removesuffix("data.pkl")
        self._contents: dict[str, bytes] = {}  # of storages, by key
        if self._root + "byteorder" in archive.names and archive.read(self._root + "byteorder") != b"little":
            raise Refused("was written in big-endian byte order; only little-endian is read.")

    def load(self) -> Any:
        """The content of the archive; a tree of modules becomes a state dict."""
        content = Machine(self._find, self._storage, self._archive.claim).load(self._archive.read(self._pickle))
        return self._state_dict(content) if isinstance(content, Module) else content

    def _find(self, name: Name) -> Callable | None:
        """The function that replaces a name, None for a storage; `Refused` for an unknown name."""
        if name.module == "__torch__" or name.module.startswith("__torch__."):
            return Module
        match name:
            case ("collections", "OrderedDict"):
                return _ordered
            case ("argparse", "Namespace"):
                return Namespace
            case ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor"):
                return lambda *arguments: _tensor(self._archive, *arguments)
            case ("torch._utils", "_rebuild_parameter"):
                return lambda data, requires_grad, hooks: data
            case ("torch", "Size"):
                return lambda size: _whole_numbers(size, "a torch.Size")
            case ("torch", storage) if storage in STORAGES:
                return None
        raise Refused(f"asks for {name}; only tensors and plain containers are read, and no code is run.")

    def _storage(self, pid: Any) -> Storage:
        """The storage of a tensor: `pid` is ("storage", type, key, location, number of entries)."""
        kind, name, key, _, length, *view = pid
        if any(view):
            raise Refused(f"has a view of the storage {shown(key)}; {FIX}.")
        if kind != "storage" or type(name) is not Name or name.name not in STORAGES or type(key) is not str:
            raise Refused("refers to something that is not a storage.")
        (length,) = _whole_numbers((length,), "the length of a storage")
        dtype, file = STORAGES[name.name], f"{self._root}data/{key}"
        if (size := self._archive.declared(file)) != length * dtype.itemsize:
            raise Refused(f"storage {shown(key)[1:-1]} has {size} bytes, not {length} x {dtype.itemsize}.")
        if key not in self._contents:
            self._contents[key] = self._archive.read(file)
        return Storage(dtype, self._contents[key])

    def _state_dict(self, root: Module) -> dict[str, np.ndarray]:
        """The tensors of a tree of modules, named as "visual.conv1.weight"; `Refused` if a module occurs twice."""
        tensors, seen, left = {}, {id(root)}, [("", root)]
        while left:
            path, module = left.pop()
            for name, value in module.attributes.items():
                whole = f"{path}{name}"
                self._archive.claim("a name", len(whole))  # in a deep tree each name repeats the path
                if isinstance(value, np.ndarray):
                    tensors[whole] = value
                elif isinstance(value, Module):
                    if id(value) in seen:
                        place = shown(whole)[1:-1]
                        raise Refused(f"has the module {place} in two places, which no state dict can represent.")
                    seen.add(id(value))
                    left.append((f"{whole}.", value))
        return tensors


def _tensor(archive, storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None) -> np.ndarray:
    """A copy of a tensor's view of a storage."""
    if type(storage) is not Storage:
        raise Refused("makes a tensor of something that is not a storage.")
    size, stride, (offset,) = (_whole_numbers(n, "the size of a tensor") for n in (size, stride, (offset,)))
    if len(size) != len(stride) or len(size) > MOST_AXES or min((offset, *size, *stride)) < 0:
        raise Refused(f"a tensor has offset {offset}, size {shown(size)} and strides {shown(stride)}.")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= len(storage):
        raise Refused(f"a tensor of size {shown(size)} reads entry {last} of a storage of {len(storage)}.")
    # Many tensors may share a storage, and strides of 0 repeat entries, at no cost in the file.
    itemsize = storage.dtype.itemsize
    archive.claim(f"a tensor of size {shown(size)}", math.prod(size) * itemsize)
    if 0 in size:
        return np.empty(size, storage.dtype)
    strides = tuple(step * itemsize for step in stride)
    view = np.ndarray(size, storage.dtype, storage.content, offset * itemsize, strides)  # NumPy also checks the bounds
    return view.copy()


def _ordered() -> dict[str, Any]:
    """An empty dictionary; `dict` itself would hash any key from a file."""
    return {}


def _whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """The values; `Refused` unless they are a tuple of 64-bit integers."""
    if type(values) is not tuple or any(type(n) is not int or abs(n) > LARGEST for n in values):
        raise Refused(f"{what} must be whole numbers of 64 bits.")
    return values
