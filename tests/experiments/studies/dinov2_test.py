"""The studies of DINOv2: claims, neighbours by pixels, colours."""

import numpy as np
import pytest

from equivit.training import config as configs
from experiments import machine
from experiments.studies import dinov2_features, dinov2_small_images


def figures(start, end, entropy=0.9):
    row = {f"start {name}": [start, start + 0.01] for name in dinov2_small_images.FIGURES}
    row |= {name: [end, end + 0.01] for name in dinov2_small_images.FIGURES}
    return row | {key: [entropy] * 2 for key in ("classes/rows", "classes/mean", "patches/rows", "patches/mean")}


@pytest.mark.parametrize(
    ("row", "failing"),
    [
        (figures(0.5, 0.6), []),
        (figures(0.5, 0.53), ["linear_probe"]),
        (figures(0.5, 0.5), ["linear_probe", "knn"]),
        (figures(0.5, 0.6, entropy=0.9999), ["entropy"]),
    ],
)
def test_small_runs_must_learn_and_not_collapse(row, failing):
    claims = dinov2_small_images.claims("blood_cells", {"I8": row})
    assert [claim.text for claim in claims if claim.holds is False] == [
        claim.text for claim in claims if any(word in claim.text for word in failing)
    ]


def test_differences_from_plain_are_of_the_figures_and_of_what_training_adds():
    rows = {"plain": figures(0.5, 0.7), "I8": figures(0.6, 0.72)}
    gains = {name: gain["gap"] for name, gain in dinov2_small_images.gains_of(rows).items()}
    for figure in ("linear_probe/top1", "knn/top1"):
        assert gains[f"I8 - plain, start {figure}"] == pytest.approx(0.1)
        assert gains[f"I8 - plain, {figure}"] == pytest.approx(0.02)
        assert gains[f"I8 - its start, {figure}"] == pytest.approx(0.12)
        assert gains[f"I8 - plain, added to {figure}"] == pytest.approx(-0.08)
    assert list(dinov2_small_images.gains_of({"I8": rows["I8"]})) == [
        f"I8 - its start, {figure}" for figure in ("linear_probe/top1", "knn/top1")
    ]


def test_neighbours_by_pixels():
    config = configs.load(
        f"{machine.ROOT}/configs/dinov2.py:small,plain",
        ["data.source=digits", "data.channels=1", "data.mean=(0.3,)", "data.std=(0.3,)", "data.image_size=(8,8)"],
    )
    assert dinov2_small_images.by_pixels(config) > 0.9


def test_colours_have_one_basis_and_turn_with_the_features():
    tokens = np.random.default_rng(0).normal(size=(3, 4, 5, 7)) * [9, 5, 3, 1, 1, 1, 1]
    colours, share = dinov2_features.principal_colours(np.stack([tokens, tokens[:, ::-1]]))
    assert colours.shape == (2, 3, 4, 5, 3) and colours.min() >= 0 and colours.max() <= 1 and 0.8 < share < 1
    np.testing.assert_array_equal(colours[1], colours[0][:, ::-1])
