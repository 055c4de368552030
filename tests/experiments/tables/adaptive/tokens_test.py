"""The figure of tokens: which maps lie over one another, what fails, and the script from end to end."""

import json

import numpy as np
import pytest

from equivit.models.features import Grid
from experiments.tables.adaptive import tokens

VALUES = np.random.default_rng(0).normal(size=(1, 3, 4, 5)).astype(np.float32)  # 12x12 pixels, every (4, 3)


def grid(begin, rolled=(0, 0)):
    return Grid(np.roll(VALUES, rolled, (1, 2)), (4, 3), np.array([begin]))


@pytest.mark.parametrize(
    ("begin", "rolled", "follows"),
    [
        ((4, 3), (0, 0), True),  # one row and one column on
        ((0, 6), (1, -1), True),  # the same tokens, of which another one comes first
        ((8, 0), (-1, 1), True),
        ((3, 2), (0, 0), False),  # a grid that stays where it was, and tokens too
        ((3, 1), (0, 1), False),  # two columns too few: one token on is nearer
    ],
)
def test_tokens_are_compared_at_the_same_place_of_the_image(begin, rolled, follows):
    difference, found = tokens.subtracted(grid((3, 2)), grid(begin, rolled))
    assert difference.shape == (3, 4, 5) and not difference.any() and found is follows
    assert tokens.subtracted(grid((3, 2)), grid(begin, (rolled[0] + 1, rolled[1])))[0].max() > 0.1


def test_differences_are_drawn_where_their_tokens_lie():
    upright, wrong = grid((3, 2)), grid((4, 3))
    channel = np.square(upright.values[0]).sum((0, 1)).argmax()
    wrong.values[0, 2, 3, channel] += 1
    drawn = tokens._channel(upright, wrong)
    rows, columns = (np.unique(places).tolist() for places in np.nonzero(drawn > 0.5))
    assert drawn.shape == (12, 12) and rows == [0, 1, 2, 11] and columns == [0, 1, 11]


def test_what_fails():
    rows = tokens.compared("adaptive", [grid((3, 2))], [grid((4, 3))])
    assert [claim.holds for claim in tokens.claims_of(rows)] == [True]
    wrong = grid((4, 3))
    wrong.values[0, 1, 2, 3] += 1e-6
    (row,) = tokens.compared("adaptive", [grid((3, 2))], [wrong])
    assert row["changed"] == 1 / 12 and row["begins"] == (3, 2) and row["moved"] == (4, 3) and row["tokens"] == "3x4"
    assert [claim.holds for claim in tokens.claims_of([row])] == [False]
    ordinary = tokens.compared("ordinary", [grid((0, 0))], [grid((0, 0))])
    assert [claim.holds for claim in tokens.claims_of(ordinary)] == [False]  # it would be equivariant
    loose = tokens.compared("adaptive, no anchor", [grid((3, 2))], [grid((3, 2), (1, 1))])
    assert [claim.holds for claim in tokens.claims_of(loose)] == [None]  # another choice


def test_end_to_end(tmp_path):
    output = tmp_path / "tokens.json"
    assert tokens.main(["--quick", "--model=swin_t", f"--output={output}"]) == 0
    rows = json.loads(output.read_text())["main"]["rows"]
    assert [(row["variant"], row["stage"]) for row in rows] == [
        (variant, stage) for variant in tokens.VARIANTS for stage in (1, 2)
    ]
    assert {row["tokens"] for row in rows} == {"8x8", "4x4"} and (tmp_path / "tokens.png").stat().st_size > 0
