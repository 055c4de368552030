"""The files of torch before 1.6 as an archive.

Such a file has five pickles (magic number, version, machine, objects, keys of storages), then for each storage its
number of entries, an int64, and the entries.
"""

import io
import os
import pickletools
import struct
from collections.abc import Mapping
from typing import Any

from equivit.archives import Budget, Refused
from equivit.errors import shown
from equivit.pretrained.pickles import Machine, Name, Shell

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
OBJECTS = "data.pkl"  # names of the entries, as in newer files
STORAGE = "data/"


class OldArchive(Budget):
    """Such a file, with the entries of a newer one: `data.pkl` and `data/<key>` for each storage.

    Args:
      fix: as in `Budget`.
      sizes: bytes of an entry of a storage, by the name of its class.
    """

    def __init__(self, path: str | os.PathLike, fix: str, sizes: Mapping[str, int]):
        super().__init__(path, fix)
        self._content = self.path.read_bytes()
        stream = io.BytesIO(self._content)
        if self._plain(stream) != MAGIC or self._plain(stream) != VERSION:
            raise Refused("is a pickle that torch.save did not write; save it as .safetensors or with torch.save.")
        if self._plain(stream).get("little_endian") is not True:
            raise Refused("was written in big-endian byte order; only little-endian is read.")
        self._places = {OBJECTS: self._next(stream)}
        kinds = self._kinds()
        for key in self._plain(stream):
            if kinds.get(key) not in sizes:
                raise Refused(f"has a storage {shown(key)} of an unknown type.")
            begin = stream.tell() + 8
            (number,) = struct.unpack("<q", stream.read(8))
            end = begin + number * sizes[kinds[key]]
            if not begin <= end <= len(self._content):
                raise Refused(f"ends inside the storage {shown(key)} of {number:,} entries; download it again.")
            self._places[f"{STORAGE}{key}"] = slice(begin, end)
            stream.seek(end)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def names(self) -> list[str]:
        """Names of the entries."""
        return list(self._places)

    def declared(self, name: str) -> int:
        """The size of an entry, in bytes."""
        return self._places[name].stop - self._places[name].start

    def read(self, name: str) -> bytes:
        """Read an entry; Refused if it exceeds the budget."""
        self.claim(shown(name), self.declared(name))
        return self._content[self._places[name]]

    def _next(self, stream: io.BytesIO) -> slice:
        """The place of the next pickle."""
        begin = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        return slice(begin, stream.tell())

    def _plain(self, stream: io.BytesIO) -> Any:
        """The value of the next pickle, of plain values."""

        def refuse(what):
            raise Refused(f"has {shown(str(what))} in its header; torch.save does not write that.")

        return Machine(refuse, refuse, self.claim).load(self._content[self._next(stream)])

    def _kinds(self) -> dict[str, str]:
        """The name of the class of each storage, by its key."""
        kinds = {}

        def find(name):
            return lambda *_: {} if name == ("collections", "OrderedDict") else Shell()

        def note(pid):
            _, kind, key, *_ = pid
            if type(kind) is not Name or type(key) is not str or kinds.setdefault(key, kind.name) != kind.name:
                raise Refused("refers to something that is not a storage.")

        Machine(find, note, self.claim).load(self._content[self._places[OBJECTS]])
        return kinds
