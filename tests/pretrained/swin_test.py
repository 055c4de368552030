"""Swin transformers from timm's and Microsoft's files and back, exact to the bit; misfits are reported."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import convert, logical, models, pretrained
from equivit.models import zoo
from equivit.models.swin.model import SwinConfig
from equivit.pretrained import mapping, reading, swin
from tests.parity.arrays import load, state
from tests.parity.swin_test import FILES, hints

# Maps of 8x12 and 4x6 tokens: of the second stage the height is one window.
SMALL = dict(width=8, depths=(2, 1), num_heads=(2, 4), image_size=(32, 48), num_classes=5, mlp_ratio=2.0)
CONFIGS = {version: SwinConfig(**SMALL, version=version, window_size=(5, 5)) for version in (1, 2)}
HINTS = dict(image_size=(32, 48), window_size=5)
either = pytest.mark.parametrize("version", CONFIGS)


@functools.cache
def model(version):
    abstract = jax.eval_shape(lambda: CONFIGS[version].build(nnx.Rngs(0)))
    random = np.random.default_rng(version)
    return logical.from_logical(abstract, {t.name: random.normal(size=t.shape).astype("f") for t in tensors(abstract)})


def tensors(module):
    return [tensor for table in logical.tensors(module).values() for tensor in table.flat]


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@either
@pytest.mark.parametrize("flavour", ["timm", "microsoft"])
def test_there_and_back(version, flavour):
    written = pretrained.state_dict("timm", model(version), flavour=flavour)
    assert ("head.fc.weight" in written) == (flavour == "timm")
    merging = "layers.0.downsample.norm.bias" if flavour == "microsoft" else "layers.1.downsample.norm.bias"
    assert merging in written
    found = pretrained.load("timm", written, **HINTS)
    assert found.config == CONFIGS[version]
    same(logical.to_logical(found), logical.to_logical(model(version)))
    assert pretrained.FORMATS["timm"].flavours == ("timm", "deit3", "dinov2")  # those of plain ViTs are their own


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_timm_to_ours_to_timm(path):
    weights = state(load(path))
    same(pretrained.state_dict("timm", pretrained.load("timm", weights, **hints(path))), weights)


@either
def test_tables_that_follow_from_the_sizes_are_left_out(version, capsys):
    """As the official files have them, in their container."""
    written = pretrained.state_dict("timm", model(version), flavour="microsoft")
    at = "layers.0.blocks.1.attn"
    extra = {f"{at}.relative_position_index": np.zeros((25, 25), np.int64), "layers.0.blocks.1.attn_mask": np.ones(1)}
    extra |= {f"{at}.relative_coords_table": np.zeros((1, 9, 9, 2))} if version == 2 else {}
    found = pretrained.load("timm", {"model": {**written, **extra}}, **HINTS)
    assert capsys.readouterr().out == f"timm: dropped on purpose: {', '.join(extra)}.\n"
    same(pretrained.state_dict("timm", found, flavour="microsoft"), written)


def test_what_a_file_tells():
    """Heads; the window, and the image whose last map is one; of version 2 the sizes of the published models."""
    for name, number in (("swin_t", 173), ("swinv2_t", 221)):  # tensors of timm's files
        m = zoo.abstract(name)
        zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in tensors(m)}
        weights = mapping.write(swin.table(m.config, "timm"), zeros, name)
        assert swin.FORMAT.infer(weights) == (zoo.configuration(name), "timm") and len(weights) == number


def test_a_new_head_and_options(capsys):
    weights = pretrained.state_dict("timm", model(1))
    found = pretrained.load("timm", weights, num_classes=3, drop_path=(0.0, 0.2), **HINTS)
    assert found.config.drop_path == (0.0, 0.2) and found.head.weight.shape == (16, 3)
    assert "head.fc.weight, head.fc.bias" in capsys.readouterr().out
    assert found.config.num_heads == (2, 4)


def test_the_command_takes_windows(tmp_path, capsys):
    reading.write(tmp_path / "weights.npz", pretrained.state_dict("timm", model(2)))
    there = [f"--input={tmp_path / 'weights.npz'}", f"--output={tmp_path / 'model'}", "--source=timm"]
    assert convert.main([*there, "--image_size=32,48", "--window_size=5,5", "--num_heads=2,4"]) == 0
    said = "Swin, width 8, version 2, depths 2-1, windows 5x5, 2-4 heads, patch 4x4"
    assert said in capsys.readouterr().out
    back = tmp_path / "back.npz"
    to = [f"--input={tmp_path / 'model'}", f"--output={back}", "--to=timm", "--flavour=microsoft"]
    assert convert.main(to) == 0
    same(reading.read(back), pretrained.state_dict("timm", model(2), flavour="microsoft"))
    assert convert.main([*to, "--window_size=5,5"]) == 1
    assert "--window_size is only for --source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "arguments", "message"),
    [
        (1, dict(num_heads=2), r"timm: num_heads=2, but the weights are those of \(2, 4\)"),
        (1, dict(image_size=(64, 64)), "layers.1.blocks.0.attn.relative_position_bias_table has 63 rows; with windows "
         "of 5x5 in images of 64x64 that stage has windows of 5x5, 81 rows. .*Give image_size= and window_size= of"),
        (1, dict(window_size=4), "with windows of 4x4 in images of 32x48 that stage has windows of 4x4, 49 rows"),
        (1, dict(window_size=0), r"timm: window_size=\(0, 0\) must be \(height, width\) in tokens"),
        (2, dict(window_size="5"), "timm: window_size='5' must be"),
        (2, dict(family="H8"), "timm: family='H8', but its models have none"),
    ],
)  # fmt: skip
def test_wrong_hints(version, arguments, message):
    with pytest.raises(ValueError, match=message):
        pretrained.load("timm", pretrained.state_dict("timm", model(version)), **HINTS | arguments)


def test_a_window_that_the_table_does_not_tell():
    weights = pretrained.state_dict("timm", model(1))
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    with pytest.raises(ValueError, match=f"{name} has 63 rows, not those of a square window; give window_size="):
        pretrained.load("timm", weights | {name: np.ones((63, 2), np.float32)})


def test_models_that_the_source_cannot_hold():
    with pytest.raises(ValueError, match="timm: cannot hold a PatchTST; its models have a ViTConfig or a SwinConfig"):
        pretrained.state_dict("timm", zoo.abstract("patchtst", length=20, channels=2, num_classes=3))
    with pytest.raises(ValueError, match="timm: flavour='deit3' is not one of timm, microsoft"):
        pretrained.state_dict("timm", model(1), flavour="deit3")


def test_an_adaptive_model_is_not_written():
    """Its tensors are the ordinary model's, whose function differs."""
    with pytest.raises(ValueError, match="timm: cannot hold a model with adaptive=True; .* before models.adapt"):
        pretrained.state_dict("timm", models.adapt(model(1)))
