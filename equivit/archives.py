"""Safe reading of untrusted zip archives and .npz files: sizes are checked before decompressing.

A small file can demand any amount of memory, by compression, by a header, or by a tensor with zero strides.  So a file
may expand to `RATIO` times its size or to `FREE` bytes, whichever is larger.  Uncompressed array files are never
rejected.
"""

import math
import os
import pathlib
import sys
import zipfile

import numpy as np

from equivit import errors

RATIO = 32  # weights compress about 1.1 times, images 2 to 10 times, and bombs 1000 times
FREE = 2**26  # bytes that any file may expand to

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Refused(Exception):
    """A file demands too much memory or is invalid; the message follows the file's name."""


class Budget:
    """The bytes that the content of a file may take; `fix` is the remedy in the error beyond it."""

    def __init__(self, path: str | os.PathLike, fix: str):
        self.path, self.fix, self.size = pathlib.Path(path), fix, pathlib.Path(path).stat().st_size
        self._left = max(FREE, RATIO * self.size)

    def claim(self, what: str, size: int) -> None:
        """Take `size` bytes from the budget; Refused if it is exceeded."""
        if size > self._left:
            raise Refused(
                f"{what} takes {size:,} bytes, and the total exceeds {max(FREE, RATIO * self.size):,}, the most "
                f"that a file of {self.size:,} bytes may expand to; {self.fix}."
            )
        self._left -= size


class Archive(Budget):
    """A zip file open for reading, with a budget of decompressed bytes.

    Raises zipfile.BadZipFile if the file is damaged.
    """

    def __init__(self, path: str | os.PathLike, fix: str):
        super().__init__(path, fix)
        self._zip = zipfile.ZipFile(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._zip.close()

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return self._zip.namelist()

    def declared(self, name: str) -> int:
        """The declared size of an entry, in bytes."""
        return self._zip.getinfo(name).file_size

    def open(self, name: str):
        """Open an entry as a stream of bytes."""
        return self._zip.open(name)

    def read(self, name: str) -> bytes:
        """Read an entry; Refused if it exceeds the budget."""
        self.claim(errors.shown(name), size := self.declared(name))
        with self.open(name) as stream:
            return stream.read(size)  # without a size, the whole entry is decompressed, whatever it declares


class Npz(Archive):
    """An .npz file of plain arrays.

    Raises ValueError if the file is damaged or not an .npz file.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            super().__init__(path, "write it again with np.savez, which does not compress")
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: is damaged or not an .npz file ({errors.reason(error)}); np.savez writes such files."
            ) from error
        self.keys = {name.removesuffix(".npy"): name for name in self.names}

    def __getitem__(self, key: str) -> np.ndarray:
        """Read the array of that name.

        Raises ValueError if the array is damaged, holds Python objects, does not have its declared size, exceeds the
        budget, or does not fit into memory.
        """
        name = self.keys[key]
        try:
            self.claim(errors.shown(key), self.declared(name))
            self._check_header(key, name)
            with self.open(name) as stream:
                array = np.lib.format.read_array(stream, allow_pickle=False)
            _check_text(key, array)
            return array
        except Refused as error:
            raise ValueError(f"{self.path}: {error}") from None
        except MemoryError as error:
            raise ValueError(
                f"{self.path}: {errors.shown(key)} does not fit into this machine's memory ({error})."
            ) from error
        except Exception as error:  # damaged bytes make zlib, zipfile and NumPy's parser raise nearly anything
            raise ValueError(
                f"{self.path}: is damaged, or {errors.shown(key)} is not a plain array ({errors.reason(error)})."
            ) from error

    def _check_header(self, key: str, name: str) -> None:
        """Refused unless shape and type in the header match the declared size of the entry."""
        with self.open(name) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in _HEADERS:
                raise Refused(
                    f"{errors.shown(key)} has version {version} of NumPy's format, which plain arrays do not need."
                )
            shape, _, dtype = _HEADERS[version](stream)
            size = self.declared(name) - stream.tell()
        if dtype.hasobject:
            raise Refused(
                f"{errors.shown(key)} holds Python objects, which are not read: they could run code. Save a plain "
                "array: np.array(..., dtype=int), or dtype=str for names."
            )
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise Refused(
                f"{errors.shown(key)} declares {dtype} {list(shape)} and holds {size:,} bytes; it is damaged."
            )


def _check_text(key: str, array: np.ndarray) -> None:
    """Refused if an array of text has invalid code points, which Python cannot decode."""
    if array.dtype.kind != "U" or not array.nbytes:
        return
    codes = np.ascontiguousarray(array).view(f"{array.dtype.byteorder}u4")
    if (wrong := codes[(codes > sys.maxunicode) | ((codes >= 0xD800) & (codes <= 0xDFFF))]).size:
        raise Refused(f"{errors.shown(key)} holds text with the invalid character {wrong.flat[0]:#x}.")
