"""Folders of transformers and files of timm: outputs of small random models, computed in float64 (write_public.py)."""

import json

import jax
import numpy as np
import pytest

from equivit import pretrained
from equivit.pretrained import reading
from tests.parity.arrays import Comparison, files, images, load, state

FILES = files("public")
HINTS = dict(timm_gap=dict(num_heads=3), timm_gap_norm=dict(num_heads=3), timm_fc_norm=dict(num_heads=3))
# Heads, decoders and tokens that no model here has.
UNUSED = ("pooler.", "decoder.", "num_batches_tracked")
# A distillation token becomes a register that includes its position, so its two parts come back joined.
JOINED = ("deit.embeddings.distillation_token", "deit.embeddings.position_embeddings")


@jax.jit
def outputs(model, x):
    """The stored output of each kind of model."""
    return model(x) if model.config.num_classes is not None else model.tokens(x)


@pytest.fixture
def folder(tmp_path):
    """Writes the weights and the configuration of a reference file into a folder, as the library saves them."""

    def write(data):
        reading.write(tmp_path / "model.safetensors", state(data))
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
    data, weights = load(path), state(load(path))
    format = pretrained._opened(pretrained._ALL, weights)[0]
    model = pretrained.load(folder(data), **HINTS.get(path.stem, {}))
    flavour = "transformers" if format.name in ("dinov2", "cvt") else None
    back = pretrained.state_dict(format.name, model, flavour=flavour)
    first = next(name for name in weights if "embed" in name and not name.startswith("decoder"))
    prefix = "" if set(back) <= set(weights) else f"{first.split('.')[0]}."
    for name, tensor in back.items():
        name = name if name in weights else prefix + name
        if name not in JOINED:
            np.testing.assert_array_equal(tensor, weights[name], err_msg=name)
    left = {name.removeprefix(prefix) for name in weights} - {name.removeprefix(prefix) for name in back}
    assert all(any(part in name for part in UNUSED) for name in left), left


def test_another_epsilon_is_caught(folder):
    """The configuration beside the weights matters: with the default epsilon the outputs differ."""
    data = load(next(path for path in FILES if path.stem == "vit_tanh_pooler"))
    place = folder(data)
    (place / "config.json").write_text(json.dumps({**json.loads(str(data["config"])), "layer_norm_eps": 1e-6}))
    with pytest.raises(AssertionError, match="deviates by"):
        Comparison(data).array("output/last_hidden_state", outputs(pretrained.load(place), images(data)))
