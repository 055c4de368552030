"""Safetensors files: safe reading and atomic writing."""

import os
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from equivit import errors, files

# The types of NumPy, and BF16.
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64")


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Read the tensors by name.

    Raises ValueError if the file is damaged, or a tensor has an unsupported type.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (not a dict)
                kind = file.get_slice(name).get_dtype()
                if kind not in TYPES:
                    raise ValueError(
                        f"{path}: tensor {errors.shown(name)} has the unsupported type {kind}; write it as F32, F16 or "
                        f"BF16 (supported: {', '.join(TYPES)})."
                    )
                tensors[name] = file.get_tensor(name)
            return tensors
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is damaged or not a safetensors file ({errors.reason(error)}).") from error


def metadata(path: str | os.PathLike) -> dict[str, str]:
    """Read the file's metadata, texts by name; ValueError for a damaged file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is damaged or not a safetensors file ({errors.reason(error)}).") from error


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name, atomically (`files.replacing`); OSError, with the file's name, on failure."""
    # Not np.ascontiguousarray, which makes scalars arrays of shape [1].
    whole = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    with files.replacing(path) as unfinished:
        try:
            safetensors.numpy.save_file(whole, unfinished, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error}).") from error
