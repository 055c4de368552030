"""The source of tar shards as the library webdataset reads them; an index of all members allows random access."""

import functools
import glob
import itertools
import json
import os
import pathlib
import re
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from equivit import errors
from equivit.data import directories

SPLIT = "{split}"  # placeholder for the split in a pattern
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")  # {000..127}: all numbers, with the digits of the first
LABELS = {"cls": 100, "json": 1_000_000}  # extensions with a label, and the most bytes of such a file
NAMES = "classes.txt"
MOST_CLASSES = 1_000_000


class Index(NamedTuple):
    """The samples of some shards, in their order.

    Attributes:
      shard: the number of the shard, int32 [N].
      place: where the image begins in it, and its bytes, int64 [N, 2].
      keys: the name of the sample, as `directories.array` stores it.
      labels: the text of the label, or None.
    """

    shard: np.ndarray
    place: np.ndarray
    keys: np.ndarray
    labels: tuple[str | None, ...]


class WebDataset:
    """Images in tar files, `webdataset:PATTERN`.

    A sample is consecutive files with the same path up to the first dot of its last part: an image, and for its label
    a number or a name in `.cls`, or the entry "label" in `.json`; other files are skipped.  The pattern is a path with
    `{split}` for the split, `{000..127}` for numbers, and `*`; without `{split}` it is read as split `train` or `all`.

    If all labels are numbers, a file `classes.txt` beside the shards may name them, class 0 in its first line.  Else
    classes are sorted by name.  Both are taken from the shards of `class_split` if there are any.

    Raises:
      FileNotFoundError: there is no such shard.
      ValueError: a shard is damaged or compressed, or a sample has no image or label; the message names it.
    """

    channels = 3

    def __init__(self, pattern: str, split: str, *, class_split: str):
        where = f"webdataset:{pattern}"
        if SPLIT not in pattern and split not in ("train", "all"):
            raise ValueError(f"{where}: there is no split {split!r}; {SPLIT} in the pattern stands for the split.")
        self.shards = shards(pattern.replace(SPLIT, split))
        missing = [name for name in self.shards or [pattern.replace(SPLIT, split)] if not os.path.isfile(name)]
        if missing:
            raise FileNotFoundError(f"{where}: there is no shard {missing[0]}; * stands for any names.")
        self.shard, self.place, self.keys, labels = indexed(self.shards)
        self.classes: tuple[str, ...] = ()
        self.labels: np.ndarray | None = None
        if not any(labels):
            return
        if None in labels:
            raise ValueError(f"{self.where(labels.index(None))} has no label, and other samples have one.")
        reference = shards(pattern.replace(SPLIT, class_split))
        reference = reference if reference and all(map(os.path.isfile, reference)) else self.shards
        self.classes, places = _classes(pathlib.Path(reference[0]).parent / NAMES, set(indexed(reference).labels))
        if (unknown := next((i for i, label in enumerate(labels) if label not in places), None)) is not None:
            raise ValueError(
                f"{self.where(unknown)}: the label {errors.shown(labels[unknown])} is not one of the "
                f"{len(places)} classes{errors.nearest(labels[unknown], places)}."
            )
        self.labels = np.array([places[label] for label in labels], np.int32)

    def __len__(self) -> int:
        return len(self.shard)

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, size = map(int, self.place[index])
        with open(self.shards[self.shard[index]], "rb") as file:
            file.seek(begin)
            example: dict[str, Any] = {"image": file.read(size)}
        return example if self.labels is None else {**example, "label": int(self.labels[index])}

    def where(self, index: int) -> str:
        return f"{self.shards[self.shard[index]]}: {os.fsdecode(self.keys[index])}"


def shards(pattern: str) -> tuple[str, ...]:
    """The names of a pattern, in the order of its numbers, then of the files that a * finds."""
    first, *rest = re.split(RANGE, os.path.expanduser(pattern))
    names = [first]
    for begin, end, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        numbers = [str(number).zfill(len(begin)) for number in range(int(begin), int(end) + 1)]
        names = [name + number + text for name in names for number in numbers]
    found = []
    for name in names:
        found += sorted(glob.glob(glob.escape(name).replace("[*]", "*"))) if "*" in name else [name]
    return tuple(found)


@functools.lru_cache(maxsize=4)  # a split may also be the one that gives the classes
def indexed(names: tuple[str, ...]) -> Index:
    """The samples of shards.  Reads the headers and labels, not the images."""
    parts = [_of_shard(number, name) for number, name in enumerate(names)]
    shard, place, keys, labels = zip(*parts, strict=True)
    return Index(*(np.concatenate(each) for each in (shard, place, keys)), labels=tuple(itertools.chain(*labels)))


def _of_shard(number: int, name: str) -> Index:
    try:
        with tarfile.open(name, "r:") as file:
            groups = itertools.groupby(_files(file), key=lambda member: _parts(member.name)[0])
            samples = [(key, *_sample(name, key, file, list(members))) for key, members in groups]
            _check_end(file)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(
            f"{name}: it must be a whole tar file, without compression, which allows no random access "
            f"({errors.reason(error)})."
        ) from error
    keys, places, labels = zip(*samples, strict=True) if samples else ((), (), ())
    place = np.array(places, np.int64).reshape(-1, 2)
    return Index(np.full(len(keys), number, np.int32), place, directories.array(list(keys)), labels)


def _check_end(file: tarfile.TarFile) -> None:
    """TarError unless zeros follow the last member: `tarfile` also stops, silently, at a damaged or missing header."""
    assert file.fileobj is not None
    file.fileobj.seek(file.offset)
    block = file.fileobj.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        what = "is cut off" if len(block) < tarfile.BLOCKSIZE else "has a damaged header"
        raise tarfile.TarError(f"it {what} at byte {file.offset}")


def _files(file: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    regular = (each for each in file if each.isreg() and not each.issparse())
    return (each for each in regular if not os.path.basename(each.name).startswith("."))


def _parts(name: str) -> tuple[str, str]:
    """The key and the extension: "a.b/c.seg.png" -> "a.b/c", "seg.png"."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension.lower()


def _sample(
    name: str, key: str, file: tarfile.TarFile, members: list[tarfile.TarInfo]
) -> tuple[tuple[int, int], str | None]:
    """The place of the image and the label of a sample."""
    by_kind = {_parts(member.name)[1]: member for member in members}
    images = [member for kind, member in by_kind.items() if f".{kind}" in directories.EXTENSIONS]
    if len(images) != 1 or len(by_kind) < len(members):
        kinds = ", ".join(sorted(_parts(member.name)[1] for member in members))
        raise ValueError(f"{name}: {key} must have one image, and one file of an extension, not: {kinds}.")
    kind = next((kind for kind in LABELS if kind in by_kind), None)
    label = None if kind is None else _label(f"{name}: {by_kind[kind].name}", kind, file, by_kind[kind])
    return (images[0].offset_data, images[0].size), label


def _label(where: str, kind: str, file: tarfile.TarFile, member: tarfile.TarInfo) -> str | None:
    """The text of a label; whole numbers without leading zeros."""
    if member.size > LABELS[kind]:
        raise ValueError(f"{where} has {member.size:,} bytes; a label has at most {LABELS[kind]:,}.")
    content: Any = file.extractfile(member)
    try:
        text = content.read().decode().strip()
        label = json.loads(text).get("label") if kind == "json" else text
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is no label ({errors.reason(error)}).") from error
    if label is None:
        return None
    if isinstance(label, bool) or not isinstance(label, int | str) or not str(label):
        raise ValueError(f"{where}: the label {errors.shown(label)} must be the number of a class or its name.")
    return str(int(label)) if str(label).isdecimal() else str(label)


def _classes(file: pathlib.Path, labels: set[str | None]) -> tuple[tuple[str, ...], dict[str | None, int]]:
    """The names of the classes, and the class of each label."""
    known = [label for label in labels if label is not None]
    if not all(map(str.isdecimal, known)):
        names = sorted(known)
        return tuple(names), {name: place for place, name in enumerate(names)}
    if file.is_file():
        names = [line.strip() for line in directories.lines(directories.text(file)) if line.strip()]
    elif (number := max(map(int, known), default=-1) + 1) <= MOST_CLASSES:
        names = [str(place) for place in range(number)]
    else:
        raise ValueError(f"{file.parent}: {number:,} classes are more than {MOST_CLASSES:,}.")
    return tuple(names), {str(place): place for place in range(len(names))}
