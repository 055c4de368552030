"""The source of Hugging Face data sets, by its library `datasets` (an extra)."""

import importlib
import pathlib
import re
from typing import Any

import numpy as np

from equivit import errors
from equivit.data import directories

INSTALL = 'python -m pip install "datasets>=4,<6"'
PLACE = re.compile(r"(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<subset>[\w.-]+))?(?:@(?P<revision>[^@]+))?")
SAVED = ("dataset_dict.json", "state.json")  # of DatasetDict.save_to_disk and Dataset.save_to_disk


class Hub:
    """A data set with a column of images and at most one of classes, read by random access from Arrow files.

    `name` is a repository of the Hub, `ORG/NAME`, `ORG/NAME/SUBSET` or either with `@REVISION`, or a local folder:
    one of `save_to_disk`, or of Parquet or image files.  A split may be a slice, `train[:1%]`, but not of a folder of
    `save_to_disk`.  Of several columns of classes, the one called "label" is taken.  The library keeps downloads in its
    cache, which alone is read with HF_HUB_OFFLINE=1 or HF_DATASETS_OFFLINE=1.

    Raises:
      ValueError: the library is not installed, the data set or split cannot be loaded, or it has other columns.
    """

    def __init__(self, name: str, split: str):
        self.name, self.split, where = name, split, f"hf:{name}"
        library = _library(where)
        data = _loaded(library, where, name, split)
        features = data.features
        self.image = _only(where, "images", [key for key, kind in features.items() if isinstance(kind, library.Image)])
        self.channels = 1 if features[self.image].mode in ("L", "1", "I;16") else 3
        self.label = _label(where, features, library.ClassLabel)
        self.data = data.select_columns([self.image] if self.label is None else [self.image, self.label])
        self.data = self.data.cast_column(self.image, library.Image(decode=False))
        self.classes: tuple[str, ...] = () if self.label is None else tuple(features[self.label].names)
        self.labels = None if self.label is None else np.asarray(data.with_format("numpy")[self.label][:], np.int32)
        if self.labels is not None and (missing := int((self.labels < 0).sum())):
            if missing < len(self.labels):
                raise ValueError(f"{where}: {missing} of {len(self.labels)} images of split {split!r} have no label.")
            self.classes, self.labels = (), None  # test splits of competitions have -1 throughout

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = self.data[index][self.image]
        content = directories.content(pathlib.Path(file["path"])) if file["bytes"] is None else file["bytes"]
        return {"image": content} if self.labels is None else {"image": content, "label": int(self.labels[index])}

    def where(self, index: int) -> str:
        return f"hf:{self.name} {self.split}[{index}]"


def _library(where: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"{where}: the library datasets is not installed ({errors.reason(error)}); {INSTALL} installs it."
        ) from error


def _loaded(library: Any, where: str, name: str, split: str) -> Any:
    """The split, from a local folder or from the Hub."""
    folder = directories.expanded(name)
    if folder.is_dir() and any((folder / file).is_file() for file in SAVED):
        data = _called(where, library.load_from_disk, str(folder))
        parts = data if isinstance(data, dict) else {"train": data}
        directories.check_split(where, split, parts)
        return parts[split]
    if folder.is_dir():
        return _called(where, library.load_dataset, str(folder), split=split)
    if name.startswith(("/", "~", ".")):
        raise FileNotFoundError(f"{where}: there is no folder {folder}{errors.nearest_path(folder)}.")
    if (place := PLACE.fullmatch(name)) is None:
        raise ValueError(f"{where} must be a folder, hf:ORG/NAME, hf:ORG/NAME/SUBSET or hf:ORG/NAME@REVISION.")
    options = dict(name=place["subset"], revision=place["revision"], split=split)
    return _called(where, library.load_dataset, place["repository"], **options)


def _called(where: str, load: Any, *arguments: Any, **options: Any) -> Any:
    """The result of a function of the library; its errors become one line with the source."""
    try:
        return load(*arguments, **options)
    except Exception as error:  # of the network, its cache, files and names, each of a type of its own
        raise ValueError(f"{where}: cannot be loaded ({errors.reason(error)}).") from error


def _label(where: str, features: Any, kind: type) -> str | None:
    """The column of classes; None if there is none."""
    found = [key for key, each in features.items() if isinstance(each, kind)]
    if "label" in features and "label" not in found:
        raise ValueError(
            f"{where}: the column 'label' is {features['label']}, without names of classes; save the data set after "
            "class_encode_column('label')."
        )
    return "label" if "label" in found else _only(where, "classes", found) if found else None


def _only(where: str, what: str, found: list[str]) -> str:
    if len(found) != 1:
        listed = errors.listed(map(errors.word, found)) or "none"
        raise ValueError(f"{where}: must have one column of {what}, not {listed}; keep one with select_columns.")
    return found[0]
