"""COCO as label maps: the 80 thing classes and the background, from the official instance annotations."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from equivit import errors
from equivit.data import directories
from equivit.data.crops import VOID
from equivit.data.label_maps import Legend

PREFIX, SUFFIX = "instances_", ".json"
JPEG_SIDE = 2**16 - 1  # pixels, at most
CROSSINGS = 2**20  # of edges and rows, computed at once: polygons may have any number of corners


class Coco(directories.Files):
    """COCO's images, with maps painted from their annotations: 0 is background, 1 to 80 are the categories by id.

    The layout is as unpacked: `annotations/instances_<split>.json` and `<split>/<image>`, with the splits `train2017`
    and `val2017`.

    Annotations are painted in file order, so later ones cover earlier ones.  Crowds are painted first and are void:
    their pixels have no class unless another annotation covers them.  A pixel belongs to a polygon if its centre does,
    by the even-odd rule; COCO's own masks round corners to a fifth of a pixel first.  Images without annotations are
    background.

    Args:
      void: numbers in the maps that mean "no class" (`data.void`); (0, 255) leaves the background out.
      max_pixels: the largest map; an image with a larger annotated size counts as unreadable (`data.max_pixels`).

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: an unknown split, an invalid annotation file, or missing images.
    """

    def __init__(self, directory: str, split: str, *, void: tuple[int, ...], max_pixels: int):
        root = directories.root("coco", directory)
        file, self.folder = root / "annotations" / f"{PREFIX}{split}{SUFFIX}", root / split
        if not file.is_file():
            splits = [path.name[len(PREFIX) : -len(SUFFIX)] for path in sorted(file.parent.glob(f"{PREFIX}*{SUFFIX}"))]
            raise ValueError(
                f"coco:{directory}: there is no {file}; splits: {errors.listed(splits) or 'none'}"
                f"{errors.nearest(split, splits)}."
            )
        names, pictures, self.shapes = _read(file)
        self.legend = Legend(("background", *names), void)
        self.classes = self.legend.classes
        found = set(os.listdir(self.folder)) if self.folder.is_dir() else set()
        if missing := [name for name, _ in pictures if name not in found]:
            raise ValueError(
                f"coco:{directory}: there is no image {errors.line(str(self.folder / missing[0]))}; {len(missing)} of "
                f"{len(pictures)} are missing."
            )
        self.files = directories.array([name for name, _ in pictures])
        self.max_pixels = max_pixels
        self.sizes = np.array([size for _, size in pictures], np.int32).reshape(-1, 2)

    def __getitem__(self, index: int) -> dict[str, Any]:
        height, width = map(int, self.sizes[index])
        directories.check_pixels(height, width, self.max_pixels)
        labels = np.zeros((height, width), np.int32)
        for label, mask in self.shapes.of(index, height, width):
            labels[mask] = label
        return {**super().__getitem__(index), "map": labels}


class Shapes(NamedTuple):
    """The shapes of all images in a few arrays, which are sent to workers faster than a million objects.

    Attributes:
      images: the cumulative number of shapes, including the image's own, int [images].
      labels: the label of each shape, in painting order.
      runs: whether a shape has run lengths instead of a polygon.
      ends: where each shape's numbers end.
      numbers: x and y of the corners in turn, or the lengths of runs, float32, where whole numbers are exact to 2^24.
    """

    images: np.ndarray
    labels: np.ndarray
    runs: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray

    def of(self, image: int, height: int, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """The label and the pixels, bool [height, width], of each shape of an image."""
        for k in range(self.images[image - 1] if image else 0, self.images[image]):
            numbers = self.numbers[self.ends[k - 1] if k else 0 : self.ends[k]]
            yield int(self.labels[k]), (run_lengths if self.runs[k] else polygon)(numbers, height, width)


def polygon(numbers: np.ndarray, height: int, width: int) -> np.ndarray:
    """The pixels whose centre lies in a polygon, by the even-odd rule, bool [height, width].

    Args:
      numbers: x and y of each corner, from the upper left corner of the image.
    """
    corners = numbers.astype(np.float64).reshape(-1, 2)
    edges = np.concatenate([corners, np.roll(corners, -1, axis=0)], axis=1)
    centres, crossings = np.arange(height) + 0.5, np.zeros((height, width + 1), np.uint8)
    together = max(1, CROSSINGS // height)
    for first in range(0, len(edges), together):
        x, y, x_next, y_next = edges[first : first + together].T
        edge, row = np.nonzero((y[:, None] <= centres) != (y_next[:, None] <= centres))
        share = (centres[row] - y[edge]) / (y_next[edge] - y[edge])
        crossing = x[edge] + share * (x_next[edge] - x[edge])
        column = np.clip(np.ceil(crossing - 0.5), 0, width).astype(int)  # of the first pixel to the right
        np.add.at(crossings, (row, column), 1)
    return (np.cumsum(crossings, axis=1, dtype=np.uint8)[:, :width] & 1).astype(bool)  # overflow keeps the parity


def run_lengths(numbers: np.ndarray, height: int, width: int) -> np.ndarray:
    """The pixels of COCO's uncompressed run lengths, bool [height, width]: out, in, out, ..., column by column."""
    runs = np.repeat(np.arange(len(numbers)) % 2 == 1, numbers.astype(int))
    return runs.reshape(width, height).T


def _read(file: pathlib.Path) -> tuple[list[str], list[tuple[str, tuple[int, int]]], Shapes]:
    """The names of the categories by id, the name and (height, width) of each image, and the shapes."""
    try:
        content = json.loads(file.read_bytes())
        kinds, place = (_by_id(content[name], name) for name in ("categories", "images"))
        labels = {number: k for k, number in enumerate(sorted(kinds), 1)}
        pictures = [_picture(image) for image in content["images"]]
        painted = [[] for _ in pictures]
        for one in sorted(content["annotations"], key=lambda one: not one["iscrowd"]):  # a stable sort
            k = place[one["image_id"]]
            label = VOID if one["iscrowd"] else labels[one["category_id"]]
            painted[k] += [(label, *part) for part in _parts(one, pictures[k][1])]
        names = [str(content["categories"][kinds[number]]["name"]) for number in labels]
        return names, pictures, _shapes(painted)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{file}: it must have the images, categories and annotations of COCO's instances ({errors.reason(error)})."
        ) from error


def _by_id(entries: list[dict[str, Any]], what: str) -> dict[int, int]:
    """The index of each entry by its id; ValueError unless ids are distinct whole numbers."""
    places = {}
    for k, entry in enumerate(entries):
        if type(entry["id"]) is not int or entry["id"] in places:
            raise ValueError(f"two {what} have one id, or an id is not a whole number: {errors.shown(entry['id'])}")
        places[entry["id"]] = k
    return places


def _picture(image: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    """The file name and (height, width) of an image."""
    name, size = image["file_name"], (image["height"], image["width"])
    if not isinstance(name, str) or any(type(side) is not int or not 0 < side <= JPEG_SIDE for side in size):
        found = errors.shown((name, *size))
        raise ValueError(f"image {image['id']}: its file_name, height and width are {found}, not a name and two sizes")
    return name, size


def _parts(annotation: dict[str, Any], size: tuple[int, int]) -> list[tuple[bool, np.ndarray]]:
    """For each part of an annotation, whether it has run lengths, and its numbers."""
    given, name = annotation["segmentation"], f"annotation {errors.shown(annotation['id'])}"
    if isinstance(given, list):
        rule = f"{name}: a polygon must have x and y of at least three corners, all finite"
        polygons = [_numbers(part, rule) for part in given]
        if any(len(part) < 6 or len(part) % 2 for part in polygons):
            raise ValueError(rule)
        return [(False, part) for part in polygons]
    if isinstance(given["counts"], str):
        raise ValueError(f"{name}: its run lengths are compressed; official files have uncompressed ones")
    rule = f"{name}: its run lengths must be whole numbers from 0"
    counts = _numbers(given["counts"], rule)
    if (counts < 0).any() or (counts % 1).any():
        raise ValueError(rule)
    if tuple(given["size"]) != size or counts.sum(dtype=np.float64) != size[0] * size[1]:
        raise ValueError(f"{name}: its run lengths must add up to {size[0]} x {size[1]}, the size of its image")
    return [(True, counts)]


def _numbers(values: Any, rule: str) -> np.ndarray:
    """A list of numbers as float32; ValueError with the rule for anything else, or a number that is not finite."""
    given = np.array(values)
    if given.ndim != 1 or given.dtype.kind not in "iuf":
        raise ValueError(rule)
    with np.errstate(over="ignore"):
        numbers = given.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise ValueError(rule)
    return numbers


def _shapes(painted: list[list[tuple[int, bool, np.ndarray]]]) -> Shapes:
    shapes = [shape for image in painted for shape in image]
    return Shapes(
        images=np.cumsum([len(image) for image in painted], dtype=np.int64),
        labels=np.array([label for label, _, _ in shapes], np.int16),
        runs=np.array([runs for _, runs, _ in shapes], bool),
        ends=np.cumsum([len(numbers) for _, _, numbers in shapes], dtype=np.int64),
        numbers=np.concatenate([np.zeros(0, np.float32), *(numbers for _, _, numbers in shapes)]),
    )
