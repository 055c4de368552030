"""State dicts: named tensors without containers, wrappers and prefixes; and writing them."""

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from equivit import errors, files, safetensors_files
from equivit.pretrained.places import read

# Entries of checkpoints that hold weights; earlier ones are preferred.
CONTAINERS = ("model", "teacher", "state_dict", "model_state", "model_state_dict", "net", "network", "weights")
CONTAINERS += ("module", "params", "student", "model_ema", "state_dict_ema", "ema_state_dict", "ema")
PREFERRED = {"teacher", "ema", "model_ema", "params"}  # prefixes of the preferred ones among several sets of weights
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

    Nested `CONTAINERS` are unwrapped.  If there is none, so is the only entry with tensors.

    Args:
      key: the entry to take, at any depth, such as "state_dict_ema"; None: the first of `CONTAINERS`.

    Raises:
      ValueError: there is no such entry, or it has no named tensors.
    """
    seen, known, choice = set(), [], ""
    while isinstance(content, Mapping) and id(content) not in seen:  # content may contain itself
        seen.add(id(content))
        inside = {name: value for name, value in content.items() if isinstance(value, Mapping)}
        known += inside
        taken = key if key in inside else _container(content, inside)
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
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"weights: expected named tensors, found {type(content).__name__} without any.")
    return content, choice


def _container(content: Mapping, inside: Mapping[str, Mapping]) -> str | None:
    """The entry that holds the weights; None if the content holds them itself, or no entry does."""
    if (known := next((name for name in CONTAINERS if name in inside), None)) is not None:
        return known
    filled = [name for name, value in inside.items() if any(hasattr(entry, "shape") for entry in value.values())]
    return filled[0] if len(filled) == 1 and not any(hasattr(entry, "shape") for entry in content.values()) else None


def _alike(inside: Mapping[str, Mapping], other: str, taken: str) -> bool:
    """Whether another entry has half of the chosen entry's tensors, as averaged weights do."""
    theirs, ours = (
        {unwrapped(str(name)) for name, value in inside[entry].items() if hasattr(value, "shape")}
        for entry in (other, taken)
    )
    return bool(ours) and 2 * len(theirs & ours) >= len(ours)


def state_dict(
    content: Any, rename: Callable[[str], str] = unwrapped, ignored: tuple[str, ...] = (), mark: str = ""
) -> tuple[dict[str, np.ndarray], list[str]]:
    """A model's tensors without containers and prefixes, and the names of dropped tensors.

    Containers are `CONTAINERS`.  A prefix is whatever precedes the `mark` in a name, such as "student.backbone.".
    `rename`, `ignored` and `mark` are attributes of the format (`format.py`).

    Raises:
      ValueError: no tensors, something that is not a tensor of numbers, or two tensors of one name.
    """
    content, _ = unpacked(content)
    names = _unprefixed([str(name) for name in content], rename, mark)
    tensors, left_out = {}, []
    for name, value in content.items():
        if not isinstance(name, str) or not hasattr(value, "shape"):
            raise ValueError(f"weights: {errors.shown(name)} is {type(value).__name__}, not a tensor.")
        if not name.isprintable():
            raise ValueError(f"weights: a tensor is named {errors.shown(name)}, which cannot be printed.")
        if (short := names[name]) is None:
            left_out.append(name)
        elif any(re.search(pattern, short) for pattern in ignored):
            left_out.append(short)
        elif short in tensors:
            raise ValueError(f"weights: two tensors are named {short!r} after removing wrappers, such as {name!r}.")
        else:
            tensors[short] = np.asarray(value)
            if not jnp.issubdtype(tensors[short].dtype, np.number) and tensors[short].dtype != bool:
                raise ValueError(f"weights: {errors.shown(name)} is of type {tensors[short].dtype}, not of numbers.")
    return tensors, left_out


def is_marked(content: Any, rename: Callable[[str], str], mark: str) -> bool:
    """Whether a renamed name matches the `mark` of a format, perhaps after a prefix; arguments as in `state_dict`."""
    return bool(_prefixes(map(rename, map(str, unpacked(content)[0])), mark))


def _prefixes(names: Iterable[str], mark: str) -> list[str]:
    """The different prefixes of names that match the mark; "" is a name without one."""
    found = (re.fullmatch(rf"(.*?\.)?(?:{mark})", name) for name in names) if mark else ()
    return list(dict.fromkeys(match[1] or "" for match in found if match))


def _unprefixed(names: list[str], rename: Callable[[str], str], mark: str) -> dict[str, str | None]:
    """The renamed names without their prefix, by name; None for tensors of another set of weights.

    Several sets are, for example, "student." and "teacher."; the choice is printed.
    """
    short = {name: rename(name) for name in names}
    if not (prefixes := _prefixes(short.values(), mark)):
        return dict(short)
    preferred = [prefix for prefix in prefixes if PREFERRED & set(prefix.split("."))]
    chosen = "" if "" in prefixes else (preferred or prefixes)[0]
    others = [_differing(prefix, chosen) for prefix in prefixes if prefix != chosen]
    if others:
        print(f"weights: several sets of weights; using {chosen!r}, not {errors.listed(map(errors.shown, others))}.")
    words = chosen.split(".")[:-1]
    return {
        name: None if any(key.startswith(other) for other in others) else _without(key, words)
        for name, key in short.items()
    }


def _differing(prefix: str, chosen: str) -> str:
    """The start of a prefix, up to the first word that the chosen one does not have: "student." of "student.net."."""
    same = os.path.commonprefix([prefix.split("."), chosen.split(".")])
    return ".".join(prefix.split(".")[: len(same) + 1]) + "."


def _without(name: str, words: list[str]) -> str:
    """A name without the leading words that it shares with a prefix."""
    parts = name.split(".")
    return ".".join(parts[len(os.path.commonprefix([parts[:-1], words])) :])
