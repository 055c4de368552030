"""The SAR demonstration: its corruptions, and what it prints of figures made by hand."""

import argparse
import json

import numpy as np
import pytest

from equivit.data.corruptions import NAMES
from experiments.studies import jumbo_sar

BATCH = dict(
    image=np.random.default_rng(0).integers(0, 256, (6, 12, 20, 3), np.uint8), index=np.array([4, 0, 3, 2, 1, -1])
)


@pytest.mark.parametrize("name", jumbo_sar.OWN)
def test_a_corruption_depends_on_seed_and_place_only(name):
    draw = jumbo_sar.OWN[name]
    images = jumbo_sar.corrupt(BATCH, draw, 0)["image"]
    assert images.shape == BATCH["image"].shape and images.dtype == np.uint8 and name in NAMES
    assert np.abs(images.astype(int) - BATCH["image"]).mean() > 2
    part = {key: value[2:4] for key, value in BATCH.items()}
    assert np.array_equal(jumbo_sar.corrupt(part, draw, 0)["image"], images[2:4])
    random = name.endswith("noise")
    assert random != np.array_equal(jumbo_sar.corrupt(BATCH, draw, 1)["image"], images)


@pytest.mark.parametrize(("adapted", "status"), [(0.5, 0), (0.2, 1)])
def test_the_table_and_the_exit_status(adapted, status, tmp_path, capsys):
    names = ("contrast", "pixelate")
    result = [{"unadapted_top1": 0.4, "top1": adapted, "kept": 0.25}]
    runs = {kind: dict.fromkeys(("clean", *names), result) for kind in jumbo_sar.MODELS}
    options = argparse.Namespace(
        library=False, lr=0.001, seeds=[0], override=[], output=tmp_path / "sar.json", entry="main"
    )
    assert jumbo_sar.show(runs, names, options) == status
    output = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in output.splitlines()}
    assert rows[""] == ["clean", "Contr.", "Pixel", "Avg."]
    assert rows["ours Jumbo+SAR"] == [f"{100 * adapted:.1f}"] * 4
    assert rows["paper Jumbo"] == ["49.4", "47.5", "48.5"]  # of these two; 48.45
    assert "one seed resolves nothing" in output and "25 % of the images" in output
    assert json.loads((tmp_path / "sar.json").read_text())["main"]["runs"]["Jumbo"]["contrast"] == result
