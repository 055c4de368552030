"""The notebook on segmentation."""

import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_only_the_p4m_model_follows():
    text = notebook.run("segmentation")
    found = re.findall(r"(\w+): mean IoU ([\d.]+), pixels that follow shifts ([\d.]+), turns ([\d.]+)", text)
    miou, shifted, turned = ({name: float(row[k]) for name, *row in found} for k in range(3))
    assert miou["p4m"] > 0.35 and miou["plain"] > 0.27  # background alone has 0.2
    assert shifted["p4m"] == turned["p4m"] == 1 and shifted["plain"] < 0.98 and turned["plain"] < 0.98
    changes = re.findall(r"(\w+), \w+, \(\d+, \d+\): ([\d.]+) of the pixels change", text)
    assert len(changes) == 8 and all(float(share) == 0 for name, share in changes if name == "p4m")
    assert re.search(r"p4m: largest deviation of a logit under shifts \de-\d", text) and "plain: shift (" in text
