"""COCO's file of instances, with polygons and run lengths."""

import copy
import json
import pathlib
from typing import Any

from hypothesis import strategies as st

from equivit.data.coco import Coco
from tests.fuzz.attack import Reader
from tests.fuzz.mutations import document, one_of_files
from tests.fuzz.pictures import MAX_PIXELS, PNG
from tests.fuzz.tables import read_all

INSTANCES: dict[str, Any] = {
    "images": [
        {"id": 7, "file_name": "x.png", "height": 6, "width": 5},
        {"id": 9, "file_name": "y.png", "height": 6, "width": 5},
    ],
    "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "iscrowd": 0, "segmentation": [[0, 0, 4.5, 0, 4.5, 5]]},
        {
            "id": 2,
            "image_id": 9,
            "category_id": 1,
            "iscrowd": 1,
            "segmentation": {"counts": [3, 9, 18], "size": [6, 5]},
        },
    ],
}


def of_size(height: int, width: int) -> dict[str, Any]:
    """The same, with images of a size that their run lengths have too."""
    changed = copy.deepcopy(INSTANCES)
    for image in changed["images"]:
        image.update(height=height, width=width)
    changed["annotations"][1]["segmentation"] = {"counts": [1, height * width - 1], "size": [height, width]}
    return changed


STARTS = (INSTANCES, INSTANCES, of_size(65535, 65535), of_size(1, 60000), of_size(1000, 1000), of_size(6, 5))
FILE = "annotations/instances_train2017.json"
FILES = {FILE: json.dumps(INSTANCES).encode(), "train2017/x.png": PNG[0], "train2017/y.png": PNG[0]}
# fmt: off
MORE = (
    "x.png", "y.png", 7, 9, 3, 65535, 16_777_217, [0] * 9, [30], [0, 30], [0.5, 29.5], [-1, 31], [1e300] * 8, [5, 6],
    [6, 5.0], [0, 1] * 4000, "021", [[1e38, -1e38] * 5000], [[0, 0, 1, 1, 2, 2] * 2000], "/dev/zero",
    "../train2017/x.png",
)
# fmt: on


def read(folder: pathlib.Path) -> Any:
    return read_all(Coco(str(folder), "train2017", void=(255,), max_pixels=MAX_PIXELS))


DAMAGED = st.sampled_from(STARTS).flatmap(lambda start: document(start, more=MORE))
READERS = (Reader("COCO", FILES, one_of_files(FILES, {FILE: DAMAGED}), read),)
