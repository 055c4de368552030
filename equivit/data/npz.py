"""The source of an `.npz` file.  All errors are found on opening and reported with the key."""

import functools
from typing import Any

import numpy as np

from equivit import archives, errors
from equivit.data import directories
from equivit.data.label_maps import Legend

MAPS = ("map", "mask")  # key suffixes of label maps
KINDS = ("jpeg", "offset", "image", "label", *MAPS)


class Npz:
    """One split of an `.npz` file.

    Images: `<split>_image` uint8 [N, H, W, C], or uint16, which is divided by 257; or image files in one blob,
    `<split>_jpeg` uint8 [bytes] and `<split>_offset` int [N + 1]; image i is `jpeg[offset[i]:offset[i + 1]]`.  Labels:
    `<split>_label` int [N], or the label of each pixel, `<split>_map` (or `<split>_mask`) int [N, H, W], or both.
    `classes` has the names.  Maps may have the numbers `void` for pixels without a class (`data.void`).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, a key is missing, or an array has another form; the message names it.
    """

    def __init__(self, path: str, split: str, *, void: tuple[int, ...]):
        self.path, self.split, self.void = directories.expanded(path), split, void
        if not self.path.is_file():
            hint = errors.nearest_path(self.path) or "; set config.data.source to a file that exists"
            raise FileNotFoundError(f"npz:{path}: there is no file {self.path}{hint}.")
        with archives.Npz(self.path) as file:
            _check_keys(f"npz:{path}", set(file.keys), split)
            classes = file["classes"]
            arrays = {kind: file[f"{split}_{kind}"] for kind in KINDS if f"{split}_{kind}" in file.keys}
        where = f"npz:{path}: {split}"
        if classes.ndim != 1 or not len(classes):
            raise ValueError(
                f"npz:{path}: `classes` must be a list of names, such as np.array(['cat', 'dog']), not "
                f"{_kind(classes)}."
            )
        self.classes = directories.names(f"npz:{path}: `classes`", classes)
        self.encoded = "jpeg" in arrays
        self.images = arrays["jpeg" if self.encoded else "image"]
        self.offset: Any = arrays.get("offset")  # jpeg i is images[offset[i] : offset[i + 1]]
        if self.encoded:
            _check_files(where, self.images, self.offset)
        else:
            _check_images(f"{where}_image", self.images)
        self.labels = _labels(f"{where}_label", arrays.get("label"), len(self), len(self.classes))
        self.map_name = next((kind for kind in MAPS if kind in arrays), "")
        self.maps = arrays.get(self.map_name)
        if self.maps is not None:
            size = None if self.encoded else self.images.shape[1:3]
            _check_maps(f"{where}_{self.map_name}", self.maps, len(self), size)
            self.legend = Legend(self.classes, void)
            if self.labels is not None and self.legend.classes != self.classes:
                raise ValueError(
                    f"{where}_label: the images have labels of {len(self.classes)} classes, of which data.void={void} "
                    f"would leave {len(self.legend.classes)}; remove the labels or the maps."
                )
            self.classes = self.legend.classes
        self.channels = 3 if self.encoded or self.images.shape[-1] > 2 else 1  # others have transparency

    def __reduce__(self):
        # A worker reopens the file instead of receiving its content.
        return functools.partial(Npz, void=self.void), (str(self.path), self.split)

    def __len__(self) -> int:
        return len(self.offset) - 1 if self.encoded else len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example: dict[str, Any] = {"image": self.images[index]}
        if self.encoded:
            example["image"] = self.images[self.offset[index] : self.offset[index + 1]].tobytes()
        if self.labels is not None:
            example["label"] = int(self.labels[index])
        if self.maps is not None:
            example["map"] = self.maps[index]
        return example

    def where(self, index: int) -> str:
        return f"{self.path} {self.split}[{index}]"


def _check_keys(where: str, keys: set[str], split: str) -> None:
    listed = errors.listed(map(errors.word, sorted(keys)))
    parts = f"`{split}_image` or `{split}_jpeg`, and `{split}_label` or `{split}_map`"
    directories.check_split(where, split, _splits(keys), f". A split has {parts}; keys: {listed}.")
    if "classes" not in keys:
        raise ValueError(f"{where}: `classes`, the names of the classes, is missing; keys: {listed}.")
    if f"{split}_jpeg" in keys and f"{split}_offset" not in keys:
        raise ValueError(
            f"{where}: `{split}_offset`, int [N + 1], where each file of `{split}_jpeg` begins and the last one ends, "
            f"is missing; keys: {listed}."
        )


def _splits(keys: set[str]) -> list[str]:
    """The splits with images and labels or maps."""
    found = {}
    for key in sorted(keys):
        name, _, kind = key.rpartition("_")
        found.setdefault(name, set()).add(kind)
    return [name for name, kinds in found.items() if kinds & {"image", "jpeg"} and kinds & {"label", *MAPS}]


def _check_images(where: str, images: np.ndarray) -> None:
    if images.ndim != 4 or images.dtype not in (np.uint8, np.uint16):
        hint = "a grey image has C = 1, images[..., None]"
        if images.ndim == 4:
            hint = "scale others to 0..255 first; uint16 is divided by 257"
        raise ValueError(f"{where} must be uint8 [N, H, W, C], not {_kind(images)}; {hint}.")
    if 0 in images.shape:
        raise ValueError(f"{where} must hold images of at least one pixel, not {_kind(images)}; an axis is empty.")
    if images.shape[-1] > 4:
        raise ValueError(
            f"{where} must be uint8 [N, H, W, C] with C = 1 (grey) or 3 (RGB), beside it perhaps alpha, not "
            f"{_kind(images)}; are the channels on another axis?"
        )


def _check_files(where: str, files: np.ndarray, offset: np.ndarray) -> None:
    """Check that `offset` divides the blob into files that are not empty."""
    if files.dtype != np.uint8 or files.ndim != 1:
        raise ValueError(f"{where}_jpeg must be uint8 [bytes], not {_kind(files)}.")
    if offset.ndim != 1 or offset.dtype.kind not in "iu" or len(offset) < 2:
        raise ValueError(f"{where}_offset must be int [N + 1] with at least one image, not {_kind(offset)}.")
    if offset.min() < 0 or offset.max() > len(files):
        raise ValueError(
            f"{where}_offset is in {offset.min()}..{offset.max()}; {where}_jpeg of {len(files)} bytes allows "
            f"0..{len(files)}."
        )
    if (wrong := np.flatnonzero(offset[1:] <= offset[:-1])).size:
        first = int(wrong[0])
        raise ValueError(
            f"{where}_offset must increase, but image {first} is empty: it goes from {offset[first]} to "
            f"{offset[first + 1]}; remove empty images."
        )


def _labels(where: str, labels: np.ndarray | None, count: int, classes: int) -> np.ndarray | None:
    """The labels as whole numbers."""
    if labels is None:
        return None
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        hint = "; for rows with one entry per class, use argmax(-1)" if labels.ndim == 2 else ""
        hint = "; give the index of each name in `classes`" if labels.dtype.kind in "US" else hint
        hint = f"; if it is a map of labels, name it {where.removesuffix('label')}map" if labels.ndim == 3 else hint
        raise ValueError(f"{where} must be int [N], not {_kind(labels)}{hint}.")
    if len(labels) != count:
        raise ValueError(f"{where} has {len(labels)} entries for {count} images; give one for each.")
    if labels.dtype.kind == "f" and (wrong := np.flatnonzero(labels != np.floor(labels))).size:
        first = int(wrong[0])
        raise ValueError(
            f"{where}[{first}]={labels[first]} must be a whole number, the index of a class; {len(wrong)} of {count} "
            "labels are not."
        )
    if not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"{where} is in {labels.min()}..{labels.max()}; {classes} classes allow 0..{classes - 1}: count from 0, "
            "or name all classes in `classes`."
        )
    return labels if labels.dtype.kind in "iu" else labels.astype(np.int64)


def _check_maps(where: str, maps: np.ndarray, count: int, size: tuple[int, ...] | None) -> None:
    """Check that maps match their images; `size` is the images' (height, width), None for files."""
    if maps.ndim != 3 or not np.issubdtype(maps.dtype, np.integer) or 0 in maps.shape[1:]:
        hint = "; take its only channel, [..., 0]" if maps.ndim == 4 and maps.shape[-1] == 1 else ""
        if maps.ndim == 4 and maps.shape[-1] in (3, 4):
            hint = "; a map has the number of the class of each pixel, not its colour"
        raise ValueError(f"{where} must be int [N, H, W], not {_kind(maps)}{hint}.")
    if len(maps) != count:
        raise ValueError(f"{where} has {len(maps)} entries for {count} images; give one for each.")
    if size is not None and maps.shape[1:] != size:
        here, there = ("{}x{}".format(*shape) for shape in (maps.shape[1:], size))
        raise ValueError(f"{where} is {here} for images of {there}; they must have the same size.")


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
