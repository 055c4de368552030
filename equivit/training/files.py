"""Files that are there whole or not at all."""

import pathlib


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file, in a directory that is made if need be; whoever is killed meanwhile leaves none or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
