"""Reading tensors from a .pth file, without torch and without running code from the file.

A .pth file (torch 1.6 and later) is a zip archive: a pickle that describes the objects, and one raw file for each
storage.  Unpickling can call anything, so only these names are known here: tensors, storages, OrderedDict, and
argparse.Namespace, whose values are dropped.  Any other name is an error.  Memory is bounded in proportion to the
file's size (`archives.py`).

Python's unpickler looks up methods of the objects it builds and hashes any key in a file.  Here the operations written
by `torch.save` make plain values, and all others are rejected, so a file can neither reach an object of this process
nor keep it busy.

A TorchScript archive has code and such a pickle, which describes a tree of modules.  The code is not read; the tree
becomes a state dict, with parameters and buffers named by module paths.
"""

import dataclasses
import math
import pathlib
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from equivit.archives import Archive, Refused
from equivit.errors import shown

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
OBJECT = 100  # bytes that an operation may take in memory, without the characters of its string
CHARACTER = 4  # bytes
LARGEST_KEY = 2**48  # optimizers number their states; old ones used addresses
GIVEN = {  # operations that push their argument
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
REMEMBER = ("BINPUT", "LONG_BINPUT", "MEMOIZE")
RECALL = ("BINGET", "LONG_BINGET")
IGNORED = ("PROTO", "FRAME", "STOP")


def read(path: pathlib.Path) -> Any:
    """Read the saved object, with tensors as numpy arrays.

    Raises:
      ValueError: the file is not such an archive, is damaged, holds anything but tensors and plain containers, or needs
        memory out of proportion to its size.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path}: is not a zip archive, which .pth files are since torch 1.6; save it again with a newer torch, or "
            "as .safetensors."
        )
    try:
        with Archive(path, FIX) as archive:
            return _Reader(archive).load()
    except Refused as error:
        raise ValueError(f"{path}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can make its reader raise nearly anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: is damaged or not a torch file ({what}).") from error


class Name(NamedTuple):
    """A class or function named by a file; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return shown(f"{self.module}.{self.name}")[1:-1]


class Shell:
    """Placeholder for an object of a class.

    Attributes:
      attributes: the attributes set by the file, by name.
    """

    def __init__(self):
        self.attributes: dict[str, Any] = {}


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
    """Reads the pickle of an archive, and knows the few names in the module's docstring."""

    def __init__(self, archive: Archive):
        (self._pickle,) = [n for n in archive.names if n.endswith("/data.pkl") or n == "data.pkl"]
        self._archive, self._root = archive, self._pickle.removesuffix("data.pkl")
        self._contents: dict[str, bytes] = {}  # of storages, by key
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stack before each mark
        self._memory: dict[int, Any] = {}
        if self._root + "byteorder" in archive.names and archive.read(self._root + "byteorder") != b"little":
            raise Refused("was written in big-endian byte order; only little-endian is read.")

    def load(self) -> Any:
        """The content of the archive; a tree of modules becomes a state dict."""
        content = self._unpickled(self._archive.read(self._pickle))
        return self._state_dict(content) if isinstance(content, Module) else content

    def _unpickled(self, content: bytes) -> Any:
        """The value that a pickle describes; `Refused` for an unsupported operation, name or key."""
        for opcode, argument, _ in pickletools.genops(content):
            length = len(argument) if isinstance(argument, str | bytes) else 0
            self._archive.claim("an object", OBJECT + CHARACTER * length)
            if opcode.name in REMEMBER and isinstance(argument, int) and argument > len(content):
                raise Refused(f"is damaged: it stores an object at memo index {argument:,}.")
            self._run(opcode.name, argument)
        return self._stack.pop()

    def _run(self, operation: str, argument: Any) -> None:
        """Apply an operation to the stack."""
        stack = self._stack
        if operation in GIVEN:
            stack.append(argument)
        elif operation in MADE:
            stack.append(MADE[operation]())
        elif operation in REMEMBER:
            self._memory[len(self._memory) if operation == "MEMOIZE" else argument] = stack[-1]
        elif operation in RECALL:
            stack.append(self._memory[argument])
        elif operation in SHORT_TUPLES:
            self._put(tuple(self._take(SHORT_TUPLES[operation])))
        elif operation == "MARK":
            self._below.append(stack)
            self._stack = []
        elif operation == "TUPLE":
            self._put(tuple(self._since_mark()))
        elif operation in ("APPEND", "APPENDS"):
            values = self._take(1) if operation == "APPEND" else self._since_mark()
            _of_type(self._stack[-1], list).extend(values)
        elif operation in ("SETITEM", "SETITEMS"):
            pairs = self._take(2) if operation == "SETITEM" else self._since_mark()
            _set(_of_type(self._stack[-1], dict), pairs)
        elif operation in ("GLOBAL", "STACK_GLOBAL"):
            parts = argument.split(" ") if operation == "GLOBAL" else self._take(2)
            name = Name(*(_of_type(part, str) for part in parts))
            self._find(name)
            self._put(name)
        elif operation in ("REDUCE", "NEWOBJ"):
            name, arguments = self._take(2)
            if (make := self._find(_of_type(name, Name))) is None:
                raise Refused(f"calls {name}, which is not a tensor function.")
            self._put(make(*_of_type(arguments, tuple)))
        elif operation == "BUILD":
            (state,) = self._take(1)
            _build(stack[-1], state)
        elif operation == "BINPERSID":
            self._put(self._storage(*self._take(1)))
        elif operation not in IGNORED:
            raise Refused(f"has the operation {operation}, unknown to torch.save; save it again with torch.save.")

    def _put(self, value: Any) -> None:
        self._stack.append(value)

    def _take(self, number: int) -> list[Any]:
        """Pop the values at the top of the stack."""
        if len(self._stack) < number:
            raise ValueError("its stack is empty")
        values = self._stack[-number:]
        del self._stack[-number:]
        return values

    def _since_mark(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def _find(self, name: Name) -> Callable | None:
        """The function that replaces a name, None for a storage; `Refused` for an unknown name."""
        if name.module == "__torch__" or name.module.startswith("__torch__."):
            return Module
        match name:
            case ("collections", "OrderedDict"):
                return _ordered
            case ("argparse", "Namespace"):
                return Namespace
            case ("torch._utils", "_rebuild_tensor_v2"):
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
        kind, name, key, _, length = pid
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


def _of_type(value: Any, kind: type) -> Any:
    """The value; ValueError unless it has exactly this type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} must be")
    return value


def _set(table: dict, pairs: list[Any]) -> None:
    """Set alternating keys and values.  Keys must be plain: hashing nested tuples can take forever."""
    if len(pairs) % 2:
        raise ValueError("a key has no value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) is not str and not (type(key) is int and abs(key) <= LARGEST_KEY):
            raise Refused(
                f"has a dictionary with a key of type {type(key).__name__}; keys must be strings or "
                f"whole numbers up to {LARGEST_KEY:,}."
            )
        table[key] = value


def _build(target: Any, state: Any) -> None:
    """Set the attributes of a shell, once; attributes of a dictionary (torch's `_metadata`) are dropped."""
    if type(target) is dict:
        return
    if not isinstance(target, Shell) or target.attributes or type(state) is not dict:
        what = "class or function" if type(target) is Name else type(target).__name__
        raise Refused(f"sets the state of a {what}; only objects of known classes have one, and it is set once.")
    target.attributes = state  # no copy, which a file could request repeatedly
