"""COCO's instances as label maps: which pixels a shape has, which shape a pixel goes to, and what is refused."""

import json
import math
import pickle

import numpy as np
import pytest
from matplotlib.path import Path

from equivit.data import coco, loader, reading, sources
from tests.data.contents import png

HEIGHT, WIDTH = 5, 7


def box(left, top, right, bottom):
    return [left, top, right, top, right, bottom, left, bottom]


def instances():
    """Three images: things that overlap around a crowd, none at all, and one of two parts."""
    crowd = np.zeros((HEIGHT, WIDTH), int)
    crowd[1:4, 2:6] = 1
    edges = np.flatnonzero(np.diff(np.concatenate([[0], crowd.T.ravel(), [0]])))
    counts = np.diff(np.concatenate([[0], edges, [HEIGHT * WIDTH]])).tolist()
    runs = {"size": [HEIGHT, WIDTH], "counts": counts}
    shapes = [
        (7, 90, 0, [box(0, 0, 3, 3)]),
        (7, 1, 0, [box(2, 2, 5, 5)]),  # over the one before
        (7, 1, 1, runs),  # under both
        (3, 90, 0, [box(0, 0, 1, 1), box(5, 3.6, 7, 9)]),  # beyond the image, and a row whose centres are outside
    ]
    keys = ("image_id", "category_id", "iscrowd", "segmentation")
    annotations = [dict(zip(keys, shape, strict=True), id=k) for k, shape in enumerate(shapes)]
    sizes = dict(height=HEIGHT, width=WIDTH)
    images = [dict(id=number, file_name=f"{number}.jpg", **sizes) for number in (7, 5, 3)]
    return dict(images=images, annotations=annotations, categories=[dict(id=90, name="late"), dict(id=1, name="early")])


def write(root, content=None, split="train2017"):
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / split).mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content or instances()))
    for number in (7, 5, 3):
        (root / split / f"{number}.jpg").write_bytes(png(np.full((HEIGHT, WIDTH), number)))


EXPECTED = np.array(
    [
        [[2, 2, 2, 0, 0, 0, 0], [2, 2, 2, -1, -1, -1, 0], [2, 2, 1, 1, 1, -1, 0], [0, 0, 1, 1, 1, -1, 0]]
        + [[0, 0, 1, 1, 1, 0, 0]],
        np.zeros((HEIGHT, WIDTH), int),
        [[2, 0, 0, 0, 0, 0, 0]] + [[0] * 7] * 3 + [[0, 0, 0, 0, 0, 2, 2]],
    ]
)


def test_later_things_cover_earlier_ones_and_crowds_only_the_background(section, tmp_path):
    """Categories are numbered by their ids.  Sources go to workers."""
    write(tmp_path)
    source = sources.open_source(section(source=f"coco:{tmp_path}", split="train2017"), "train2017")
    assert source.classes == ("background", "early", "late") and len(source) == 3
    for each in (source, pickle.loads(pickle.dumps(source))):
        read = [reading.read(each, k, 1).example for k in range(3)]
        np.testing.assert_array_equal([np.asarray(one["map"]) for one in read], EXPECTED)
        assert [one["image"].getpixel((0, 0)) for one in read] == [7, 5, 3]
    assert source.where(1) == str(tmp_path / "train2017" / "5.jpg")


def test_a_batch_without_the_background(section, tmp_path):
    write(tmp_path, split="val2017")
    names = dict(source=f"coco:{tmp_path}", split="train2017", eval_split="val2017", void=(0, 255))
    pipeline = loader.evaluate(section(**names, image_size=(HEIGHT, WIDTH)), batch_size=3)
    (batch,) = pipeline.batches()
    assert pipeline.classes == ("early", "late")
    np.testing.assert_array_equal(batch["map"], np.maximum(EXPECTED - 1, -1))


def test_pixels_of_a_polygon_are_those_whose_centres_it_has():
    """Beside Matplotlib, on stars about a point, some of which leave the image; and a bow tie, whose halves count."""
    rng, centres = np.random.default_rng(0), np.stack(np.meshgrid(np.arange(9) + 0.5, np.arange(6) + 0.5), -1)
    for _ in range(20):
        angles, radii = np.sort(rng.uniform(0, 2 * np.pi, 11)), rng.uniform(1, 6, 11)
        corners = np.float32(np.stack([4 + radii * np.cos(angles), 3 + radii * np.sin(angles)], -1))
        expected = Path(corners).contains_points(centres.reshape(-1, 2)).reshape(6, 9)
        np.testing.assert_array_equal(coco.polygon(corners.ravel(), 6, 9), expected)
    tie, outer, inner = coco.polygon(np.float32([0, 0, 6, 4, 6, 0, 0, 4]), 4, 6), [1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1]
    np.testing.assert_array_equal(tie, [outer, inner, inner, outer])


def changed(**fields):
    """The instances with other fields in the third annotation, the crowd."""
    content = instances()
    content["annotations"][2].update(fields)
    return content


def pictures(**fields):
    """The instances with other fields in the first image."""
    content = instances()
    content["images"][0].update(fields)
    return content


def categories(*ids):
    """The instances with other ids of the categories."""
    return instances() | dict(categories=[dict(id=number, name=str(k)) for k, number in enumerate(ids)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dict(info={}), r"instances_train2017.json: it must have the images, .* \(KeyError: 'categories'\)"),
        (changed(segmentation=dict(size=[5, 7], counts="abc")), "annotation 2: its run lengths are compressed"),
        (changed(segmentation=dict(size=[5, 7], counts=[3, 4])), "must add up to 5 x 7, the size of its image"),
        (changed(segmentation=[[0, 0, 1, 1]]), "a polygon must have x and y of at least three corners"),
        (changed(segmentation=[[0, 0, 1, 1, math.nan, 2]]), "of at least three corners, all finite"),
        (changed(image_id=99), r"\(KeyError: 99\)"),
        (changed(segmentation=dict(size=[5, 7], counts=[17.5, 17.5])), "annotation 2: its run lengths must be whole"),
        (changed(segmentation=dict(size=[5, 7], counts=[-1, 36])), "annotation 2: its run lengths must be whole"),
        (changed(segmentation=dict(size=[5, 7], counts=[10**400, 1])), "annotation 2: its run lengths must be whole"),
        (changed(segmentation=[[10**400, 0, 1, 1, 1, 2]]), "annotation 2: a polygon must have .* all finite"),
        (changed(segmentation=[[1e39, 0, 1, 1, 1, 2]]), "annotation 2: a polygon must have .* all finite"),
        (changed(segmentation=[["0", "0", "1", "1", "1", "2"]]), "annotation 2: a polygon must have .* all finite"),
        (changed(id="a\nb", segmentation=[[0]]), r"annotation 'a\\nb': a polygon must have"),
        (pictures(id=5), "two images have one id, or an id is not a whole number: 5"),
        (pictures(id=[1]), r"two images have one id, or an id is not a whole number: \[1\]"),
        (categories(1, 1), "two categories have one id, or an id is not a whole number: 1"),
        (categories(True, 1), "two categories have one id, or an id is not a whole number: True"),
        (categories(math.nan, 1), "two categories have one id, or an id is not a whole number: nan"),
        (pictures(file_name=7), r"image 7: its file_name, height and width are \(7, 5, 7\)"),
        (pictures(height=None), r"image 7: its .* are \('7.jpg', None, 7\)"),
        (pictures(width=1.5), r"image 7: its .* are \('7.jpg', 5, 1.5\)"),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(section, tmp_path, content, message):
    write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as raised:
        sources.open_source(section(source=f"coco:{tmp_path}"), "train2017")
    assert "\n" not in str(raised.value) and "instances_train2017.json" in str(raised.value)


def test_an_image_that_is_said_to_be_beyond_max_pixels_counts_as_unreadable(section, tmp_path):
    """As one that is: no memory is set aside for either."""
    write(tmp_path, pictures(height=5000, width=4000) | dict(annotations=[]))
    names = dict(source=f"coco:{tmp_path}", split="train2017")
    source = sources.open_source(section(**names, max_pixels=10**7), "train2017")
    example, unreadable = reading.read(source, 0, 1)
    assert example["image"].getpixel((0, 0)) == 5
    assert list(unreadable.values()) == [
        "it has 5000 x 4000 = 20,000,000 pixels, more than config.data.max_pixels=10000000; make it smaller, or raise "
        "this limit if memory allows"
    ]
    small = sources.open_source(section(**names, max_pixels=34), "train2017")
    with pytest.raises(ValueError, match="it has 5 x 7 = 35 pixels, more than config.data.max_pixels=34"):
        small[1]


def test_a_polygon_of_any_number_of_corners(monkeypatch):
    """Edges are taken in parts; a row may be all that fits."""
    numbers = np.random.default_rng(0).uniform(0, 9, 60).astype(np.float32)
    whole = coco.polygon(numbers, 6, 9)
    for crossings in (1, 13, 50):
        monkeypatch.setattr(coco, "CROSSINGS", crossings)
        np.testing.assert_array_equal(coco.polygon(numbers, 6, 9), whole)


def test_what_is_missing_is_one_line(section, tmp_path):
    with pytest.raises(FileNotFoundError, match="coco:/nowhere: there is no directory /nowhere"):
        sources.open_source(section(source="coco:/nowhere"), "train2017")
    write(tmp_path)
    with pytest.raises(ValueError, match=r"instances_train2071.json; splits: train2017; the nearest is 'train2017'"):
        sources.open_source(section(source=f"coco:{tmp_path}"), "train2071")
    (tmp_path / "train2017" / "3.jpg").unlink()
    with pytest.raises(ValueError, match=r"there is no image .*3.jpg; 1 of 3 are missing"):
        sources.open_source(section(source=f"coco:{tmp_path}"), "train2017")
    annotations = tmp_path / "annotations" / "instances_train2017.json"
    annotations.write_text(annotations.read_text().replace("3.jpg", r"\u001b[2J.jpg"))
    with pytest.raises(ValueError, match=r"there is no image .*\\x1b\[2J.jpg; 1 of 3 are missing"):
        sources.open_source(section(source=f"coco:{tmp_path}"), "train2017")
