"""SHViT and EfficientViT from timm's files and back, exact to the bit; what a file tells, and what does not fit."""

import functools

import numpy as np
import pytest

from equivit import convert, logical, pretrained
from equivit.models import zoo
from equivit.pretrained import efficientvit, mapping, reading, shvit

SMALL = {
    "shvit_s1": dict(widths=(8, 12), depths=(1, 2), partial_widths=(0, 5), qk_width=4, num_classes=5),
    "efficientvit_b0": dict(
        widths=(4, 4, 6, 8, 12), depths=(2, 1, 2, 1, 2), neck_widths=(10, 9), head_channels=4, num_classes=5
    ),
}
either = pytest.mark.parametrize("name", SMALL)


@functools.cache
def model(name):
    abstract, random = zoo.abstract(name, **SMALL[name]), np.random.default_rng(0)
    arrays = {t.name: random.normal(size=t.shape).astype("f") for t in tensors(abstract)}
    return logical.from_logical(abstract, arrays, pretrained.STORED)


def tensors(module):
    return [tensor for table in logical.tensors(module, pretrained.STORED).values() for tensor in table.flat]


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_there_and_back_by_the_command(tmp_path, capsys):
    """With the numbers of batches of timm's files, which our batch norms do not need."""
    written = pretrained.state_dict("timm", model("shvit_s1"))
    counts = {key.replace("running_mean", "num_batches_tracked"): np.int64(7) for key in written if "mean" in key}
    reading.write(tmp_path / "weights.npz", written | counts)
    there = [f"--input={tmp_path / 'weights.npz'}", f"--output={tmp_path / 'model'}", "--source=timm"]
    assert convert.main([*there, "--image_size=49,80"]) == 0
    assert "dropped on purpose" in capsys.readouterr().out
    back = [f"--input={tmp_path / 'model'}", f"--output={tmp_path / 'back.npz'}", "--to=timm"]
    assert convert.main(back) == 0
    same(reading.read(tmp_path / "back.npz"), written)


@pytest.mark.parametrize(("name", "file"), [("shvit_s3", shvit), ("efficientvit_b1", efficientvit)])
def test_what_a_file_tells(name, file):
    config = zoo.configuration(name)
    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in tensors(zoo.abstract(name))}
    weights = mapping.write(file.table(config, "timm"), zeros, name)
    assert file.FORMAT.infer(weights) == (config, "timm")


def test_a_new_head_keeps_its_norm(capsys):
    weights = pretrained.state_dict("timm", model("shvit_s1"))
    found = pretrained.load("timm", weights, num_classes=3, drop_path=(0.0, 0.2))
    assert found.config.drop_path == (0.0, 0.2) and found.head.linear.weight.shape == (12, 3)
    np.testing.assert_array_equal(found.head.norm.mean[...], weights["head.bn.running_mean"])
    assert capsys.readouterr().out == "timm: dropped on purpose: head.l.weight, head.l.bias.\n"


@either
def test_files_that_are_incomplete(name):
    weights = pretrained.state_dict("timm", model(name))
    wrong = next(key for key in weights if key.startswith("stages.1") and key.endswith("running_var"))
    del weights[wrong]
    with pytest.raises(ValueError, match=f"missing: {wrong}"):
        pretrained.load("timm", weights)
