"""The source of a TensorFlow Datasets data set, prepared as array_record."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from equivit import errors
from equivit.data import directories
from equivit.data.label_maps import Legend

_INSTANCES = (
    "TFDS prepares maps of 100 kinds of objects (in red) and of instances (in green), not of the 150 classes; "
    "unpack ADEChallengeData2016.zip and use data.source='pairs:<dir>'."
)
OF_TFDS = "tensorflow_datasets.core.features."  # module prefix of its features
CLASS_KEYS = ("pythonClassName", "python_class_name", "type")  # keys in features.json, current and former
MOST_CLASSES = 1_000_000  # ImageNet-21k has 21,841


class Tfds:
    """A TFDS data set with features `image` and `label`, prepared as array_record; TensorFlow is not needed.

    Two other features may replace `label`.  `real_label` holds any number of classes, all of them correct
    (imagenet2012_real).  `annotation` holds label maps of ADE20K, where 1 to 150 are classes and 0 means no class
    (scene_parse150, prepared from the scene-parsing maps; TFDS prepares instance maps, which are rejected).

    `name` is `<name>`, `<name>/<config>` or either with `:<version>`; without a version, the newest prepared one is
    used.  The directory is the environment variable TFDS_DATA_DIR, or ~/tensorflow_datasets.  A split may be a slice in
    TFDS syntax: `train[:1%]`.

    Raises:
      FileNotFoundError: nothing is prepared under this name.
      ValueError: an unknown split, other features, or a damaged file.
    """

    def __init__(self, name: str, split: str, *, void: tuple[int, ...]):
        import tensorflow_datasets as tfds  # slow to import, and only needed here

        self.name, self.split, self.folder = name, split, _prepared(name)
        _check_classes(self.folder / "features.json")
        with _damage(self.folder):
            builder: Any = tfds.builder_from_directory(self.folder)
            features, form = dict(builder.info.features.items()), builder.info.file_format.value
        self.label = next((key for key in ("label", "real_label") if key in features), None)
        files = ("image", "annotation") if self.label is None else ("image",)
        if not all(key in features for key in files):
            found = errors.listed(map(errors.word, sorted(features)))
            raise ValueError(f"tfds:{name}: features {found} must include 'image' and 'label' ({self.folder}).")
        with _damage(self.folder):
            kind, channels = np.dtype(features["image"].np_dtype), [features[key].shape[-1] for key in files]
        if kind not in (np.uint8, np.uint16):
            raise ValueError(
                f"tfds:{name}: images are {kind}, whose range is unknown; they must be uint8 or uint16: prepare the "
                f"data set with images scaled to one of these ({self.folder})."
            )
        if form != "array_record":
            raise ValueError(
                f"tfds:{name}: {self.folder} holds {form} files, which need TensorFlow; prepare it as array_record: "
                f"{_command(name)}"
            )
        try:
            builder.info.splits[split]  # by name, or sliced
        except Exception:  # for an unknown name or an invalid expression
            directories.check_split(f"tfds:{name}", split, sorted(builder.info.splits), f" ({self.folder}).")
        with _damage(self.folder):
            self.data = builder.as_data_source(split, decoders={key: tfds.decode.SkipDecoding() for key in files})
            len(self.data)
        self.channels = channels[0] or 3
        if self.label is None:
            if channels[1] != 1:
                raise ValueError(f"tfds:{name}: {_INSTANCES}")
            self.legend = Legend(("other", *map(str, range(1, 151))), (0, *void))  # TFDS does not have the names
            self.classes = self.legend.classes
            return
        self.label_sets = isinstance(features[self.label], tfds.features.Sequence)
        with _damage(self.folder):
            label = features[self.label].feature if self.label_sets else features[self.label]
            if label.num_classes > MOST_CLASSES:
                raise ValueError(f"{label.num_classes:,} classes are more than {MOST_CLASSES:,}")
            self.classes = tuple(label.names)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.data[index]
        if self.label is None:
            return {"image": example["image"], "map": example["annotation"]}
        label = example[self.label]
        return {"image": example["image"], "label": tuple(map(int, label)) if self.label_sets else int(label)}

    def where(self, index: int) -> str:
        return f"tfds:{self.name} {self.split}[{index}] ({self.folder})"


@contextlib.contextmanager
def _damage(folder: pathlib.Path) -> Iterator[None]:
    """Add the directory to the errors of TFDS and its libraries on damaged files."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{folder}: its features.json, dataset_info.json or records are damaged or not from TFDS "
            f"({errors.reason(error)})."
        ) from error


def _check_classes(path: pathlib.Path) -> None:
    """ValueError unless features.json names only TFDS features: TFDS imports the module of any name."""
    try:
        left = [json.loads(path.read_bytes())]
        while left:
            value = left.pop()
            entries = list(value.items()) if isinstance(value, dict) else [("", item) for item in value]
            for key, item in entries:
                if key in CLASS_KEYS and isinstance(item, str) and not item.startswith(OF_TFDS):
                    raise ValueError(f"{errors.shown(item)} is not a TFDS feature, and no other module is imported")
                nested = json.loads(item) if key == "json" and isinstance(item, str) else item
                left += [nested] if isinstance(nested, dict | list) else []
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged or not from TFDS ({errors.reason(error)}).") from error


def _prepared(name: str) -> pathlib.Path:
    """The directory of the newest prepared version of `name`."""
    folder = _data_dir() / name.replace(":", "/")
    versions = [path for path in (folder, *directories.folders(folder)) if (path / "features.json").is_file()]
    if not versions and name.partition(":")[0] == "scene_parse150":
        raise FileNotFoundError(f"tfds:{name}: nothing prepared in {folder}; {_INSTANCES}")
    if not versions:
        raise FileNotFoundError(f"tfds:{name}: nothing prepared in {folder}. Prepare it once: {_command(name)}")
    return max(versions, key=lambda path: [int(part) for part in path.name.split(".") if part.isdigit()])


def _data_dir() -> pathlib.Path:
    return directories.expanded(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets"))


def _command(name: str) -> str:
    return f"tfds build {name} --file_format=array_record --data_dir={_data_dir()} (needs TensorFlow; docs/data.md)"
