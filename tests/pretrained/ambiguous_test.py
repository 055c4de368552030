"""Nothing about a file is guessed in silence: its positions, which of several sets of weights, NaN."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from equivit import convert, pretrained, testing
from equivit.layers.rngs import Keys
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import reading
from tests.pretrained import torch_archive

TINY: dict[str, Any] = dict(width=8, depth=1, num_heads=2, patch_size=2, num_classes=3)


def weights(grid, source="timm", flavour="timm", class_position=False, **fields):
    """The file of a tiny model for this many patches."""
    size = (2 * grid[0], 2 * grid[1])
    common: dict[str, Any] = dict(image_size=size, class_position=class_position, position_antialias=True)
    config = ViTConfig(**TINY | common | fields)
    model = testing.randomise(jax.eval_shape(lambda: config.build(Keys(0))), jax.random.key(0))
    return pretrained.state_dict(source, model, flavour=flavour)


def found(state, source="timm", **hints):
    config = pretrained.load(source, state, num_heads=2, **hints).config
    return config.image_size, config.class_position


def test_a_table_for_a_square_or_a_class_token_and_a_rectangle_is_asked_for():
    """225 rows: 15 x 15, or 1 + 14 x 16."""
    square, rectangle = weights((15, 15)), weights((14, 16), class_position=True)
    assert square["pos_embed"].shape == rectangle["pos_embed"].shape == (1, 225, 8)
    for state in (square, rectangle):
        with pytest.raises(ValueError, match=r"pos_embed has 225 rows: 15x15 .*image_size=\(30, 30\) or \(28, 32\) or"):
            pretrained.load("timm", state, num_heads=2)
    for size, token in (((30, 30), False), ((28, 32), True), ((32, 28), True)):
        assert found(square, image_size=size) == (size, token)


def test_a_flavour_whose_files_are_alike_decides(capsys):
    assert found(weights((15, 15), flavour="deit3")) == ((30, 30), False)
    assert found(weights((15, 15), registers=4)) == ((30, 30), False)
    hub = weights((14, 16), flavour="dinov2", class_position=True, mask_token=True)
    with pytest.raises(ValueError, match="225 rows: 15x15 patches, or a class token and 14x16; give image_size="):
        pretrained.load("timm", hub, num_heads=2)
    assert found(hub, image_size=(28, 32)) == ((28, 32), True)
    assert capsys.readouterr().out == ""


def test_a_square_of_an_even_side_is_taken_with_a_line(capsys):
    """Teachers of DeiT III have 14 x 14; with a class token the image would be 13 x 15 patches."""
    assert found(weights((6, 6))) == ((12, 12), False)
    assert "timm: pos_embed has 36 rows: taken as 6x6 patches without a class token.\n" in capsys.readouterr().out
    assert found(weights((6, 6), class_position=True)) == ((12, 12), True)
    assert "taken as" not in capsys.readouterr().out


@pytest.fixture
def checkpoint(tmp_path):
    """Twice the same tensors: of ones, and of twos."""
    ones = {name: np.ones_like(tensor) for name, tensor in weights((2, 2)).items()}
    averaged = {f"module.{name}": 2 * tensor for name, tensor in ones.items()}
    content = dict(epoch=3, optimizer={"state": {0: ones}}, state_dict=ones, state_dict_ema=averaged)
    torch_archive.write(tmp_path / "last.pth", content)
    return tmp_path / "last.pth"


def test_which_weights_of_a_checkpoint_are_taken_is_printed_and_chosen(checkpoint, tmp_path, capsys):
    model = pretrained.load("timm", checkpoint, num_heads=2)
    assert "using 'state_dict', not 'state_dict_ema' (choose with checkpoint_key=)" in capsys.readouterr().out
    assert model.head.bias[0] == 1
    model = pretrained.load("timm", checkpoint, num_heads=2, checkpoint_key="state_dict_ema")
    assert "taken" not in capsys.readouterr().out and model.head.bias[0] == 2
    with pytest.raises(ValueError, match="checkpoint_key='state_dict_em' is not .* the nearest is 'state_dict_ema'"):
        pretrained.load("timm", checkpoint, checkpoint_key="state_dict_em")
    command = ["--source=timm", f"--input={checkpoint}", f"--output={tmp_path / 'model'}", "--num_heads=2"]
    assert convert.main([*command, "--checkpoint_key=state_dict_ema"]) == 0
    assert "taken" not in capsys.readouterr().out


@pytest.mark.parametrize("taken, other", [("model", "model_ema"), ("teacher", "student"), ("model", "ema")])
def test_sets_of_weights_by_any_name(taken, other):
    ones = {"a": np.ones(1), "b": np.ones(1)}
    twos = {f"_orig_mod.{name}": 2 * tensor for name, tensor in ones.items()}
    content = {other: twos, taken: ones, "loss": {"center": np.ones(1)}}
    assert reading.unpacked(content) == (ones, f"'{taken}', not '{other}'")
    assert reading.unpacked({"model_state": content}, other) == (twos, "")
    assert reading.unpacked({taken: ones, "loss": {"center": np.ones(1)}}) == (ones, "")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_weights_that_are_not_finite_are_named(value):
    state = {name: tensor.astype(np.float64) for name, tensor in weights((2, 2)).items()}
    state["blocks.0.mlp.fc1.bias"][3] = state["head.weight"][0, 0] = value
    with pytest.raises(ValueError, match="not finite, as .*: blocks.0.mlp.fc1.bias, head.weight.$"):
        pretrained.load("timm", state, num_heads=2)


def test_a_bfloat16_weight_that_is_not_finite_is_named_and_one_that_is_left_out_is_not():
    state = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights((2, 2)).items()}
    state["dino_head.mlp.0.weight"] = np.full((2, 2), -np.inf, np.float32)
    pretrained.load("timm", state, num_heads=2)
    state["norm.bias"][0] = np.nan
    with pytest.raises(ValueError, match="not finite, as .*: norm.bias.$"):
        pretrained.load("timm", state, num_heads=2)


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("patch_embed.proj.weight", np.ones((8, 3, 0, 2), np.float32), r"weight \(8, 3, 0, 2\) is empty"),
        ("head.bias", np.array(["a", "b", "c"]), "'head.bias' is of type <U1, not of numbers"),
        ("head.bias", np.zeros(3, "M8[s]"), "'head.bias' is of type .* not of numbers"),
        ("head.bias", np.ones(3, np.complex64), r"not floating point: head.bias \(complex64\)"),
        ("head\n.bias", np.ones(3, np.float32), r"a tensor is named 'head\\n.bias', which cannot be printed"),
    ],
)
def test_tensors_that_are_no_weights(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        pretrained.load("timm", weights((2, 2)) | {name: tensor}, num_heads=2)
