"""CvT from the files of its two codes and back, exact to the bit; misfits are reported."""

import functools

import numpy as np
import pytest
from flax import nnx

from equivit import convert, logical, models, pretrained
from equivit.models import zoo
from equivit.pretrained import cvt, mapping, reading
from tests.parity.arrays import load, state
from tests.parity.cvt_test import FILES, flavour, hints

SMALL = dict(widths=(8, 12), depths=(2, 1), num_heads=(2, 3), kernels=(7, 3), strides=(4, 2), paddings=(2, 1))
SMALL |= dict(num_classes=5, mlp_ratio=2.0)
HINTS = dict(num_heads=(2, 3))
BATCHES = "num_batches_tracked"
ACTIVATIONS = {"transformers": "gelu", "microsoft": "quick_gelu"}


@functools.cache
def model(**options):
    abstract, random = zoo.abstract("cvt_13", **SMALL | options), np.random.default_rng(0)
    arrays = {t.name: random.normal(size=t.shape).astype("f") for t in tensors(abstract)}
    return logical.from_logical(abstract, arrays, pretrained.STORED)


def tensors(module):
    return [tensor for table in logical.tensors(module, pretrained.STORED).values() for tensor in table.flat]


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(("flavour", "class_token"), [("transformers", False), ("microsoft", True)])
def test_there_and_back(flavour, class_token):
    m = model(class_token=class_token, activation=ACTIVATIONS[flavour])
    written = pretrained.state_dict("cvt", m)
    assert ("head.weight" in written) == (flavour == "microsoft")  # that of the activation, unless told
    assert any(name.endswith("running_var") for name in written)
    found = pretrained.load("cvt", written, **HINTS)
    assert found.config == m.config
    same(logical.to_logical(found, nnx.Variable), logical.to_logical(m, nnx.Variable))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_to_ours_and_back(path):
    data = load(path)
    weights = {name: tensor for name, tensor in state(data).items() if BATCHES not in name}
    found = pretrained.load("cvt", state(data), **hints(path))
    same(pretrained.state_dict("cvt", found, flavour=flavour(data)), weights)


def test_numbers_of_batches_are_left_out(capsys):
    """All blocks in one line; our batch norms have a fixed momentum and need no counts."""
    m = model()
    written = pretrained.state_dict("cvt", m)
    norms = [name.removesuffix("running_mean") for name in written if name.endswith("running_mean")]
    counts = {f"{name}{BATCHES}": np.int64(7) for name in norms}
    assert len(counts) == 9
    found = pretrained.load("cvt", {"model": {**written, **counts}}, **HINTS)
    listed = ", ".join(f"stage*.blocks.*.attn.conv_proj_{name}.bn.{BATCHES} (3)" for name in "qkv")
    assert capsys.readouterr().out == f"cvt: dropped on purpose: {listed}.\n"
    same(logical.to_logical(found), logical.to_logical(m))


@pytest.mark.parametrize(("name", "flavour"), [("cvt_13", "transformers"), ("cvt_21", "microsoft")])
def test_what_a_file_tells(name, flavour):
    """Sizes, and heads of 64 channels as all published models have."""
    config = zoo.configuration(name, activation=ACTIVATIONS[flavour])
    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in tensors(zoo.abstract(name))}
    weights = mapping.write(cvt.table(config, flavour), zeros, name)
    assert cvt.FORMAT.infer(weights) == (config, flavour)
    assert len(weights) == 459 - 3 * 13 or name != "cvt_13"  # of the published file, without numbers of batches


def test_the_flavour_implies_the_activation_unless_told():
    weights = pretrained.state_dict("cvt", model(), flavour="transformers")
    assert pretrained.load("cvt", weights, **HINTS).config.activation == "gelu"
    options = dict(activation="quick_gelu", padding="circular", drop_path=(0.0, 0.1))
    found = pretrained.load("cvt", weights, **HINTS, **options)
    assert {name: getattr(found.config, name) for name in options} == options


def test_the_command(tmp_path, capsys):
    m = model()
    reading.write(tmp_path / "weights.npz", pretrained.state_dict("cvt", m))
    there = [f"--input={tmp_path / 'weights.npz'}", f"--output={tmp_path / 'model'}", "--source=cvt"]
    assert convert.main([*there, "--num_heads=2,3"]) == 0
    assert "CvT, widths 8-12, depths 2-1, 2-3 heads" in capsys.readouterr().out
    back = [f"--input={tmp_path / 'model'}", f"--output={tmp_path / 'back.npz'}", "--to=cvt", "--flavour=transformers"]
    assert convert.main(back) == 0
    same(reading.read(tmp_path / "back.npz"), pretrained.state_dict("cvt", m, flavour="transformers"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "cvt: stage 0 is 8 wide, not a multiple of the 64 channels per head of published models; give num_"),
        (dict(num_heads=2), "cvt: num_heads=2 must be one or more positive whole numbers"),
        (dict(num_heads=(2, 3, 1)), r"num_heads=\(2, 3, 1\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(HINTS, window_size=5), r"cvt: window_size=\(5, 5\), but its models have none"),
        (dict(HINTS, strides=(4,)), r"strides=\(4,\) and depths=\(2, 1\) must have one entry"),
        (dict(HINTS, class_token=False), "unexpected: stage1.cls_token"),
    ],
)
def test_wrong_hints(arguments, message):
    with pytest.raises(ValueError, match=message):
        pretrained.load("cvt", pretrained.state_dict("cvt", model()), **arguments)


def test_files_that_are_none():
    with pytest.raises(ValueError, match="cvt: no tensor 'cvt.encoder.stages.0.embedding.convolution_embeddings.proj"):
        pretrained.load("cvt", {"stage.weight": np.ones(3, np.float32)})
    weights = pretrained.state_dict("cvt", model())
    del weights["stage0.blocks.0.attn.conv_proj_k.bn.running_mean"]
    with pytest.raises(ValueError, match="missing: stage0.blocks.0.attn.conv_proj_k.bn.running_mean"):
        pretrained.load("cvt", weights, **HINTS)
    with pytest.raises(ValueError, match="cvt: cannot hold a Swin; its models have a CvTConfig"):
        pretrained.state_dict("cvt", zoo.abstract("swin_t"))
    with pytest.raises(ValueError, match="cvt: flavour='timm' is not one of transformers, microsoft"):
        pretrained.state_dict("cvt", model(), flavour="timm")
    for fields, message in ((dict(padding="circular"), "padding='circular'; its"), (dict(adaptive=True), "adaptive=T")):
        with pytest.raises(ValueError, match=f"cvt: cannot hold a model with {message}"):
            pretrained.state_dict("cvt", models.reconfigure(model(), **fields)[0])
