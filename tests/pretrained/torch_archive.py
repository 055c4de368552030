"""Writes .pth files as torch does, without torch: a zip archive with a pickle and one file for each storage."""

import collections
import contextlib
import io
import pickle
import sys
import types
import zipfile

import numpy as np

from equivit.pretrained import torch_files


def write(path, content, *, byteorder=b"little") -> None:
    """Save `content`, whose arrays become tensors; a transposed array keeps its strides, as a tensor would."""
    with _fake_torch() as torch, zipfile.ZipFile(path, "w") as archive:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, torch)
        pickler.dump(content)
        archive.writestr("weights/data.pkl", buffer.getvalue())
        archive.writestr("weights/byteorder", byteorder)
        for key, storage in enumerate(pickler.storages):
            archive.writestr(f"weights/data/{key}", storage.tobytes())
        archive.writestr("weights/version", "3\n")


class _Storage:
    """Stands for torch's storage; is written as a persistent id."""

    def __init__(self, *pid):
        self.pid = pid


class _Pickler(pickle.Pickler):
    def __init__(self, buffer, torch):
        super().__init__(buffer, protocol=2)
        self._torch, self.storages = torch, []

    def persistent_id(self, value):
        return value.pid if isinstance(value, _Storage) else None

    def reducer_override(self, value):
        if not isinstance(value, np.ndarray):
            return NotImplemented
        flat = value.ravel(order="K")  # the order in memory
        name = next(name for name, dtype in torch_files.STORAGES.items() if dtype == value.dtype)
        storage = _Storage("storage", getattr(self._torch, name), str(len(self.storages)), "cpu", flat.size)
        self.storages.append(flat)
        strides = tuple(step // value.itemsize for step in value.strides)
        arguments = (storage, 0, value.shape, strides, False, collections.OrderedDict())
        return self._torch._utils._rebuild_tensor_v2, arguments


@contextlib.contextmanager
def _fake_torch():
    """Modules with the names that a pickle of tensors writes down."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in torch_files.STORAGES:
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        pass

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2, torch._utils = _rebuild_tensor_v2, utils
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        yield torch
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]
