"""Masked autoencoders: the encoder alone, and both parts, there and back to the same bits."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import convert, logical, pretrained
from equivit.layers.grid import Layout
from equivit.models import saved
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.models.vit.config import ViTConfig
from equivit.models.zoo import configuration
from equivit.pretrained import reading
from tests.pretrained.formats_test import SMALL, same_model

ENCODER = SMALL | dict(num_classes=None, position="sincos", layer_scale=None)


@functools.cache
def written(**fields):
    """A masked autoencoder, and the foreign state dict of it."""
    config = MaskedAutoencoderConfig(ViTConfig(**ENCODER | fields), 32, 2, 4)
    abstract, random = jax.eval_shape(lambda: config.build(nnx.Rngs(0))), np.random.default_rng(0)
    shapes = jax.eval_shape(logical.to_logical, abstract)
    tensors = {name: random.normal(size=t.shape).astype(np.float32) for name, t in shapes.items()}
    model = logical.from_logical(abstract, tensors)
    return model, pretrained.state_dict("mae_autoencoder", model)


@pytest.mark.parametrize(
    "fields", [dict(), dict(image_size=(16, 48)), dict(position="learned", class_position=True), dict(qkv_bias=False)]
)
def test_ours_to_theirs_to_ours(fields):
    model, state = written(**fields)
    found = pretrained.load(
        "mae_autoencoder", state, num_heads=2, decoder_heads=4, image_size=model.config.encoder.image_size
    )
    assert found.config == model.config
    same_model(found, model)
    back = pretrained.state_dict("mae_autoencoder", found)
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, state[name], err_msg=name)


def test_the_encoder_alone(capsys):
    model, state = written()
    encoder = pretrained.load("mae", state, num_heads=2)
    assert "mask_token" in capsys.readouterr().out
    same_model(encoder, model.encoder)
    assert encoder.config == model.config.encoder


def test_a_fine_tuned_classifier_there_and_back():
    """Its head reads the norm of the mean of plain patch tokens, whose weights the file calls fc_norm."""
    fields = dict(position="learned", class_position=True, pool="mean", fc_norm=True, num_classes=5)
    config = ViTConfig(**ENCODER | fields)
    abstract, random = jax.eval_shape(lambda: config.build(nnx.Rngs(0))), np.random.default_rng(0)
    shapes = jax.eval_shape(logical.to_logical, abstract)
    tensors = {name: random.normal(size=t.shape).astype(np.float32) for name, t in shapes.items()}
    state = pretrained.state_dict("mae", logical.from_logical(abstract, tensors))
    assert "fc_norm.weight" in state and not any(name.startswith("norm.") for name in state)
    found = pretrained.load("mae", state, num_heads=2)
    assert found.config == config
    np.testing.assert_array_equal(found.readout.fc_norm.scale[...], tensors["readout.fc_norm.scale"])
    rows = random.normal(size=(2, 10, config.width)).astype(np.float32)
    mean = rows[:, 1:].mean(1)
    normed = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + config.norm_eps)
    expected = normed * tensors["readout.fc_norm.scale"] + tensors["readout.fc_norm.bias"]
    np.testing.assert_allclose(found.readout(rows, Layout((3, 3), 1)), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.readout.normed(rows, Layout((3, 3), 1)), rows)
    images = random.normal(size=(1, *config.image_size, 3)).astype(np.float32)
    features = jax.jit(lambda model, x, norm: model.features(x, norm=norm), static_argnames="norm")
    read, raw = (features(found, images, norm=norm).patches.values for norm in (True, False))
    np.testing.assert_allclose(read, found.readout.fc_norm(raw), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit():
    state = dict(written()[1])
    del state["decoder_norm.bias"]
    with pytest.raises(ValueError, match=r"encoder \(ViT, family plain.*\)\): .* missing: decoder_norm.bias\.$"):
        pretrained.load("mae_autoencoder", state, num_heads=2)
    for hint in (dict(num_classes=3), dict(decoder_hads=2), dict(family="H8")):
        with pytest.raises(ValueError, match="have no head|nearest is 'decoder_heads'|those of 'plain'"):
            pretrained.load("mae_autoencoder", written()[1], num_heads=2, **hint)
    with pytest.raises(ValueError, match="mae: cannot hold a MaskedAutoencoder"):
        pretrained.state_dict("mae", written()[0])


def test_convert_there_and_back(tmp_path, capsys):
    state, original, back = written()[1], tmp_path / "weights.npz", tmp_path / "back.safetensors"
    reading.write(original, state)
    there = ["--source=mae_autoencoder", f"--input={original}", f"--output={tmp_path / 'model'}", "--num_heads=2"]
    assert convert.main(there) == 0
    assert "MaskedAutoencoder, decoder width 32, decoder depth 2, 16 decoder heads, " in capsys.readouterr().out
    same_model(saved.load(tmp_path / "model"), written()[0])
    assert convert.main([f"--input={tmp_path / 'model'}", f"--output={back}", "--to=mae_autoencoder"]) == 0
    found = reading.read(back)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_descriptions():
    series = configuration("patchtst", length=96, channels=3, num_classes=5)
    assert pretrained.describe(series) == "PatchTST, width 128, depth 3, 16 heads"
    hybrid = ViTConfig(**SMALL, family="H8")
    assert pretrained.describe(hybrid) == "ViT, family H8, width 64, depth 3, 2 heads, patch 8x8, equivariant blocks 1"
    both = pretrained.describe(MaskedAutoencoderConfig(ViTConfig(**ENCODER), 32, 2, 4))
    assert both.endswith("encoder (ViT, family plain, width 64, depth 3, 2 heads, patch 8x8)")
