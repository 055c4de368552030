"""configs/depthwise.py: the stages, what is trained in each, and stage 2 that begins with stage 1's decoder."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, train
from equivit.configs import depthwise
from equivit.evaluation import figures
from equivit.models import saved
from equivit.objectives.gated import GateOptions
from equivit.training import build, checkpoints, freezing
from equivit.training import config as configs

FILE = pathlib.Path(__file__).parents[2] / "configs" / "depthwise.py"
HALF = "model.replaced=" + repr(tuple((i,) for i in range(12)))


def load(mode, *overrides):
    config = configs.load(f"{FILE}:{mode}", overrides)
    with config.unlocked():
        config.model.update(in_channels=3, num_classes=config.model.get("num_classes", 1000))
    return config


def built(config):
    """The module to train, with shapes instead of arrays."""
    objective = build.make_objective(config)
    return objective, jax.eval_shape(lambda: objective.module(build.make_model(config, nnx.Rngs(0)), jax.random.key(0)))


def test_only_the_replaced_modules_train():
    """Table A.1: 25.3 M; a value, a projection, nine taps and a bias a channel in each of twelve blocks."""
    objective, module = built(load("frozen", HALF))
    trained = 12 * (2 * (1024 * 1024 + 1024) + 10 * 1024)
    assert freezing.summary(objective, module).startswith(f"{trained:,} of 283,")  # of the paper's 284.4 M
    rule = freezing.rule(objective, logical.tensors(module))
    rules = {t.name: rule(t) for table in logical.tensors(module).values() for t in table.flat}
    moving = {name for name, found in rules.items() if not found.frozen}
    parts = ("value.weight", "value.bias", "proj.weight", "proj.bias", "taps", "bias")
    assert moving == {f"backbone.blocks.{i}.attention.{part}" for i in range(12) for part in parts}
    attention = "backbone.blocks.3.attention."
    assert rules[f"{attention}proj.weight"].decay and not rules[f"{attention}taps"].decay


def test_stages():
    """The second takes half of the epochs and of the batch, at the same rate; one stage is as long as the first."""
    for task, epochs in (("coco", 100), ("ade20k", 100), ("in1k", 50)):
        first = load(f"{task},mae_b16")
        assert (first.epochs, first.batch_size) == (epochs, 1024)
        for stage, parts in (("stage2", 2), ("frozen", 2), ("one_stage", 1)):
            other = load(f"{task},mae_b16,{stage}", "model.replaced=((3,),(5,'ens_dw'))")
            assert (other.epochs, other.batch_size) == (epochs // parts, 1024 // parts)
            expected = {"model.replaced", *(("epochs", "batch_size") if parts == 2 else ())}
            expected |= {"optimizer.freeze"} if stage == "frozen" else set()
            assert set(configs.differences(first, other)) == expected
        gates = load(f"{task},mae_b16,gated")
        added = [field.name for field in dataclasses.fields(GateOptions)]
        expected = {"epochs", "batch_size", *(f"objective.{key}" for key in ("name", *added))}
        assert set(configs.differences(first, gates)) == expected and gates.objective.gates == 6


@pytest.mark.parametrize(
    ("mode", "positions"),
    [
        ("coco,dinov2_b14", ["backbone.position.table"]),
        ("in1k,clip_b16", ["position.table"]),
        ("ade20k,dinov2_b14,gated", ["model.backbone.position.table"]),
        ("coco,mae_b16", []),  # fixed
    ],
)
def test_positions_are_not_trained(mode, positions):
    objective, module = built(load(mode))
    rule = freezing.rule(objective, logical.tensors(module))
    assert [t.name for table in logical.tensors(module).values() for t in table.flat if rule(t).frozen] == positions


def test_the_decoder_reads_four_maps():
    """They are the released ones for 24 blocks."""
    found = {depth: (*depthwise.read(depth), depth - 1) for depth in (24, 12, 40, 6, 2)}
    assert found == {24: (4, 11, 17, 23), 12: (2, 5, 8, 11), 40: (8, 19, 29, 39), 6: (1, 2, 4, 5), 2: (0, 1)}
    assert load("coco,dinov2_l14").objective.blocks == (4, 11, 17)


def test_which_blocks_are_replaced_must_be_said():
    message = r"config.model.replaced is missing: give .*='\(\(3,\), \(5,\)\)'; train stage1 first, and select"
    with pytest.raises(ValueError, match=message) as raised:
        load("stage2")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backbone", ["dinov2_b14", "dinov2_l14", "mae_b16", "mae_l16", "clip_b16", "clip_l14"])
def test_backbones_have_patches_alone(backbone):
    model = build.model_configuration(load(f"ade20k,{backbone}"))
    assert not model.prefix and model.patch_size == (int(backbone[-2:]),) * 2
    assert (model.pre_norm, model.mlp) == ((True, "quick_gelu") if "clip" in backbone else (False, "gelu"))


def test_stage_2_begins_with_stage_1_and_trains_what_is_new(tmp_path, monkeypatch, capsys):
    for draw in ("learning_curves", "patch_filters", "label_maps"):
        monkeypatch.setattr(figures, draw, lambda *given: [a.touch() for a in given if isinstance(a, pathlib.Path)])
    _, shapes = built(load("stage1,quicktest"))
    rng, table = np.random.default_rng(0), logical.tensors(shapes, nnx.Variable).values()
    first = {t.name: rng.normal(size=t.shape).astype(np.float32) / 9 for tensors in table for t in tensors.flat}
    saved.save(tmp_path / "first", logical.from_logical(shapes, first, nnx.Variable))
    options = ("checkpoint.every_steps=None", "data.eval_examples=8", f"init={tmp_path / 'first'}")
    report = train.train(configs.load(f"{FILE}:frozen,quicktest", options), tmp_path / "second")
    assert report["step"] == 2 and 0 <= report["eval/segmentation/miou"] <= 1
    said = capsys.readouterr().out
    assert "first: its decoder is taken too; attention replaced in 1 blocks: 0.\n" in said  # a segmenter draws no head
    assert " parameters are trained." in said
    second = logical.to_logical(checkpoints.load_run(tmp_path / "second").model, nnx.Variable)
    block = "backbone.blocks.0.attention."
    for name in second:
        if name.startswith(block):
            old = first.get(name)
            assert old is None or not np.array_equal(second[name], old), name
        else:
            np.testing.assert_array_equal(second[name], first[name], err_msg=name)
    assert first.keys() - second.keys() == {f"{block}qkv.{part}" for part in ("weight", "bias")}
