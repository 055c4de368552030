"""The source of image folders with matching folders of label maps."""

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from equivit import errors
from equivit.data import directories
from equivit.data.label_maps import Legend

# fmt: off
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on


class Layout(NamedTuple):
    """Locations of the parts of a data set in its directory."""

    images: str
    maps: str
    list: str  # file of class names, or folder with a list of names per split


LAYOUTS = {
    "ADE20K": Layout("images", "annotations", "objectInfo150.txt"),
    "VOC2012": Layout("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"),
    "pairs": Layout("images", "labels", "classes.txt"),
}


class Pairs:
    """Images, each with a label map: a PNG file (grey or with a palette) of the same name.

    The folders determine the layout:
    - ADE20K as unpacked: `images/<split>/`, `annotations/<split>/` and `objectInfo150.txt`, with the splits `training`
      and `validation`.  Numbers 1 to 150 are classes; 0 means no class.
    - VOC2012 as unpacked: `JPEGImages/`, `SegmentationClass/` and `ImageSets/Segmentation/<split>.txt`.
    - any other data: `images/<split>/` and `labels/<split>/`, with the same subfolders if any, and `classes.txt`, whose
      first line names class 0.

    Args:
      void: numbers in the maps that mean "no class" (`data.void`).

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: an unknown layout or split, or images and maps that do not form pairs.
    """

    channels = 3

    def __init__(self, directory: str, split: str, *, void: tuple[int, ...]):
        root = directories.root("pairs", directory)
        kind = _kind(root)
        layout, names = LAYOUTS[kind], None
        self.images, self.maps = root / layout.images, root / layout.maps
        if kind == "VOC2012":
            splits = sorted(path.stem for path in (root / layout.list).glob("*.txt"))
        else:
            splits = [folder.name for folder in directories.folders(self.images)]
        directories.check_split(f"pairs:{directory}", split, splits)
        if kind == "VOC2012":
            names = directories.text(root / layout.list / f"{split}.txt").split()
            self.legend = Legend(VOC, void)
        else:
            self.images, self.maps = self.images / split, self.maps / split
            first, read = ((), _lines) if kind == "pairs" else (("other",), _object_info)
            self.legend = Legend((*first, *read(root / layout.list)), (0,) * len(first) + void)
        self.classes = self.legend.classes
        found = _paired(self.images, self.maps, names)
        self.files = np.array([[os.fsencode(file) for file in pair] for pair in found], np.bytes_)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, labels = self._paths(index)
        return {"image": directories.content(image), "map": directories.content(labels)}

    def where(self, index: int) -> str:
        return "{} with {}".format(*self._paths(index))

    def _paths(self, index: int) -> tuple[pathlib.Path, pathlib.Path]:
        image, labels = map(os.fsdecode, self.files[index])
        return self.images / image, self.maps / labels


def _kind(root: pathlib.Path) -> str:
    """The layout of a directory."""
    for kind, parts in LAYOUTS.items():
        if _has(root, parts):
            return kind
    inside = [folder for folder in directories.folders(root) for parts in LAYOUTS.values() if _has(folder, parts)]
    fix = f"take {inside[0]}" if inside else f"it has {errors.listed(sorted(os.listdir(root))) or 'nothing'}"
    ade, voc, other = (", ".join(parts) for parts in LAYOUTS.values())
    raise ValueError(f"pairs:{root}: it must have {other}, or {ade} (ADE20K), or {voc} (VOC2012); {fix}.")


def _has(folder: pathlib.Path, parts: Layout) -> bool:
    return all((folder / part).exists() for part in parts)


def _paired(images: pathlib.Path, maps: pathlib.Path, names: list[str] | None) -> list[tuple[str, str]]:
    """The files of each pair, relative to their folders, for the given names or all."""
    left, right = _files(images, directories.EXTENSIONS), _files(maps, (".png",))
    names = sorted(left.keys() | right.keys()) if names is None else names
    for kind, folder, found in (("image", images, left), ("label map", maps, right)):
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"{folder}: there is no {kind} {errors.shown(missing[0])}; {len(missing)} of {len(names)} are missing. "
                "An image and its label map, a PNG file, must have the same name."
            )
    return [(left[name], right[name]) for name in names]


def _files(folder: pathlib.Path, extensions: tuple[str, ...]) -> dict[str, str]:
    """The files with these extensions, by relative path without the extension."""
    found = {}
    for place, _, files in os.walk(folder):
        for name in files:
            stem, extension = os.path.splitext(os.path.relpath(os.path.join(place, name), folder))
            if extension.lower() not in extensions or name.startswith("."):
                continue
            if stem in found:
                raise ValueError(f"{folder}: {found[stem]} and {stem}{extension} have the same name; keep one of them.")
            found[stem] = stem + extension
    return found


def _lines(path: pathlib.Path) -> list[str]:
    """The names in a file, one per line."""
    names = [line.strip() for line in directories.lines(directories.text(path).rstrip())]
    if not names or not all(names):
        raise ValueError(f"{path}: it must have one class name per line, class 0 first.")
    return names


def _object_info(path: pathlib.Path) -> list[str]:
    """The first of ADE20K's names for each class."""
    rows = [line.split("\t") for line in directories.lines(directories.text(path))[1:] if line.strip()]
    if not rows or any(len(row) != 5 for row in rows):
        raise ValueError(f"{path}: it must have the columns Idx, Ratio, Train, Val and Name, with tabs between them.")
    return [row[-1].split(",")[0].strip() for row in rows]
