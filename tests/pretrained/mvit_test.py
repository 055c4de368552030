"""MViTv2 from timm's and Facebook's files and back, exact to the bit; misfits are reported."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models, pretrained
from equivit.models import zoo
from equivit.models.mvit.model import MViTConfig
from equivit.pretrained import mapping, mvit
from tests.parity.arrays import load
from tests.parity.mvit_test import FILES, weights
from tests.pretrained import torch_archive

SMALL = dict(width=8, depths=(2, 2), num_heads=2, image_size=(30, 44), num_classes=5, mlp_ratio=2.0)
CONFIGS = {
    "attention": MViTConfig(**SMALL),
    "mlp": MViTConfig(**SMALL, expand_attn=False),
    "class token": MViTConfig(**SMALL, class_token=True),
}
HINTS = dict(image_size=(30, 44))  # the map of 8x11 tokens is also that of 32x44 pixels


@functools.cache
def model(kind):
    abstract = jax.eval_shape(lambda: CONFIGS[kind].build(nnx.Rngs(0)))
    random = np.random.default_rng(0)
    return logical.from_logical(abstract, {t.name: random.normal(size=t.shape).astype("f") for t in tensors(abstract)})


def tensors(module):
    return [tensor for table in logical.tensors(module).values() for tensor in table.flat]


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize(
    ("flavour", "kind", "name"),
    [
        ("timm", "attention", "stages.1.blocks.0.shortcut_proj_attn.bias"),
        ("timm", "mlp", "stages.0.blocks.1.shortcut_proj_mlp.bias"),
        ("facebook", "mlp", "blocks.1.proj.bias"),
        ("facebook", "class token", "cls_token"),
    ],
)
def test_there_and_back(flavour, kind, name, tmp_path):
    """Through a file as the official ones are: of this container and with this ending."""
    written = pretrained.state_dict("timm", model(kind), flavour=flavour)
    assert name in written
    assert ("head.fc.weight" if flavour == "timm" else "head.projection.weight") in written
    torch_archive.write(tmp_path / "weights.pyth", {"epoch": 1, "model_state": written})
    found = pretrained.load("timm", tmp_path / "weights.pyth", **HINTS)
    assert found.config == CONFIGS[kind]
    same(logical.to_logical(found), logical.to_logical(model(kind)))


@pytest.mark.parametrize("path", FILES[:2], ids=lambda path: path.stem)
def test_timm_to_ours_to_timm(path):
    theirs = weights(load(path))
    same(pretrained.state_dict("timm", pretrained.load("timm", theirs)), theirs)


def test_what_a_file_tells():
    """All fields, of timm's file of the tiny model, which has 242 tensors, and of the official one."""
    m = zoo.abstract("mvitv2_t")
    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in tensors(m)}
    for flavour in ("timm", "facebook"):
        theirs = mapping.write(mvit.table(m.config, flavour), zeros, flavour)
        assert mvit.FORMAT.infer(theirs) == (zoo.configuration("mvitv2_t"), flavour) and len(theirs) == 242


def test_positions_around_the_torus_have_no_file():
    """They have other tables; the other parts leave all tensors as they are."""
    written = pretrained.state_dict("timm", model("attention"))
    with pytest.raises(ValueError, match=r"timm: adaptive=True has .*; load the model without it, .* models\.adapt\(m"):
        pretrained.load("timm", written, adaptive=True, **HINTS)
    found = pretrained.load("timm", written, adaptive=("token", "pool"), **HINTS)
    same(pretrained.state_dict("timm", models.reconfigure(found, adaptive=False)[0]), written)
    with pytest.raises(ValueError, match=r"cannot hold a model with adaptive=\('token', 'pool'\); its code has False"):
        pretrained.state_dict("timm", found)
    adapted = zoo.abstract("mvitv2_t", **SMALL, adaptive=("position",))
    with pytest.raises(
        ValueError, match="timm: has no names for the positions around the torus of an adaptive MViT; k"
    ):
        pretrained.state_dict("timm", adapted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_heads=2), r"timm: num_heads=2, but the weights are those of \(2, 4\)"),
        (dict(image_size=(64, 64)), r"timm: image_size=\(64, 64\), but the weights are those of \(32, 44\)"),
        (dict(image_size=30), r"timm: image_size=30 must be \(height, width\) in pixels"),
        (dict(window_size=7), r"timm: window_size=\(7, 7\), but its models have none"),
    ],
)
def test_wrong_hints(arguments, message):
    with pytest.raises(ValueError, match=message):
        pretrained.load("timm", pretrained.state_dict("timm", model("attention")), **arguments)


def test_what_does_not_fit_is_told():
    theirs = pretrained.state_dict("timm", model("attention"))
    name = "stages.0.blocks.0.attn.norm_q.weight"
    with pytest.raises(ValueError, match=f"timm: no tensor '{name}'"):
        pretrained.load("timm", {key: value for key, value in theirs.items() if key != name})
    with pytest.raises(
        ValueError, match=r"unexpected: pos_embed; misshapen: stages.1.blocks.1.attn.rel_pos_h \(9, 16\)"
    ):
        name = "stages.1.blocks.1.attn.rel_pos_h"
        pretrained.load("timm", theirs | {name: np.ones((9, 16), "f"), "pos_embed": np.ones((1, 88, 8), "f")})
    with pytest.raises(ValueError, match="timm: flavour='microsoft' is not one of timm, facebook"):
        pretrained.state_dict("timm", model("attention"), flavour="microsoft")
