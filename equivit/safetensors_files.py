"""Safetensors files: safe reading of untrusted ones, and atomic writing."""

import os
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from equivit import errors, files

# The types that NumPy has too, and BF16.
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64")


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors by name.

    Raises:
      ValueError: the file is damaged, or a tensor is of a type that is not read.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (not a dict)
                kind = file.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise ValueError(
                        f"{path}: tensor {errors.shown(name)} is of type {kind}, which is not read; write it as F32, "
                        f"F16 or BF16 (the types read are {', '.join(TYPES)})."
                    )
                tensors[name] = file.get_tensor(name)
            return tensors
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is damaged or not a safetensors file ({errors.reason(error)}).") from error


def metadata(path: str | os.PathLike) -> dict[str, str]:
    """The texts by name that were written beside the tensors; ValueError for a damaged file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is damaged or not a safetensors file ({errors.reason(error)}).") from error


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name, atomically (`files.replacing`); OSError, which names the file, if that cannot be done."""
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    with files.replacing(path) as unfinished:
        try:
            safetensors.numpy.save_file(whole, unfinished, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path}: cannot be written ({error}).") from error
