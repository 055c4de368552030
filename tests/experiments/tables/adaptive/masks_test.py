"""The pictures of shifted label maps: copies, their common part, and boxes."""

from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from equivit.models import zoo
from experiments.tables.adaptive import masks as script
from tests.experiments import scripts

IMAGES = np.random.default_rng(0).integers(1, 200, (4, 8, 6, 3)).astype(np.uint8)
OFFSETS = np.array([[2, 1], [-2, 1], [1, -3], [-1, -1]])


@pytest.mark.parametrize("kind", ["circular", "zeros"])
def test_copies(kind):
    copies = script.shifted(IMAGES, OFFSETS, kind, np.array([0, 0, 0]))
    for image, copy, (down, right) in zip(IMAGES, copies, OFFSETS, strict=True):
        for row, column in np.ndindex(8, 6):
            inside = 0 <= row - down < 8 and 0 <= column - right < 6
            expected = image[(row - down) % 8, (column - right) % 6] if inside or kind == "circular" else 0
            np.testing.assert_array_equal(copy[row, column], expected)


@pytest.mark.parametrize("kind", ["circular", "zeros"])
def test_a_model_that_follows_shifts_changes_no_visible_pixel(kind, monkeypatch):
    """One whose classes are the colours of pixels; one that knows rows changes most."""

    def predictor(model, *given):
        rows = np.arange(8)[:, None] % 2 if model == "rows" else 0
        return lambda images: np.eye(256)[images[..., 0].astype(int) + rows]

    monkeypatch.setattr(script.predictions, "predictor", predictor)
    config = ConfigDict(dict(data=dict(mean=(0.5,), std=(0.5,)), precision="float32"))
    upright, back, changed = script.compared(SimpleNamespace(model="colours", config=config), IMAGES, OFFSETS, kind)
    assert not changed.any() and (back == -1).any() == (kind == "zeros")
    np.testing.assert_array_equal(upright[back >= 0], back[back >= 0])
    _, back, changed = script.compared(SimpleNamespace(model="rows", config=config), IMAGES, OFFSETS, kind)
    assert script.percent(back[2], changed[2]) == 100 and script.percent(back[0], changed[0]) == 0  # of what both show
    assert changed[2:].mean() > 0.4 and not changed[:2].any()  # an even shift keeps the parity of rows


def test_boxes_are_around_groups():
    changed = np.zeros((40, 30), bool)
    changed[3:6, 4:10] = changed[5, 12] = True  # near enough to be one
    changed[30:32, 20:22] = True
    changed[20, 5] = True  # a single pixel has no box
    assert script.boxes(changed) == [(3, 4, 3, 9), (30, 20, 2, 2)]


def test_what_is_no_run_of_label_maps_is_told(tmp_path, monkeypatch, capsys):
    assert scripts.status(script, [str(tmp_path / "none")]) == 1
    assert "none holds no config.json; give the --workdir of a run" in capsys.readouterr().err
    classifier = SimpleNamespace(model=SimpleNamespace(config=zoo.configuration("swin_t")))
    monkeypatch.setattr(script.checkpoints, "load_run", lambda path: classifier)
    assert scripts.status(script, [str(tmp_path)]) == 1
    assert "its model has no label maps; give a run of configs/segment.py" in capsys.readouterr().err
