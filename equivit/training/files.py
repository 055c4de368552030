"""Files that are there whole or not at all."""

import os
import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file, in a directory that is made if need be; whoever is killed meanwhile leaves none or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else a power cut after the renaming may leave an empty file
    unfinished.replace(path)
