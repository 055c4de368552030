"""Images held out of a split: a share of every class, the same for the same seed, and none of them in training."""

import numpy as np
import pytest
from PIL import Image

from equivit.data import held_out, sources
from equivit.training.config import get_base


def test_every_class_gives_its_share():
    labels = np.repeat([0, 1, 2, 3], [50, 10, 2, 1])
    held = held_out.chosen(labels, len(labels), 0.2, seed=0)
    assert [int(held[labels == label].sum()) for label in range(4)] == [10, 2, 1, 0]  # one image is never held out
    np.testing.assert_array_equal(held, held_out.chosen(labels, len(labels), 0.2, seed=0))
    assert (held != held_out.chosen(labels, len(labels), 0.2, seed=1)).any()
    more = np.concatenate([labels, np.zeros(20, int)])
    same = (held_out.chosen(more, len(more), 0.2, seed=0)[: len(labels)] == held)[labels > 0]
    assert same.all()  # the other classes keep their images
    assert held_out.chosen(None, 10, 0.2, seed=0).sum() == 2
    assert held_out.chosen(labels, len(labels), 0.99, seed=0).sum() == 49 + 9 + 1  # one image stays


@pytest.fixture
def section(tmp_path):
    for name, number in (("cats", 10), ("dogs", 5)):
        (tmp_path / name).mkdir()
        for i in range(number):
            Image.new("RGB", (4, 4)).save(tmp_path / name / f"{i}.png")
    section = get_base().data
    section.update(source=f"folder:{tmp_path}", held_out=0.2, eval_split="held_out")
    return section


def places(source):
    return {source.where(index) for index in range(len(source))}


def test_the_parts_of_a_source_are_all_of_it(section):
    train, test = sources.open_source(section, "train"), sources.open_source(section, "held_out")
    assert not places(train) & places(test) and len(places(train) | places(test)) == 15
    assert np.bincount(sources.labels(test)).tolist() == [2, 1] and test.classes == train.classes == ("cats", "dogs")
    section.eval_examples = 2
    assert places(sources.open_source(section, "held_out")) < places(test)
    section.held_out = 0.0
    assert len(sources.open_source(section, "train")) == 15


def test_a_part_without_images_is_refused(section):
    section.update(source="synthetic_maps", held_out=0.0)
    with pytest.raises(ValueError, match="held_out"):
        sources.open_source(section, "held_out")
