"""The notebook on attention replaced by convolution."""

import importlib.util
import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_training_brings_back_what_replacing_lost():
    text = notebook.run("depthwise")
    found = {name: float(share) for name, share in re.findall(r"([\w, ]+): accuracy ([\d.]+)", text)}
    assert found["stage1"] > 0.6 and found["stage2"] > 0.6  # of ten classes
    assert found["replaced, not trained"] < found["stage2"]
    assert len(re.search(r"of the lowest Sigma: ([\d ]+)", text)[1].split()) == 2
    before, after = map(float, re.findall(r"([\d.]+) M operations an image", text))
    assert after < before
    if importlib.util.find_spec("jax2onnx"):
        assert len(re.findall(r"(?:attention|replaced): \d+ kB, deviates by \de-\d+", text)) == 2
        assert len(re.findall(r"(?:attention|replaced): \d+ microseconds", text)) == 2
    else:
        assert "jax2onnx is not installed" in text
    assert len(re.findall(r"block \d: taps \(3, 3, 32\)", text)) == 2
