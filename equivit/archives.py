"""Zip archives and .npz files that nobody vouches for: read only as far as their sizes agree and are in proportion.

A small file can ask for any amount of memory, by compression, by a header, or by a tensor with strides of zero.  So a
file may become `RATIO` times its own size, or `FREE` bytes where that is more; sizes are compared before anything is
inflated.  An uncompressed file of arrays is never refused.
"""

import math
import os
import pathlib
import sys
import zipfile

import numpy as np

from equivit import errors

RATIO = 32  # weights compress about 1.1 times, images 2 to 10 times, and bombs 1000 times
FREE = 2**26  # bytes that any file may become

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Refused(Exception):
    """A file asks for more than it may have; the message continues after the file's name."""


class Archive:
    """A zip file, open for reading, and how many bytes may still come out of it.

    Args:
      path: of the file.
      fix: how its owner can make it smaller to read, for the error.

    Raises:
      zipfile.BadZipFile: it is damaged.
    """

    def __init__(self, path: str | os.PathLike, fix: str):
        self.path, self.fix, self.size = pathlib.Path(path), fix, pathlib.Path(path).stat().st_size
        self._zip, self._left = zipfile.ZipFile(path), max(FREE, RATIO * self.size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._zip.close()

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return self._zip.namelist()

    def declared(self, name: str) -> int:
        """The bytes that an entry says it has."""
        return self._zip.getinfo(name).file_size

    def open(self, name: str):
        """A stream of the bytes of an entry."""
        return self._zip.open(name)

    def read(self, name: str) -> bytes:
        """The bytes of an entry; Refused where they are out of proportion."""
        self.claim(errors.shown(name), size := self.declared(name))
        with self.open(name) as stream:
            return stream.read(size)  # without a size, all is inflated, however much the entry declares

    def claim(self, what: str, size: int) -> None:
        """Refused unless `size` bytes more are in proportion to the file."""
        if size > self._left:
            raise Refused(
                f"{what} takes {size:,} bytes, and all together more than {max(FREE, RATIO * self.size):,}, the most "
                f"that a file of {self.size:,} bytes may become; {self.fix}."
            )
        self._left -= size


class Npz(Archive):
    """An .npz file of plain arrays.

    Raises:
      ValueError: it is damaged or something else.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            super().__init__(path, "write it again with np.savez, which does not compress")
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{path}: is damaged or not an .npz file ({errors.reason(error)}); np.savez writes them."
            ) from error
        self.keys = {name.removesuffix(".npy"): name for name in self.names}

    def __getitem__(self, key: str) -> np.ndarray:
        """The array of that name.

        Raises:
          ValueError: it is damaged, holds Python objects, is not of the size that it declares, or does not fit into
            memory in proportion to the file or at all.
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
        """Refused unless the header's shape and type make the bytes that the entry declares."""
        with self.open(name) as stream:
            version = np.lib.format.read_magic(stream)
            if version not in _HEADERS:
                raise Refused(
                    f"{errors.shown(key)} is of version {version} of NumPy's format, which plain arrays do not need."
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
    """Refused where an array of text has characters that do not exist, of which Python can make no string."""
    if array.dtype.kind != "U" or not array.nbytes:
        return
    codes = np.ascontiguousarray(array).view(f"{array.dtype.byteorder}u4")
    if (wrong := codes[(codes > sys.maxunicode) | ((codes >= 0xD800) & (codes <= 0xDFFF))]).size:
        raise Refused(f"{errors.shown(key)} holds text with the character {wrong.flat[0]:#x}, which does not exist.")
