"""Tensors out of a .pth file, without torch and without ever running what the file says.

A .pth file (torch 1.6 and later) is a zip archive: a pickle that describes the objects, and one raw file for each
storage.  Unpickling can call anything, so only these names are known here: tensors, storages, OrderedDict, and
argparse.Namespace, which comes back empty.  Any other name is an error.  What a file may become is in proportion to its
size (`archives.py`).

A TorchScript archive has code beside such a pickle, which describes a tree of modules.  The code is not read; the tree
comes back as a state dict, parameters and buffers by the path of their modules.
"""

import collections
import io
import math
import pathlib
import pickle
import pickletools
import zipfile
from typing import Any

import ml_dtypes
import numpy as np

from equivit.archives import Archive, Refused

FIX = "save it again with torch.save, which does not compress, its tensors as .contiguous() copies"
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
      ValueError: the file is not such an archive, is damaged, holds anything but tensors and plain containers, or asks
        for memory out of proportion to its size.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: is not a zip archive, which .pth files are since torch 1.6; save it again with a newer torch, or "
            "as .safetensors."
        )
    try:
        with Archive(path, FIX) as archive:
            content = _Unpickler(archive).load()
            return _state_dict(content) if isinstance(content, _Module) else content
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can make its reader raise nearly anything
        raise ValueError(f"{path}: is damaged or not a torch file ({type(error).__name__}: {error}).") from error


class _Module:
    """A module of a TorchScript archive: its attributes, without its code."""


class _Unpickler(pickle.Unpickler):
    """Knows the few names of the module's docstring.

    `find_class` hands out new objects for each file: a pickle can set attributes of what it gets.
    """

    def __init__(self, archive: Archive):
        (name,) = [n for n in archive.names if n.endswith("/data.pkl") or n == "data.pkl"]
        content = archive.read(name)
        _check_places(content)
        super().__init__(io.BytesIO(content))
        self._archive, self._root, self._storages = archive, name.removesuffix("data.pkl"), {}
        if self._root + "byteorder" in archive.names and archive.read(self._root + "byteorder") != b"little":
            raise Refused("was written in big-endian byte order; only little-endian is read.")
        self._known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("argparse", "Namespace"): type("Namespace", (), {}),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _tensor(archive, *arguments),
            ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
            ("torch", "Size"): lambda *sizes: tuple(*sizes),
            **{("torch", storage): dtype for storage, dtype in STORAGES.items()},
        }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; Refused for all but the known ones."""
        if module == "__torch__" or module.startswith("__torch__."):
            return self._known.setdefault((module, name), type("Module", (_Module,), {}))
        if (module, name) not in self._known:
            raise Refused(f"asks for {module}.{name}; only tensors and plain containers are read, and no code is run.")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        """The storage that a tensor refers to, flat: pid is ("storage", type, key, location, length)."""
        kind, dtype, key, _, length = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise Refused(f"refers to {kind!r}, which is not a storage.")
        if key not in self._storages:
            name = f"{self._root}data/{key}"
            if (size := self._archive.declared(name)) != length * dtype.itemsize:
                raise Refused(f"storage {key} has {size} bytes, not {length} x {dtype.itemsize}.")
            self._storages[key] = np.frombuffer(self._archive.read(name), dtype)
        return self._storages[key]


def _state_dict(root: _Module) -> dict[str, np.ndarray]:
    """The tensors of a tree of modules: "visual.conv1.weight"; Refused where a module is there twice."""
    tensors, seen, left = {}, {id(root)}, [("", root)]
    while left:
        path, module = left.pop()
        for name, value in vars(module).items():
            if isinstance(value, np.ndarray):
                tensors[f"{path}{name}"] = value
            elif isinstance(value, _Module):
                if id(value) in seen:
                    raise Refused(f"has the module {path}{name} in two places, which no state dict can say.")
                seen.add(id(value))
                left.append((f"{path}{name}.", value))
    return tensors


def _check_places(content: bytes) -> None:
    """Refused where a pickle numbers what it remembers beyond its own length: places are set aside up to the number."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and int(argument or 0) > len(content):
            raise Refused(f"is damaged: it remembers an object at place {argument:,}.")


def _tensor(archive, storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None) -> np.ndarray:
    """The part of a storage that a tensor shows, copied."""
    if len(size) != len(stride) or min((offset, *size, *stride)) < 0:
        raise Refused(f"a tensor has offset {offset}, size {tuple(size)} and strides {tuple(stride)}.")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= len(storage):
        raise Refused(f"a tensor of size {tuple(size)} reads entry {last} of a storage of {len(storage)}.")
    # Many tensors may share a storage, and strides of 0 repeat its entries: neither costs the file anything.
    archive.claim(f"a tensor of size {tuple(size)}", math.prod(size) * storage.itemsize)
    view = storage[offset:] if 0 not in size else storage[:0]
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(view, tuple(size), strides).copy()
