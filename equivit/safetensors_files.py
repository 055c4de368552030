"""Reads .safetensors files that nobody vouches for."""

import os

import numpy as np
import safetensors

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
                        f"{path}: tensor {name!r} is of type {kind}, which is not read; write it as F32, F16 or BF16 "
                        f"(the types read are {', '.join(TYPES)})."
                    )
                tensors[name] = file.get_tensor(name)
            return tensors
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: is damaged or not a safetensors file ({error}).") from error
