"""The notebook on self-supervised training."""

import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_learns_and_no_turn_changes_a_class():
    text = notebook.run("octic_dinov2")
    before, after = map(float, re.findall(r"linear classifier \w+ training: ([\d.]+)", text))
    assert after > before > 0.2  # ten digits
    assert float(re.search(r"upright and turned: ([\d.]+) of the test images", text).group(1)) == 1
    assert "collapse" not in text and re.search(r"largest deviation \de-0[5-9]", text)
