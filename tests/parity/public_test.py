"""Folders of transformers and files of timm: outputs of small random models, computed in float64 (write_public.py)."""

import json

import jax
import numpy as np
import pytest

from equivit import pretrained
from equivit.pretrained import reading
from tests.parity.arrays import Comparison, files, images, load, state

FILES = files("public")
HINTS = {f"timm_{name}": dict(num_heads=3) for name in ("gap", "gap_norm", "fc_norm", "qk_norm", "siglip")}
# A distillation token becomes a register that includes its position, so its two parts come back joined.
JOINED = {"embeddings.distillation_token", "embeddings.position_embeddings"}


@jax.jit
def outputs(model, x):
    """The stored output of each kind of model."""
    if model.config.num_classes is not None:
        return model(x)
    return model.pooled(x) if model.config.pool == "attention" else model.tokens(x)


@pytest.fixture
def folder(tmp_path):
    """Writes the weights and the configuration of a reference file into a folder, as the library saves them."""

    def write(data):
        suffix = ".npz" if any("/" in name for name in state(data)) else ".safetensors"  # of JAX codes
        reading.write(tmp_path / f"model{suffix}", state(data))
        (tmp_path / "config.json").write_text(str(data["config"]))
        return tmp_path

    return write


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_public(path, folder, record_property):
    data = load(path)
    model = pretrained.load(folder(data), **HINTS.get(path.stem, {}))
    comparison, (key,) = Comparison(data), (key for key in data if key.startswith("output/"))
    comparison.array(key, outputs(model, images(data)))
    comparison.finish(record_property, "public")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_tensors_come_back_under_the_same_names(path, folder):
    """All but those that no model here has, which are named as dropped."""
    weights = state(load(path))
    format, expected, _ = pretrained._opened(pretrained._ALL, weights)
    model = pretrained.load(folder(load(path)), **HINTS.get(path.stem, {}))
    flavour = "transformers" if format.name in ("dinov2", "cvt") else None
    back = pretrained.state_dict(format.name, model, flavour=flavour)
    again, found, _ = pretrained._opened(pretrained._ALL, back)
    assert again is format and found.keys() == expected.keys()
    for name in found.keys() - (JOINED if path.stem == "deit" else set()):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_stacked_blocks_are_split(folder):
    """big_vision under a scan: the same model from a tensor for all blocks."""
    weights = state(load(next(path for path in FILES if path.stem == "big_vision")))
    first, block = "params/Transformer/encoderblock_0/", "params/Transformer/encoderblock{}/"
    stacked = {name: tensor for name, tensor in weights.items() if "encoderblock_" not in name}
    for name in (name.removeprefix(first) for name in weights if name.startswith(first)):
        stacked[block.format("") + name] = np.stack([weights[block.format(f"_{i}") + name] for i in range(2)])
    assert len(stacked) < len(weights)
    one, other = (pretrained.load("vit_jax", each) for each in (weights, stacked))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_another_epsilon_is_caught(folder):
    """The configuration beside the weights matters: with the default epsilon the outputs differ."""
    data = load(next(path for path in FILES if path.stem == "vit_tanh_pooler"))
    place = folder(data)
    (place / "config.json").write_text(json.dumps({**json.loads(str(data["config"])), "layer_norm_eps": 1e-6}))
    with pytest.raises(AssertionError, match="deviates by"):
        Comparison(data).array("output/last_hidden_state", outputs(pretrained.load(place), images(data)))
