"""Images by random access: digits and synthetic discs; other sources have separate files.

A source is one split, and an example is a dict.  `reading.py` decodes two of its entries: "image", a uint8 array
[H, W, C] or the bytes of an image file, and "map", the label of each pixel, an integer array [H, W] or the bytes of a
PNG file.  The source's `legend` maps its numbers to classes (`label_maps.py`); without a legend they are the labels.
Other entries reach the transform unchanged: "label" is an int, or a tuple if examples may have any number of labels;
then the source has `label_sets = True`.  Pickled sources are small, since every worker gets a copy.

Sources joined by "+" form one source of images without labels: `folder:cells+list:more/cells.txt`.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

import ml_collections
import numpy as np

from equivit import errors
from equivit.data import directories, held_out, lists
from equivit.data.coco import Coco
from equivit.data.hub import Hub
from equivit.data.label_maps import Legend
from equivit.data.npz import Npz
from equivit.data.pairs import Pairs
from equivit.data.prepared import Tfds
from equivit.data.tars import WebDataset

# Each kind and its argument; "" for none.
KINDS = {"digits": "", "synthetic": "", "synthetic_maps": "", "tfds": "<name>", "folder": "<dir>", "list": "<file.txt>"}
KINDS |= {"csv": "<file.csv>", "pairs": "<dir>", "coco": "<dir>", "npz": "<file>", "hf": "<name>"}
KINDS |= {"webdataset": "<pattern.tar>"}


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
        """The name of an example in messages."""
        ...


class Digits:
    """scikit-learn's handwritten digits: 1797 grey images of 8x8, ten classes, no download.

    Splits: a permutation with fixed seed assigns 1437 images to `train` and 360 to `test`.  Writers are unknown, so one
    writer's digits may be in both.  The stored values 0..16 are scaled to 0..255.
    """

    channels = 1
    classes = tuple("0123456789")

    def __init__(self, split: str):
        from sklearn import datasets  # slow to import, and only needed here

        directories.check_split("digits", split, ("train", "test"))
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
        return f"digits {self.split}[{index}]"


class Synthetic:
    """Bright discs on noise, made on demand at any size; the radius of the disc is the class, one of ten.

    For quick runs: the label is invariant under flips and rotations of the image, so every model can learn it.  With
    `maps`, the target is a label map of background and disc.  Splits: `train` (2048 images) and `test` (512).
    """

    def __init__(self, split: str, image_size: tuple[int, int], channels: int, *, maps: bool = False):
        directories.check_split("synthetic", split, ("train", "test"))
        self.split, self.image_size, self.channels, self.maps = split, tuple(image_size), channels, maps
        self.classes = ("background", "disc") if maps else tuple(f"radius_{k}" for k in range(10))

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
        return {"image": image.astype(np.uint8), **({"map": disc.astype(np.uint8)} if self.maps else {"label": label})}

    def where(self, index: int) -> str:
        return f"synthetic {self.split}[{index}]"


class Subset:
    """The examples `rows` of a source."""

    def __init__(self, source: Source, rows: np.ndarray):
        self.source, self.rows = source, rows
        self.classes, self.channels, self.label_sets = source.classes, source.channels, has_label_sets(source)
        self.legend = legend(source)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[int(self.rows[index])]

    def where(self, index: int) -> str:
        return self.source.where(int(self.rows[index]))


class Joined:
    """The images of several sources in sequence; labels are dropped, since each source has separate classes.

    Images are grey if all sources are.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, sources: Sequence[Source]):
        self.sources, self.channels = tuple(sources), max(source.channels for source in sources)
        self.ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, row = self._place(index)
        return {"image": source[row]["image"]}

    def where(self, index: int) -> str:
        source, row = self._place(index)
        return source.where(row)

    def _place(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[number], index - (int(self.ends[number - 1]) if number else 0)


def parts(source: str) -> list[str]:
    """The sources joined in `data.source`: a "+" separates only before a kind; otherwise it belongs to a name."""
    return re.split(rf"\+(?=(?:{'|'.join(KINDS)})(?::|\+|$))", source)


def forms() -> list[str]:
    """The form of each kind of source in a config."""
    return [f"{kind}:{argument}" if argument else kind for kind, argument in KINDS.items()]


def open_source(config: ml_collections.ConfigDict, split: str) -> Source:
    """Open one split of the `data` section's source, limited to `train_examples` or `eval_examples`.

    Raises:
      ValueError: an unknown source or split, or a limit above the size of the split.
      FileNotFoundError: a file or directory is missing.
    """
    source = _whole(config, config.split if config.held_out and split == held_out.NAME else split)
    if config.held_out and split in (config.split, held_out.NAME):
        chosen = held_out.chosen(labels(source), len(source), config.held_out, config.split_seed)
        source = Subset(source, np.flatnonzero(chosen == (split == held_out.NAME)))
        if not len(source):
            raise ValueError(
                f"config.data.held_out={config.held_out} leaves no image of {config.source} for the split {split!r}; "
                "it needs two images of a class."
            )
    limits = {config.split: ("train_examples", config.train_examples)}
    if config.eval_split != config.split or config.eval_examples is not None:  # wins if both are the same split
        limits[config.eval_split] = ("eval_examples", config.eval_examples)
    key, limit = limits.get(split, ("", None))
    if limit is None:
        return source
    if not 1 <= limit <= len(source):
        raise ValueError(f"config.data.{key}={limit} must be in 1..{len(source)}, the size of the split.")
    rows = np.random.default_rng(0).permutation(len(source))[:limit]  # the first examples may all be of one class
    return Subset(source, np.sort(rows))


def _whole(config: ml_collections.ConfigDict, split: str) -> Source:
    """A split of the source, or of all sources joined in `data.source`."""
    opened = [_opened(part, config, split) for part in parts(config.source)]
    return opened[0] if len(opened) == 1 else Joined(opened)


def _opened(name: str, config: ml_collections.ConfigDict, split: str) -> Source:
    """Open one of the sources in `data.source`."""
    kind, _, argument = name.partition(":")
    thing = f"config.data.source={config.source!r}"
    if kind not in KINDS:
        raise ValueError(f"{thing} is not one of {', '.join(map(repr, forms()))}{errors.nearest(kind, KINDS)}.")
    if bool(KINDS[kind]) != bool(argument):
        form = f"{kind}:{KINDS[kind]}" if KINDS[kind] else kind
        raise ValueError(f"{thing} must have the form {form!r}.")
    void = tuple(config.void)
    small = (split, config.image_size, config.channels or 3)
    openers = {
        "digits": lambda: Digits(split),
        "synthetic": lambda: Synthetic(*small),
        "synthetic_maps": lambda: Synthetic(*small, maps=True),
        "npz": lambda: Npz(argument, split, void=void),
        "folder": lambda: directories.Folder(argument, split, class_split=config.split),
        "list": lambda: lists.Paths(argument, split),
        "csv": lambda: lists.Table(argument, split, class_split=config.split),
        "coco": lambda: Coco(argument, split, void=void, max_pixels=config.max_pixels),
        "pairs": lambda: Pairs(argument, split, void=void),
        "tfds": lambda: Tfds(argument, split, void=void),
        "hf": lambda: Hub(argument, split),
        "webdataset": lambda: WebDataset(argument, split, class_split=config.split),
    }
    source = openers[kind]()
    if not len(source):
        raise ValueError(f"config.data.source={name!r}: split {split!r} has no examples.")
    return source


def has_label_sets(source: Source) -> bool:
    """Whether labels are tuples of any number of classes."""
    return getattr(source, "label_sets", False)


def legend(source: Source) -> Legend | None:
    """The legend of the source's label maps, if it has one."""
    return getattr(source, "legend", None)


def present(source: Source) -> np.ndarray:
    """The classes with an example in this split, int [K], sorted.  Reads the split if the source does not list labels.

    ImageNet-R, for example, has 200 of ImageNet's 1000 classes.
    """
    known = labels(source)
    if known is not None:
        return np.unique(known)
    found = (source[i]["label"] for i in range(len(source)))
    return np.unique(np.concatenate([np.atleast_1d(np.array(label, int)) for label in found]))


def labels(source: Source) -> np.ndarray | None:
    """The label of each example, int [N]; None if the source does not list labels."""
    if isinstance(source, Subset):
        known = labels(source.source)
        return None if known is None else known[source.rows]
    return getattr(source, "labels", None)
