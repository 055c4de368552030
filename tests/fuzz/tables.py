"""Text that lists images and classes: .txt, .csv, and the lists of folders of pairs."""

import pathlib
from typing import Any

from equivit.data import lists, reading
from equivit.data.pairs import VOC, Pairs
from tests.fuzz.attack import Reader
from tests.fuzz.mutations import lines, one_of_files
from tests.fuzz.pictures import MAPS, PNG

# fmt: off
NAMES = (
    "x.png", "y.png", "./x.png", "x.PNG", "../files/x.png", "x.png\0", "/dev/zero.png", '"x.png"', '"', '"a,b"',
    "x.png,1",
)
# fmt: on
IMAGES = {"x.png": PNG[0], "y.png": PNG[1]}
LIST = {"train.txt": b"x.png\ny.png\n", **IMAGES}
TABLE = {"train.csv": b"path,label\nx.png,1\ny.png,2\nx.png,1\n", **IMAGES}
ROWS = [["path", "label"], ["x.png", "1"], ["y.png", "2"], ["x.png", "1"]]


def read_all(source: Any) -> Any:
    """All examples of a source."""
    return [reading.read(source, k, 3) for k in range(len(source))]


def read_list(folder: pathlib.Path) -> Any:
    return read_all(lists.Paths(f"{folder}/train.txt", "train"))


def read_table(folder: pathlib.Path) -> Any:
    return read_all(
        lists.Table(
            f"{folder}/{{split}}.csv", "test" if (folder / "test.csv").exists() else "train", class_split="train"
        )
    )


TABLES = {**TABLE, "test.csv": TABLE["train.csv"]}
PAIRS = {"images/train/x.png": PNG[0], "labels/train/x.png": MAPS[0], "classes.txt": b"a\nb\nc\n"}
ADE = {
    "images/train/x.png": PNG[0],
    "annotations/train/x.png": MAPS[0],
    "objectInfo150.txt": b"Idx\tRatio\tTrain\tVal\tName\n1\t.1\t2\t3\twall, x\n2\t.1\t2\t3\tfloor\n",
}
INFO = [["Idx", "Ratio", "Train", "Val", "Name"], ["1", ".1", "2", "3", "wall, x"], ["2", ".1", "2", "3", "floor"]]
LISTS = "ImageSets/Segmentation/train.txt"
VOC2012 = {"JPEGImages/x.png": PNG[0], "SegmentationClass/x.png": MAPS[0], LISTS: b"x\n"}


def read_pairs(folder: pathlib.Path) -> Any:
    return read_all(Pairs(str(folder), "train", void=(255,)))


READERS = (
    Reader(
        "lists: .txt", LIST, one_of_files(LIST, {"train.txt": lines([["x.png"], ["y.png"]], ",", NAMES)}), read_list
    ),
    Reader(
        "lists: .csv",
        TABLES,
        one_of_files(TABLES, dict.fromkeys(("train.csv", "test.csv"), lines(ROWS, ",", NAMES))),
        read_table,
    ),
    Reader(
        "pairs: classes.txt", PAIRS, one_of_files(PAIRS, {"classes.txt": lines([["a"], ["b"], ["c"]], ",")}), read_pairs
    ),
    Reader("pairs: objectInfo150.txt", ADE, one_of_files(ADE, {"objectInfo150.txt": lines(INFO, "\t")}), read_pairs),
    Reader(
        "pairs: ImageSets",
        VOC2012,
        one_of_files(VOC2012, {LISTS: lines([["x"]], " ", ("x", "../x", *VOC[:1]))}),
        read_pairs,
    ),
)
