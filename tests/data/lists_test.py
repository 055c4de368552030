"""Images without labels: folders, lists of paths, and several sources as one; and tables of paths and labels."""

import itertools
import pickle

import numpy as np
import pytest
from PIL import Image

from equivit.data import directories, loader, reading, sources, views
from tests.data.contents import labels_of, values_of


@pytest.fixture
def images(tmp_path):
    """Images a/0.png, a/1.png, b/2.png ... of grey level 10 i, in colour."""
    for i, name in enumerate(["a/0.png", "a/1.JPEG", "b/2.bmp", "b/é+folder.png", "4.png"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 7), (10 * i,) * 3).save(path)
    return tmp_path


def opened(section, source, split="train", **changes):
    return sources.open_source(section(source=source, **changes), split)


def refused(section, source, split="train", error=ValueError):
    with pytest.raises(error) as raised:
        opened(section, source, split)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_folder_without_class_folders_has_images_without_labels(section, images):
    source = opened(section, f"folder:{images / 'a'}")
    assert values_of(source) == [0, 10] and list(source[0]) == ["image"] and source.classes == ()
    assert values_of(opened(section, f"folder:{images}", "b")) == [20, 30]  # b is a split
    assert values_of(pickle.loads(pickle.dumps(source))) == [0, 10]
    assert source.where(1) == str(images / "a/1.JPEG")
    assert "there is no " in refused(section, f"folder:{images / 'a'}", "test")
    classes = opened(section, f"folder:{images}")  # what lies beside class folders is left out, as ever
    assert classes.classes == ("a", "b") and labels_of(classes) == [0, 0, 1, 1]


@pytest.mark.parametrize("mark", ["\u2028", "\x0b", "\x0c", "\x1c", "\x85", "\r"])
def test_only_the_end_of_a_line_ends_a_line(section, images, mark):
    """Names of files and classes may have characters at which `str.splitlines` cuts too."""
    name, label = f"a/0{mark}x.png", f"one{mark}class"
    (images / "a/0.png").rename(images / name)
    (images / "list.txt").write_bytes(f"{name}\r\n4.png\n".encode())
    assert values_of(opened(section, f"list:{images}/list.txt")) == [0, 40]
    (images / "some.csv").write_bytes(f'"{name}",two\r\n4.png,"{label}"\n'.encode())
    source = opened(section, f"csv:{images}/some.csv")
    assert values_of(source) == [0, 40] and source.classes == (label, "two")


def test_a_list_has_a_path_on_each_line(section, images):
    """Relative to the file, or absolute; in any order, and as often as they stand there."""
    (images / "b" / "list.txt").write_text(f"\n  é+folder.png \n../a/0.png\n\n{images / '4.png'}\r\n2.bmp\n2.bmp")
    source = opened(section, f"list:{images / 'b' / 'list.txt'}")
    assert values_of(source) == [30, 0, 40, 20, 20] and source.classes == ()
    assert values_of(pickle.loads(pickle.dumps(source))) == values_of(source)
    message = refused(section, f"list:{images}/b/list.txt", "test")
    assert "list.txt: there is no split 'test'; one file is split 'train'." in message
    assert message.endswith(f"A file for each split is named with {{split}}, as list:{images}/b/{{split}}.txt.")
    (images / "b" / "test.txt").write_text("2.bmp")
    assert values_of(opened(section, f"list:{images}/b/{{split}}.txt", "test")) == [20]
    assert f"there is no file {images}/b/val.txt; the nearest is 'list.txt'." in (
        refused(section, f"list:{images}/b/{{split}}.txt", "val", FileNotFoundError)
    )


def test_a_table_has_a_path_and_a_label_on_each_line(section, images):
    (images / "train.csv").write_text('path,label\r\na/0.png,NGS\r\n"a/1.JPEG", ABE\r\n\r\nb/2.bmp,MON\r\n')
    (images / "test.csv").write_text("b/2.bmp,NGS\na/0.png,MON\n")
    train, test = (opened(section, f"csv:{images}/{{split}}.csv", split) for split in ("train", "test"))
    assert train.classes == test.classes == ("ABE", "MON", "NGS")  # although ABE is not in the test split
    assert labels_of(train) == [2, 0, 1] and values_of(train) == [0, 10, 20]
    assert labels_of(test) == [2, 1] and values_of(test) == [20, 0]
    assert labels_of(pickle.loads(pickle.dumps(test))) == [2, 1] and sources.present(test).tolist() == [1, 2]
    alone = opened(section, f"csv:{images / 'test.csv'}", "all")
    assert alone.classes == ("MON", "NGS") and labels_of(alone) == [1, 0]
    (images / "numbers.csv").write_text("a/0.png,10\na/1.JPEG,9\n")
    assert opened(section, f"csv:{images / 'numbers.csv'}").classes == ("9", "10")
    (images / "val.csv").write_text("b/2.bmp,NGS\na/0.png,NGX\n")
    message = refused(section, f"csv:{images}/{{split}}.csv", "val")
    assert "val.csv, line 2: the class 'NGX' is not in" in message and "train.csv; the nearest is 'NGS'" in message
    (images / "val.csv").write_text(f"b/2.bmp,{'b' * 20_000}\n")
    assert len(refused(section, f"csv:{images}/{{split}}.csv", "val")) < 1000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "4.png\n\nnotes\n", "x.txt, line 3: 'notes' must be the path of an image, which ends in one of .jpg"),
        ("x.txt", "4.png,3\n", "x.txt, line 1: '4.png,3' must be the path of an image"),
        ("x.csv", "path,label\n4.png,3\n\n4.png\n", "x.csv, line 4: '4.png' must be a path and a label"),
        ("x.csv", "4.png,3\n4.png,\n", "x.csv, line 2: '4.png,' must be a path and a label"),
        ("x.csv", "0.gif,4\n4.png,3\n", "x.csv, line 1: '0.gif' must be the path of an image"),
        ("x.csv", "0,4.png,3\n", "x.csv, line 1: '0,4.png,3' must be a path and a label"),
        ("x.csv", "4.png,3\n3,4.png\n", "x.csv, line 2: '3' must be the path of an image"),
        ("x.csv", f"4.png,3\n4.png,{'3' * 200_000}\n", "x.csv, line 2: it is not a line of a table (field larger than"),
        ("x.csv", "path,label\n", "split 'train' has no examples"),
        ("x.txt", "\n", "split 'train' has no examples"),
    ],
)
def test_a_bad_line_is_named_with_its_file(section, images, name, content, message):
    (images / name).write_text(content)
    kind = {"x.txt": "list", "x.csv": "csv"}[name]
    assert message in refused(section, f"{kind}:{images / name}")


def test_several_sources_are_one_of_images_without_labels(section, images):
    (images / "list.txt").write_text("4.png\nb/é+folder.png\nmissing.png\n")
    joined = opened(section, f"folder:{images}+list:{images}/list.txt+folder:{images / 'a'}+digits")
    assert len(joined) == 4 + 3 + 2 + 1437 and joined.classes == () and joined.channels == 3
    assert [list(joined[i]) for i in (0, 5, 8, 1000)] == [["image"]] * 4
    grey = [reading.read(joined, i, 1).example["image"].getpixel((0, 0)) for i in (0, 3, 4, 5, 7, 8)]
    assert grey == [0, 30, 40, 30, 0, 10]
    assert joined.where(8) == str(images / "a/1.JPEG") and joined.where(9) == "digits train[0]"
    missed = reading.read(joined, 6, 1)  # the next one, of the next source
    assert missed.example["image"].getpixel((0, 0)) == 0 and list(missed.unreadable) == [str(images / "missing.png")]
    assert len(opened(section, f"folder:{images}+digits", train_examples=100)) == 100
    assert opened(section, "digits+digits").channels == 1
    assert sources.parts("folder:a+b+list:c++.txt+digits") == ["folder:a+b", "list:c++.txt", "digits"]
    with pytest.raises(ValueError, match="source='liste:b.txt' is not one of .* nearest is 'list'."):
        loader.train(section(source="liste:b.txt", augment={}), batch_size=2, seed=0, transform=views.Views)


def test_views_of_joined_sources_train_and_labels_are_asked_for(section, images):
    config = section(source=f"folder:{images / 'a'}+folder:{images}", augment={"crop": "random_resized"})
    config.views.locals = 0
    pipeline = loader.train(config, batch_size=6, seed=0, entries=("image",), transform=views.Views)
    batch = next(itertools.islice(pipeline.batches(), 1))
    assert {name: value.shape for name, value in batch.items()} == {"global_crops": (6, 2, 8, 8, 3)}
    assert len(np.unique(batch["global_crops"][:, 0, 0, 0, 0])) > 2
    with pytest.raises(ValueError, match="its examples have image but no label, which the objective needs"):
        loader.train(config, batch_size=6, seed=0, entries=("image", "label"))


def test_the_order_of_classes_is_that_of_their_names_alone():
    """A set of names has another order in another process."""
    for names in (["1", "01", "10", "2", "002"], ["b", "a", "01"]):
        found = {tuple(directories.in_order(order)) for order in itertools.permutations(names)}
        assert found == {("01", "1", "002", "2", "10") if "10" in names else ("01", "a", "b")}
