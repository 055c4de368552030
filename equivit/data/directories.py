"""The source of class folders, and shared code of sources that read directories."""

import os
import pathlib
import stat
from collections.abc import Iterable
from typing import Any

import numpy as np

from equivit import errors

# Extensions of image files, and Pillow's names of their formats.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".pgm": "PPM", ".bmp": "BMP", ".webp": "WEBP"}
FORMATS |= {".tif": "TIFF", ".tiff": "TIFF"}
EXTENSIONS = tuple(FORMATS)
MAX_ASPECT = 100  # a longer strip, scaled until its short side fills a crop, would take gigabytes


class Files:
    """Base of a source of image files below a folder, with a label each or without.

    Attributes:
      folder: the folder.
      files: path of each file below it, as `array` stores it.
      labels: the index of each image's class, int32, or None.
    """

    classes: tuple[str, ...] = ()
    channels = 3
    folder: pathlib.Path
    files: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example: dict[str, Any] = {"image": content(pathlib.Path(self.where(index)))}
        return example if self.labels is None else {**example, "label": int(self.labels[index])}

    def where(self, index: int) -> str:
        return str(self.folder / os.fsdecode(self.files[index]))


class Folder(Files):
    """Image files in one folder per class, or without classes.

    Layout: `<directory>/<split>/<class>/<image>`, or `<directory>/<class>/<image>` without splits, which is read only
    as split `train` or `all`, to avoid testing on training images.  Classes are sorted by name, or as
    numbers if all names are numbers (ImageNet-v2).  They are taken from `class_split` if it exists, so that a test
    split without some classes has the same labels: put ImageNet-R next to ImageNet's training split.  Images without
    sibling folders, `<directory>/<split>/<image>` or `<directory>/<image>`, have no labels.
    """

    def __init__(self, directory: str, split: str, *, class_split: str):
        self.folder = root("folder", directory)
        found, reference = folders(self.folder), self.folder / class_split
        alone = not found and _images(self.folder)
        path = pathlib.PurePath(split)
        below = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
        if below and (self.folder / split).is_dir():
            self.folder /= split
        elif split not in ("train", "all") or not (alone or any(map(_images, found))):
            raise ValueError(
                f"folder:{directory}: there is no {self.folder}/{split}; folders: {_listed(found)}. Images belong in "
                "<split>/<class>/, or without splits in <class>/, which is read as split 'train'; images without "
                "classes belong in a folder without others."
            )
        found = folders(self.folder)
        if not found:
            self.files = array(_images(self.folder))
            return
        self.classes = tuple(folder.name for folder in (folders(reference) if reference.is_dir() else found))
        unknown = [folder for folder in found if folder.name not in self.classes]
        if unknown:
            raise ValueError(f"{self.folder}: classes that {reference} does not have: {_listed(unknown)}.")
        files = [(folder.name, file) for folder in found for file in _images(folder)]
        places = {name: place for place, name in enumerate(self.classes)}
        self.labels = np.array([places[name] for name, _ in files], np.int32)
        self.files = array([file for _, file in files])  # without their folders, which the labels give

    def where(self, index: int) -> str:
        folder = self.folder if self.labels is None else self.folder / self.classes[self.labels[index]]
        return str(folder / os.fsdecode(self.files[index]))


def expanded(path: str) -> pathlib.Path:
    """Expand a leading ~ to the home directory; without such a home it stays, as in a shell."""
    return pathlib.Path(os.path.expanduser(path))


def root(kind: str, directory: str) -> pathlib.Path:
    """The directory of a source; FileNotFoundError with the most similar name if it does not exist."""
    path = expanded(directory)
    if path.is_dir():
        return path
    neighbours = (folder.name for folder in folders(path.parent))
    hint = errors.nearest(path.name, neighbours) or "; set config.data.source to a directory that exists"
    raise FileNotFoundError(f"{kind}:{directory}: there is no directory {path}{hint}.")


def check_split(source: str, split: str, known: Iterable[str], more: str = ".") -> None:
    """ValueError unless `split` is one of the `known` splits of a source; `more` ends the message."""
    known = list(known)
    if split not in known:
        splits = errors.listed(map(errors.word, known)) or "none"
        raise ValueError(f"{source}: there is no split {split!r}; splits: {splits}{errors.nearest(split, known)}{more}")


def content(path: pathlib.Path) -> bytes:
    """The content of a regular file; reading a pipe could block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    return path.read_bytes()


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """ValueError for an image with more pixels than the config allows, or a long strip, before memory is allocated."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"it has {height} x {width} pixels; an image is at most {MAX_ASPECT} times as long as wide: crop it"
        )
    if width * height > max_pixels:
        raise ValueError(
            f"it has {height} x {width} = {height * width:,} pixels, more than config.data.max_pixels={max_pixels}; "
            "make it smaller, or raise this limit if memory allows"
        )


def text(path: pathlib.Path, errors: str = "strict") -> str:
    """The text of a file in UTF-8, with or without a byte-order mark.

    Raises:
      ValueError: it is not UTF-8, unless `errors` handles other bytes.
    """
    try:
        return path.read_bytes().decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it must be text in UTF-8 ({error}).") from error


def lines(content: str) -> list[str]:
    """The lines of a text, which end in \\n or \\r\\n; `str.splitlines` also splits at rarer characters."""
    parts = [line.removesuffix("\r") for line in content.split("\n")]
    return parts if parts[-1] else parts[:-1]


def folders(path: pathlib.Path) -> list[pathlib.Path]:
    """The visible folders in a folder, sorted by name, or as numbers if all names are numbers."""
    if not path.is_dir():
        return []
    found = [pathlib.Path(entry.path) for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != "."]
    by_name = {folder.name: folder for folder in found}
    return [by_name[name] for name in in_order(by_name)]


def in_order(names: Iterable[str]) -> list[str]:
    """Sort as numbers if all are numbers, 01 before 1, else as text; the order of `names` does not matter."""
    names = list(names)
    return sorted(names, key=lambda name: (int(name), name)) if all(map(str.isdecimal, names)) else sorted(names)


def names(where: str, classes: np.ndarray) -> tuple[str, ...]:
    """The names in an array of strings, or of bytes in UTF-8, else ValueError."""
    try:
        return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in classes.tolist())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be text in UTF-8 ({error}).") from error


def array(files: list[str]) -> np.ndarray:
    """File names as an array: even a million are sent to workers quickly."""
    return np.array([os.fsencode(file) for file in files], np.bytes_)


def is_image(path: str | os.PathLike) -> bool:
    """Whether a path names an image file by its ending; hidden ones, such as the metadata of macOS, are none."""
    name = os.path.basename(path)
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def _images(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if is_image(entry.name) and not entry.is_dir())


def _listed(paths: list[pathlib.Path]) -> str:
    return errors.listed(path.name for path in paths) or "none"
