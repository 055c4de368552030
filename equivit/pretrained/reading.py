"""Reading files of named tensors as a state dict, from any container and without wrapped names, and writing them."""

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from equivit import archives, errors, files, safetensors_files
from equivit.pretrained import torch_files

CONTAINERS = ("model", "teacher", "state_dict", "model_state")
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")  # torch.compile, DDP, FSDP
DINOV2_HEADS = (r"^(dino|ibot)_head\.",)  # of self-supervised training
COUNTS = (r"\.num_batches_tracked$",)  # of batch norms


def unwrapped(name: str, wrappers: tuple[str, ...] = WRAPPERS) -> str:
    """`module._orig_mod.norm.weight` -> `norm.weight`."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def unchunked(name: str) -> str:
    """Also remove the prefix and the chunks of DINOv2's training: `backbone.blocks.1.7.norm1` -> `blocks.7.norm1`.

    A chunk is a run of blocks that FSDP shards together; the second number counts blocks across chunks.
    """
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", unwrapped(name, (*WRAPPERS, "backbone")))


def brief(names: Iterable[str]) -> str:
    """Names in one line: "cls_token.1-4" for a range of final numbers, "blocks.*.mask (12)" for numbers inside."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stem, dot, number = name.rpartition(".")
        if not (dot and number.isdecimal()):
            stem, number = name, ""
        stems.setdefault(stem, []).extend([number] if number else [])
    runs = {stem: f".{n[0]}-{n[-1]}" if len(n) > 1 else "".join(f".{i}" for i in n) for stem, n in stems.items()}
    alike: dict[str, list[str]] = {}
    for stem, run in runs.items():
        alike.setdefault(re.sub(r"\d+", "*", stem) + run, []).append(stem + run)
    return ", ".join(same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in alike.items())


def read(path: str | os.PathLike) -> Any:
    """Read a .safetensors, .npz or .pth file, with tensors as numpy arrays; code in a file never runs.

    Raises:
      FileNotFoundError: there is no such file.
      IsADirectoryError: it is a directory.
      ValueError: another ending, a damaged file, an unsupported type of tensors, or memory out of proportion to the
        file or not available.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path}: this is a directory; give the file of weights in it, which ends in one of {', '.join(_READERS)}."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    if path.suffix not in _READERS:
        raise ValueError(f"{path}: the ending {path.suffix!r} is not one of {', '.join(_READERS)}.")
    try:
        return _READERS[path.suffix](path)
    except MemoryError as error:
        raise ValueError(f"{path}: its tensors do not fit into this machine's memory ({error}).") from error


def content(weights: Any) -> Any:
    """The content of a file, given its path, or the given content."""
    return read(weights) if isinstance(weights, str | os.PathLike) else weights


def write(path: str | pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write named tensors as .safetensors or .npz, atomically.

    Args:
      metadata: texts by name; not stored in .npz files.

    Raises:
      ValueError: another ending.
      OSError: the file cannot be written.
    """
    path = pathlib.Path(path)
    if path.suffix == ".safetensors":
        safetensors_files.write(path, tensors, metadata)
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = dict(tensors)
        with files.replacing(path) as unfinished:
            np.savez(unfinished, **arrays)
    else:
        raise ValueError(f"{path}: weights are written as .safetensors or .npz, not as {path.suffix!r}.")


def unpacked(content: Any, key: str | None = None) -> tuple[Any, str]:
    """The named tensors in a checkpoint, and the chosen entry if others have the same tensors: "'model', not 'ema'".

    Nested `CONTAINERS` are unwrapped.

    Args:
      key: the entry to take, at any depth, such as "state_dict_ema"; None: the first of `CONTAINERS`.

    Raises:
      ValueError: there is no such entry.
    """
    seen, known, choice = set(), [], ""
    while isinstance(content, Mapping) and id(content) not in seen:  # content may contain itself
        seen.add(id(content))
        inside = {name: value for name, value in content.items() if isinstance(value, Mapping)}
        known += inside
        taken = key if key in inside else next((name for name in CONTAINERS if name in inside), None)
        if taken is None:
            break
        if key is None and (others := [name for name in inside if name != taken and _alike(inside, name, taken)]):
            choice = f"{taken!r}, not {errors.listed(map(errors.shown, others))}"
        content, key = inside[taken], None if taken == key else key
    if key is not None:
        raise ValueError(
            f"weights: checkpoint_key={errors.shown(key)} is not an entry with tensors; the file has "
            f"{errors.listed(map(errors.shown, known)) or 'none'}{errors.nearest(key, known)}."
        )
    return content, choice


def _alike(inside: Mapping[str, Mapping], other: str, taken: str) -> bool:
    """Whether another entry has half of the chosen entry's tensors, as averaged weights do."""
    theirs, ours = (
        {unwrapped(str(name)) for name, value in inside[entry].items() if hasattr(value, "shape")}
        for entry in (other, taken)
    )
    return bool(ours) and 2 * len(theirs & ours) >= len(ours)


def state_dict(
    content: Any, rename: Callable[[str], str] = unwrapped, ignored: tuple[str, ...] = ()
) -> tuple[dict[str, np.ndarray], list[str]]:
    """A model's tensors without containers, and the names of dropped tensors.

    Containers are {"model": ...}, {"teacher": ...}, {"state_dict": ...} and {"model_state": ...}.  `rename` and
    `ignored` are attributes of the format (`format.py`).

    Raises:
      ValueError: no tensors, something that is not a tensor of numbers, or two tensors of one name.
    """
    content, _ = unpacked(content)
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"weights: expected named tensors, found {type(content).__name__} without any.")
    tensors, left_out = {}, []
    for name, value in content.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise ValueError(f"weights: {errors.shown(name)} is {type(value).__name__}, not a tensor.")
        if not name.isprintable():
            raise ValueError(f"weights: a tensor is named {errors.shown(name)}, which cannot be printed.")
        short = rename(name)
        if any(re.search(pattern, short) for pattern in ignored):
            left_out.append(short)
        elif short in tensors:
            raise ValueError(f"weights: two tensors are named {short!r} after removing wrappers, such as {name!r}.")
        else:
            tensors[short] = np.asarray(value)
            if not jnp.issubdtype(tensors[short].dtype, np.number) and tensors[short].dtype != bool:
                raise ValueError(f"weights: {errors.shown(name)} is of type {tensors[short].dtype}, not of numbers.")
    return tensors, left_out


def _read_npz(path):
    with archives.Npz(path) as file:
        return {key: file[key] for key in file.keys}


_READERS = {
    ".safetensors": safetensors_files.read,
    ".npz": _read_npz,
    ".pth": torch_files.read,
    ".pt": torch_files.read,
    ".pyth": torch_files.read,
}
