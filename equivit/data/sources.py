"""Images by random access: digits, synthetic discs, `.npz` files, class folders, TFDS directories.

A source is one split, and an example is a dict.  `reading.py` decodes two of its entries: "image", a uint8 array
[H, W, C] or the bytes of an image file, and "map", the label of each pixel, an integer array [H, W] or the bytes of a
PNG file.  Other entries reach the transform unchanged: "label" is an int or, if examples may have any number of
labels, a tuple; then the source has `label_sets = True`.  Pickled sources are small, since every worker gets a copy.
"""

import pathlib
import zipfile
from typing import Any, Protocol

import ml_collections
import numpy as np

from equivit import errors
from equivit.data import directories

MAPS = ("map", "mask")  # names of label maps in an .npz file


class Source(Protocol):
    """One split of a data set."""

    classes: tuple[str, ...]  # label k is called classes[k]
    channels: int  # 1 (grey) or 3 (RGB)

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example, such as `{"image": uint8 [H, W, C] or bytes, "label": int}`."""
        ...

    def where(self, index: int) -> str:
        """The name of this example in messages."""
        ...


class Digits:
    """scikit-learn's handwritten digits: 1797 grey images of 8x8, ten classes, no download.

    Splits: a permutation with fixed seed gives 1437 images to `train` and 360 to `test`.  The writers are unknown, so
    one writer's digits may be in both.  The stored values 0..16 are scaled to 0..255.
    """

    channels = 1
    classes = tuple("0123456789")

    def __init__(self, split: str):
        from sklearn import datasets  # slow to import, and only needed here

        check_split("digits", split, ("train", "test"))
        images, labels = datasets.load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))
        rows = order[:1437] if split == "train" else order[1437:]
        self.split = split
        self.images = np.round(images[rows] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        self.labels = labels[rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}

    def where(self, index: int) -> str:
        """The example's place in the split."""
        return f"digits {self.split}[{index}]"


class Synthetic:
    """Bright discs on noise, made on demand at any size; the radius of the disc is the class, one of ten.

    For quick runs: the label is invariant under flips and rotations of the image, so every model can learn it.
    Splits: `train` (2048 images) and `test` (512).
    """

    classes = tuple(f"radius_{k}" for k in range(10))

    def __init__(self, split: str, image_size: tuple[int, int], channels: int):
        check_split("synthetic", split, ("train", "test"))
        self.split, self.image_size, self.channels = split, tuple(image_size), channels

    def __len__(self) -> int:
        return {"train": 2048, "test": 512}[self.split]

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng([len(self), index])  # the length distinguishes the splits
        label = int(rng.integers(10))
        height, width = self.image_size
        side = min(height, width)
        radius = side * (0.05 + 0.04 * label)
        top, left = (rng.uniform(radius, size - radius) for size in self.image_size)
        rows, columns = np.ogrid[:height, :width]
        disc = np.hypot(rows + 0.5 - top, columns + 0.5 - left) < radius
        image = rng.integers(0, 64, (height, width, self.channels)) + 160 * disc[..., None]
        return {"image": image.astype(np.uint8), "label": label}

    def where(self, index: int) -> str:
        """The example's place in the split."""
        return f"synthetic {self.split}[{index}]"


class Blank:
    """One black image with the given entries, from which `loader.shapes` gets the shapes of a batch."""

    classes = ()

    def __init__(self, image_size: tuple[int, int], channels: int, entries: tuple[str, ...]):
        for name in entries:
            errors.one_of("entries", name, ("image", "label", "map"))
        self.image_size, self.channels, self.entries = tuple(image_size), channels, entries

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        black = np.zeros((*self.image_size, self.channels), np.uint8)
        example = {"image": black, "label": 0, "map": black[..., 0]}
        return {name: example[name] for name in self.entries}

    def where(self, index: int) -> str:
        """The name of the example in messages."""
        return "a black image"


class Npz:
    """One split of an `.npz` file.

    Images: `<split>_image` uint8 [N, H, W, C], or image files in one blob, `<split>_jpeg` uint8 [bytes] and
    `<split>_offset` int [N + 1]; image i is `jpeg[offset[i]:offset[i + 1]]`.  Labels: `<split>_label` int [N], or the
    label of each pixel, `<split>_map` (or `<split>_mask`) int [N, H, W], or both.  `classes` has the names.  Maps may
    have other numbers for pixels without a class; the objective must know them.
    """

    def __init__(self, path: str, split: str):
        self.path, self.split = pathlib.Path(path).expanduser(), split
        if not self.path.is_file():
            raise FileNotFoundError(f"npz:{path}: there is no file {self.path}.")
        if not zipfile.is_zipfile(self.path):
            raise ValueError(f"npz:{path}: this is not an .npz file, or it is damaged; np.savez writes such files.")
        with np.load(self.path) as file:
            keys = set(file)
            check_split(f"npz:{path}", split, _npz_splits(keys))
            if "classes" not in keys:
                raise ValueError(f"npz:{path}: `classes`, the names of the classes, is missing; keys: {sorted(keys)}.")
            self.classes = tuple(str(name) for name in file["classes"])
            kinds = [kind for kind in ("jpeg", "offset", "image", "label", *MAPS) if f"{split}_{kind}" in keys]
            arrays = {kind: file[f"{split}_{kind}"] for kind in kinds}
        self.encoded = "jpeg" in arrays
        self.images = arrays["jpeg" if self.encoded else "image"]
        self.offset: Any = arrays.get("offset")  # jpeg i is images[offset[i] : offset[i + 1]]
        self.labels = arrays.get("label")
        self.map_name = next((kind for kind in MAPS if kind in arrays), "")
        self.maps = arrays.get(self.map_name)
        self._check()
        self.channels = 3 if self.encoded else self.images.shape[-1]

    def __reduce__(self):
        return Npz, (str(self.path), self.split)  # a worker opens the file again instead of being sent its content

    def _check(self) -> None:
        where, images = f"npz:{self.path}: {self.split}", self.images
        if images.dtype != np.uint8 or images.ndim != (1 if self.encoded else 4):
            rule = "jpeg must be uint8 [bytes]" if self.encoded else "image must be uint8 [N, H, W, C]"
            raise ValueError(f"{where}_{rule}, not {images.dtype} {list(images.shape)}.")
        for kind, array in (("label", self.labels), (self.map_name, self.maps)):
            if array is not None and len(array) != len(self):
                raise ValueError(f"{where}_{kind} has {len(array)} entries for {len(self)} images.")
        if self.maps is not None:
            self._check_maps(f"{where}_{self.map_name}", self.maps)
        if self.labels is None or not len(self.labels):
            return
        if not 0 <= self.labels.min() <= self.labels.max() < len(self.classes):
            raise ValueError(
                f"{where}_label is in {self.labels.min()}..{self.labels.max()}; {len(self.classes)} classes allow "
                f"0..{len(self.classes) - 1}."
            )

    def _check_maps(self, where: str, maps: np.ndarray) -> None:
        if maps.ndim != 3 or not np.issubdtype(maps.dtype, np.integer):
            raise ValueError(f"{where} must be int [N, H, W], not {maps.dtype} {list(maps.shape)}.")
        if not self.encoded and maps.shape != self.images.shape[:3]:
            map_size, size = ("{}x{}".format(*shape[1:3]) for shape in (maps.shape, self.images.shape))
            raise ValueError(f"{where} is {map_size} for images of {size}.")

    def __len__(self) -> int:
        return len(self.offset) - 1 if self.encoded else len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.encoded:
            example = {"image": self.images[self.offset[index] : self.offset[index + 1]].tobytes()}
        else:
            example = {"image": self.images[index]}
        if self.labels is not None:
            example["label"] = int(self.labels[index])
        if self.maps is not None:
            example["map"] = self.maps[index]
        return example

    def where(self, index: int) -> str:
        """The example's position in the file."""
        return f"{self.path} {self.split}[{index}]"


def _npz_splits(keys: set[str]) -> list[str]:
    """The splits that have images and labels or maps."""
    found = {}
    for key in sorted(keys):
        name, _, kind = key.rpartition("_")
        found.setdefault(name, set()).add(kind)
    return [name for name, kinds in found.items() if kinds & {"image", "jpeg"} and kinds & {"label", *MAPS}]


class Subset:
    """The examples `rows` of a source."""

    def __init__(self, source: Source, rows: np.ndarray):
        self.source, self.rows = source, rows
        self.classes, self.channels, self.label_sets = source.classes, source.channels, has_label_sets(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self.rows[index])]

    def where(self, index: int) -> str:
        """The example's position in the whole source."""
        return self.source.where(int(self.rows[index]))


def open_source(config: ml_collections.ConfigDict, split: str) -> Source:
    """Opens one split of the `data` section's source, limited to `train_examples` or `eval_examples`.

    Raises:
      ValueError: for an unknown source or split, or a limit above the size of the split.
      FileNotFoundError: if a file or directory is missing.
    """
    kind, _, argument = config.source.partition(":")
    kinds = {"digits": False, "synthetic": False, "npz": True, "folder": True, "tfds": True}  # True: needs an argument
    if kind not in kinds:
        near = errors.nearest(kind, kinds)
        raise ValueError(f"config.data.source={config.source!r} is not one of {_forms(kinds)}{near}.")
    if kinds[kind] != bool(argument):
        raise ValueError(f"config.data.source={config.source!r} must have the form {_forms({kind: kinds[kind]})}.")
    if kind == "digits":
        source = Digits(split)
    elif kind == "synthetic":
        source = Synthetic(split, config.image_size, config.channels or 3)
    elif kind == "npz":
        source = Npz(argument, split)
    elif kind == "folder":
        source = directories.Folder(argument, split, class_split=config.split)
    else:
        source = directories.Tfds(argument, split)
    if not len(source):
        raise ValueError(f"config.data.source={config.source!r}: split {split!r} has no examples.")
    limits = {config.split: ("train_examples", config.train_examples)}
    limits[config.eval_split] = ("eval_examples", config.eval_examples)  # last: it wins if both are the same split
    return _limited(source, *limits.get(split, ("", None)))


def has_label_sets(source: Source) -> bool:
    """Whether labels are tuples of any number of classes."""
    return getattr(source, "label_sets", False)


def present(source: Source) -> np.ndarray:
    """The classes with an example in this split, int [K], sorted.  Reads the split if the source does not list labels.

    ImageNet-R is such a split: 200 of ImageNet's 1000 classes.
    """
    rows = slice(None)
    if isinstance(source, Subset):
        source, rows = source.source, source.rows
    known = getattr(source, "labels", None)
    if known is not None:
        return np.unique(known[rows])
    labels = (source[i]["label"] for i in np.arange(len(source))[rows].tolist())
    return np.unique(np.concatenate([np.atleast_1d(np.array(label, int)) for label in labels]))


def check_split(source: str, split: str, known: tuple[str, ...] | list[str]) -> None:
    """Raises ValueError if `split` is not one of the `known` splits of a source."""
    if split not in known:
        raise ValueError(f"{source}: there is no split {split!r}; splits: {', '.join(known) or 'none'}.")


def _limited(source: Source, key: str, limit: int | None) -> Source:
    """A fixed random subset: the first examples of a source may all be of one class."""
    if limit is None:
        return source
    if not 1 <= limit <= len(source):
        raise ValueError(f"config.data.{key}={limit} must be in 1..{len(source)}, the size of the split.")
    rows = np.random.default_rng(0).permutation(len(source))[:limit]
    return Subset(source, np.sort(rows))


def _forms(kinds: dict[str, bool]) -> str:
    """How a config names each kind of source."""
    arguments = {"npz": "<file>", "folder": "<dir>", "tfds": "<name>"}
    return ", ".join(f"'{kind}:{arguments[kind]}'" if needed else f"'{kind}'" for kind, needed in kinds.items())
