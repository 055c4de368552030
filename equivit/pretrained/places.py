"""The content at a place: a file of weights with any ending, one in shards, or a folder that holds it.

The first bytes of a file determine its kind.  A folder may hold a `config.json` of transformers or timm, which
describes what the weights do not determine (`described.py`).
"""

import json
import os
import pathlib
import re
import zipfile
from typing import Any

from equivit import archives, errors, safetensors_files
from equivit.pretrained import torch_files

# The weights of a folder, by preference.
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
NAMES += ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
ENDINGS = (".safetensors", ".npz", ".pth", ".pt", ".pyth", ".bin", ".ckpt", ".tar")  # of any other file of weights
INDEX = ".index.json"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")  # model-00001-of-00002.safetensors
# The starts of files that are often in the place of weights, and what they are.
OTHERS = {
    b"version https://git-lfs": "a pointer of Git LFS; get the file itself with: git lfs pull",
    b"<": "a web page; download the file itself",
    b"\x89HDF": "an HDF5 file; convert it to .safetensors",
    b"\x1f\x8b": "a gzip file; unpack it first",
}


def read(path: str | os.PathLike) -> Any:
    """Read a file of weights, all its shards, or the weights in a folder, with tensors as numpy arrays.

    Code in a file never runs.

    Raises:
      FileNotFoundError: there is no such file, or a shard is missing.
      IsADirectoryError: it is a folder without weights.
      ValueError: a file of another kind, a damaged file, an unsupported type of tensors, several files of weights in
        a folder, or memory out of proportion to the file or not available.
    """
    path = file(path)
    try:
        return _read_shards(path) if path.name.endswith(INDEX) else _read_file(path)
    except MemoryError as error:
        raise ValueError(f"{path}: its tensors do not fit into this machine's memory ({error}).") from error


def file(path: str | os.PathLike) -> pathlib.Path:
    """The file of weights at a path: the path itself, or the file in a folder; errors as in `read`."""
    path = pathlib.Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: there is no such file{errors.nearest_path(path)}.")
    if (known := next((path / name for name in NAMES if (path / name).is_file()), None)) is not None:
        return known
    found = sorted(each for each in path.iterdir() if each.is_file() and each.suffix in ENDINGS)
    if len(found) > 1:
        names = errors.listed(errors.word(each.name) for each in found)
        raise ValueError(f"{path}: the folder has {len(found)} files of weights; give one of them: {names}.")
    if not found:
        raise IsADirectoryError(
            f"{path}: this is a directory without weights, such as {NAMES[0]}, {NAMES[2]}, or a file that ends in one "
            f"of {', '.join(ENDINGS)}."
        )
    return found[0]


def config(path: str | os.PathLike, name: str = "config.json") -> dict[str, Any]:
    """The content of the `config.json` (or `name`) in a folder, or beside its file of weights; {} if there is none.

    Raises ValueError if it is not a JSON object.
    """
    path = pathlib.Path(path)
    beside = (path if path.is_dir() else path.parent) / name
    return _json(beside) if beside.is_file() else {}


def _read_file(path: pathlib.Path) -> Any:
    with open(path, "rb") as stream:
        start = stream.read(32)
    if (match := SHARD.fullmatch(path.name)) and (index := path.with_name(f"{match[1]}{match[4]}{INDEX}")).is_file():
        raise ValueError(f"{path}: this is shard {int(match[2])} of {int(match[3])}; give {index}, or the folder.")
    if zipfile.is_zipfile(path):
        return torch_files.read(path) if _is_of_torch(path) else _read_npz(path)
    if start[8:9] == b"{":
        return safetensors_files.read(path)
    if start.startswith(b"\x80"):
        return torch_files.read(path)  # a pickle, as before torch 1.6
    if start.startswith(b"PK") or not start:
        raise ValueError(f"{path}: is {'damaged, a part of a zip archive' if start else 'empty'}; download it again.")
    kind = next((what for first, what in OTHERS.items() if start.startswith(first)), None)
    raise ValueError(f"{path}: is {kind or 'neither a safetensors file, nor an .npz file, nor one of torch.save'}.")


def _is_of_torch(path: pathlib.Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.split("/")[-1] == "data.pkl" for name in archive.namelist())
    except Exception:  # a damaged list of entries can raise nearly anything; the readers then say so
        return path.suffix != ".npz"


def _read_npz(path: pathlib.Path) -> dict[str, Any]:
    with archives.Npz(path) as opened:
        return {key: opened[key] for key in opened.keys}


def _read_shards(index: pathlib.Path) -> dict[str, Any]:
    """The tensors of all shards that an index names, each from its shard."""
    shards = _json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index}: is not an index of shards; its 'weight_map' must map tensors to files.")
    tensors: dict[str, Any] = {}
    for name in dict.fromkeys(shards.values()):
        if name != pathlib.PurePath(name).name:
            raise ValueError(f"{index}: the shard {errors.shown(name)} must be a file beside the index.")
        if not (shard := index.with_name(name)).is_file():
            number = len(set(shards.values()))
            raise FileNotFoundError(
                f"{shard}: there is no such file, but {index.name} has it as one of {number} shards."
            )
        own = _read_shard(shard)
        expected = {tensor for tensor, of in shards.items() if of == name}
        if missing := sorted(expected - own.keys()):
            raise ValueError(f"{shard}: lacks tensors of {index.name}: {errors.listed(map(errors.word, missing))}.")
        tensors |= {tensor: own[tensor] for tensor in expected}
    return tensors


def _read_shard(path: pathlib.Path) -> Any:
    with open(path, "rb") as stream:
        start = stream.read(9)
    return safetensors_files.read(path) if start[8:] == b"{" else torch_files.read(path)


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged or not JSON ({errors.reason(error)}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object, not {type(found).__name__}.")
    return found
