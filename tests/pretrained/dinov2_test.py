"""DINOv2's files: spellings of one model, linear heads, training checkpoints and their heads, DinoBloom's."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import convert, logical, pretrained
from equivit.models import saved, zoo
from equivit.pretrained import dinov2, mapping
from tests.pretrained import torch_archive
from tests.pretrained.formats_test import same_model, written

PROTOTYPES, BOTTLENECK = 12, 6


def random_head(seed=0, width=64, hidden=10):
    random = np.random.default_rng(seed)
    sizes = {"mlp.0": (hidden, width), "mlp.2": (hidden, hidden), "mlp.4": (BOTTLENECK, hidden)}
    shapes = {f"{name}.weight": shape for name, shape in sizes.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in sizes.items()}
    shapes |= {"last_layer.weight_g": (PROTOTYPES, 1), "last_layer.weight_v": (PROTOTYPES, BOTTLENECK)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def training_checkpoint(state, chunk=2):
    """The teacher of a checkpoint, its blocks in chunks with numbers that count through all of them, and two heads."""
    chunked = {}
    for name, tensor in state.items():
        _, _, rest = name.partition("blocks.")
        index = rest.split(".")[0]
        chunked[f"backbone.blocks.{int(index) // chunk}.{rest}" if rest else f"backbone.{name}"] = tensor
    heads = {
        f"{name}.{key}": x for i, name in enumerate(("dino_head", "ibot_head")) for key, x in random_head(i).items()
    }
    return {"teacher": chunked | heads}


def broadcast(config):
    """Zeros that take no memory, by logical name."""
    shapes = jax.eval_shape(lambda: logical.to_logical(config.build(nnx.Rngs(0))))
    return {name: np.broadcast_to(np.float32(0), x.shape) for name, x in shapes.items()}


def test_all_spellings_hold_the_same_arrays():
    model, _, hub = written("hub")
    theirs = pretrained.state_dict("dinov2", model, flavour="transformers")
    qkv = [theirs[f"encoder.layer.2.attention.attention.{name}.weight"] for name in ("query", "key", "value")]
    np.testing.assert_array_equal(np.concatenate(qkv), hub["blocks.2.attn.qkv.weight"])
    wrapped = {f"dinov2.{name}": tensor for name, tensor in theirs.items()}
    same_model(pretrained.load("dinov2", wrapped, num_heads=2), model)
    same_model(pretrained.load("timm", hub, num_heads=2), model)
    with pytest.raises(ValueError, match="no counterpart for mask_token"):
        pretrained.state_dict("dinov2", model, flavour="timm")
    with pytest.raises(ValueError, match="dinov2: cannot hold a model with class_position=True"):
        pretrained.state_dict("dinov2", written("hub registers")[0], flavour="timm")


def test_training_checkpoints(tmp_path, capsys):
    model, _, state = written("hub")
    torch_archive.write(tmp_path / "teacher_checkpoint.pth", training_checkpoint(state))
    same_model(pretrained.load("dinov2", tmp_path / "teacher_checkpoint.pth", num_heads=2), model)
    assert "dropped on purpose: dino_head.mlp.*.weight (3), " in capsys.readouterr().out
    for seed, name in enumerate(("dino_head", "ibot_head")):
        head = dinov2.load_head(tmp_path / "teacher_checkpoint.pth", name)
        again, expected = dinov2.head_state(head), random_head(seed)
        assert again.keys() == expected.keys()
        for key, tensor in expected.items():
            np.testing.assert_array_equal(again[key], tensor, err_msg=key)
    alone = logical.to_logical(dinov2.load_head(random_head()))
    np.testing.assert_array_equal(alone["gains"], random_head()["last_layer.weight_g"][:, 0])
    np.testing.assert_array_equal(alone["mlp.fc2.weight"], random_head()["mlp.2.weight"].T)


def test_heads_that_are_none():
    with pytest.raises(ValueError, match="dinov2: there are no tensors of ibot_head; if both losses share"):
        dinov2.load_head({f"dino_head.{name}": x for name, x in random_head().items()}, "ibot_head")
    with pytest.raises(ValueError, match="dinov2: dino_head: the tensors do not fit.  unexpected: mlp.6.weight"):
        dinov2.load_head(random_head() | {"mlp.6.weight": np.ones((2, 2), np.float32)})


def test_dinobloom(tmp_path):
    """Backbones of the hub, tuned at 224 px without chunks: a table of 16 x 16 positions in place of 37 x 37."""
    config = zoo.configuration("dinov2_vit_s14", image_size=(224, 224), depth=1, mlp_dim=8)
    table = dinov2.table(config, "hub")
    state = mapping.write(table, broadcast(config), "DinoBloom")
    assert state["pos_embed"].shape == (1, 257, 384)
    found = pretrained.load("dinov2", training_checkpoint(state, chunk=1))
    assert found.config.image_size == (224, 224) and found.config.position_offset == 0.1


@pytest.mark.parametrize("name", ["hub linear", "hub linear4"])
def test_linear_heads_are_files_of_their_own(tmp_path, name):
    model, config, whole = written(name)
    head = {key.removeprefix("linear_head."): x for key, x in whole.items() if key.startswith("linear_head.")}
    backbone = {key: x for key, x in whole.items() if not key.startswith("linear_head.")}
    assert head["weight"].shape == (5, 64 * (1 + config.pool_blocks))
    torch_archive.write(tmp_path / "backbone.pth", backbone)
    torch_archive.write(tmp_path / "head.pth", head)
    there = ["--source=dinov2", f"--input={tmp_path / 'backbone.pth'}", f"--head={tmp_path / 'head.pth'}"]
    assert convert.main([*there, f"--output={tmp_path / 'model'}", "--num_heads=2"]) == 0
    same_model(saved.load(tmp_path / "model"), model)
    assert saved.load(tmp_path / "model").config == config
    with pytest.raises(ValueError, match="linear_head.weight reads 65 entries; the class tokens of n blocks"):
        pretrained.load("dinov2", backbone, num_heads=2, head=head | {"weight": np.ones((5, 65), np.float32)})


def test_what_a_linear_head_reads():
    """[class tokens of the last n blocks, mean patch token of the last], all after the final norm."""
    model = written("hub linear4")[0]
    images = np.random.default_rng(0).normal(size=(2, 24, 40, 3)).astype(np.float32)
    pooled, features = jax.jit(lambda m, x: (m.pooled(x), m.features(x, blocks=(0, 1, 2))))(model, images)
    expected = [features.blocks[i].cls for i in range(3)] + [features.patches.values.mean((1, 2))]
    np.testing.assert_allclose(pooled, np.concatenate(expected, -1), rtol=0, atol=1e-4 * np.abs(pooled).max())


COUNTS = {
    "dinov2_vit_s14": 22_056_576,
    "dinov2_vit_b14": 86_580_480,
    "dinov2_vit_l14": 304_368_640,
    "dinov2_vit_g14": 1_136_480_768,
    "dinov2_vit_b14_reg": 86_583_552,
    "dinov2_vit_l14_reg": 304_372_736,
}


@pytest.mark.parametrize("name", COUNTS)
def test_sizes_are_those_of_the_hub(name):
    config = zoo.configuration(name)
    tensors = broadcast(config)
    assert sum(tensor.size for tensor in tensors.values()) == COUNTS[name]
    state = mapping.write(dinov2.table(config, "hub"), tensors, name)
    assert len(state) == {12: 175, 24: 343, 40: 567}[config.depth] + (config.registers > 0)
    found, flavour = dinov2.FORMAT.infer(state)
    assert flavour == "hub" and found.hidden == config.hidden
    assert dataclasses.replace(found, mlp_dim=config.mlp_dim, token_std=config.token_std) == config
