"""Files that are there whole or not at all, and directories."""

import json
import os
import pathlib
from typing import Any


def make_directory(path: pathlib.Path) -> None:
    """Make a directory if it is not there; OSError, which names it, if that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"{path}: it, or what is before it, is a file; give a directory.") from error


def read_json(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The JSON object in a file; ValueError, which names the file, unless it is whole and has the keys."""
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        missing = [key for key in keys if key not in found]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged ({error}); remove it, and it is made again.") from error
    if missing:
        raise ValueError(f"{path}: is damaged, it has no {', '.join(missing)}; remove it, and it is made again.")
    return found


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file, in a directory that is made if need be; whoever is killed meanwhile leaves none or the old one."""
    make_directory(path.parent)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else a power cut after the renaming may leave an empty file
    unfinished.replace(path)
