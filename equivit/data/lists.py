"""Sources in text files: on each line the path of an image, or a path and a label."""

import csv
import os
import pathlib
from typing import NamedTuple

import numpy as np

from equivit import errors
from equivit.data import directories

SPLIT = "{split}"  # placeholder for the split in a file name


class Line(NamedTuple):
    """The content of one line."""

    number: int
    path: str
    label: str = ""


class Paths(directories.Files):
    """Images without labels: a `.txt` file with a path on each line; empty lines are skipped.

    Paths are relative to the folder of the file.  One file is split `train` or `all`; `lists/{split}.txt` names a file
    for each split.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: an unknown split, or a line that is not the path of an image; the message has the file and line.
    """

    def __init__(self, name: str, split: str):
        file = _file(f"list:{name}", name, split)
        lines = [Line(number, line.strip()) for number, line in enumerate(_lines(file), 1) if line.strip()]
        self._keep(file, lines)

    def _keep(self, file: pathlib.Path, lines: list[Line]) -> None:
        for line in lines:
            if not line.path.lower().endswith(directories.EXTENSIONS):
                raise ValueError(
                    f"{file}, line {line.number}: {errors.shown(line.path)} must be the path of an image, which ends "
                    f"in one of {', '.join(directories.EXTENSIONS)}."
                )
        self.folder = file.parent
        self.files = directories.array([line.path for line in lines])


class Table(Paths):
    """Images with labels: a `.csv` file with the columns path and label, with a header or without.

    Classes are sorted by name, or as numbers if all names are numbers.  They are taken from the file of `class_split`
    if it exists, so that a test split without some classes has the same labels.  Otherwise as `Paths`.

    Raises:
      ValueError: also for a line without two columns, or a class that `class_split` does not have.
    """

    def __init__(self, name: str, split: str, *, class_split: str):
        file = _file(f"csv:{name}", name, split)
        lines, reference = _rows(file), pathlib.Path(_of_split(name, class_split))
        known = _rows(reference) if reference != file and reference.is_file() else lines
        self._keep(file, lines)
        self.classes = tuple(directories.in_order({line.label for line in known}))
        places = {label: place for place, label in enumerate(self.classes)}
        if unknown := next((line for line in lines if line.label not in places), None):
            what, near = errors.shown(unknown.label), errors.nearest(unknown.label, self.classes)
            raise ValueError(f"{file}, line {unknown.number}: the class {what} is not in {reference}{near}.")
        self.labels = np.array([places[line.label] for line in lines], np.int32)


def _file(source: str, name: str, split: str) -> pathlib.Path:
    """The file of a split."""
    if SPLIT not in name and split not in ("train", "all"):
        stem, extension = os.path.splitext(source)
        raise ValueError(
            f"{source}: there is no split {split!r}; one file is split 'train'. A file for each split is named with "
            f"{SPLIT}, as {os.path.dirname(stem) or stem}/{SPLIT}{extension}."
        )
    file = pathlib.Path(_of_split(name, split))
    if not file.is_file():
        raise FileNotFoundError(f"{source}: there is no file {file}{errors.nearest_path(file)}.")
    return file


def _of_split(name: str, split: str) -> str:
    return os.path.expanduser(name.replace(SPLIT, split))


def _rows(file: pathlib.Path) -> list[Line]:
    """The lines of a table without its header."""
    reader = csv.reader(_lines(file))
    try:
        found = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: it is not a line of a table ({error}).") from error
    if found and _is_header(found[0][1]):
        found = found[1:]
    for number, row in found:
        if len(row) != 2 or not row[1]:
            raise ValueError(f"{file}, line {number}: {errors.shown(','.join(row))} must be a path and a label.")
    return [Line(number, *row) for number, row in found]


def _is_header(row: list[str]) -> bool:
    """Whether a row names columns: it has no path of an image, and no ending of a file in the first column."""
    return not os.path.splitext(row[0])[1] and not any(cell.lower().endswith(directories.EXTENSIONS) for cell in row)


def _lines(file: pathlib.Path) -> list[str]:
    return directories.lines(directories.text(file, "surrogateescape"))  # file names may be any bytes
