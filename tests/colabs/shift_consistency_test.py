"""The notebook on shift consistency."""

import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_only_the_adaptive_model_is_consistent():
    text = notebook.run("shift_consistency", shorter={"steps = 200": "steps = 150"})
    found = re.findall(r"(\w+) +accuracy ([\d.]+), consistency ([\d.]+): (\d+) of 180 images change", text)
    accuracy, share, changed = ({name: float(row[k]) for name, *row in found} for k in range(3))
    assert accuracy["ordinary"] > 0.85 and accuracy["adaptive"] > 0.6  # chance is 0.2
    assert changed["adaptive"] == changed["adapted"] == 0 and share["adaptive"] == share["adapted"] == 1
    assert changed["ordinary"] > 50 and share["ordinary"] < 0.8
    predicted = {name: set(classes.split()) for name, classes in re.findall(r"(\w+): ((?:\d ?){12})\n", text)}
    assert len(predicted["adaptive"]) == 1 < len(predicted["ordinary"])
    assert "ordinary: shift (0, 1): the grid of image 0 begins at (0, 0) and not at (0, 1)" in text
    assert "chosen stride: equivariant" in text and "ordinary stride: shift (0, 1): the grid" in text
