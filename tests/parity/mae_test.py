"""Masked autoencoders against the official code (PyTorch) and against the JAX version of Jumbo's: one test a file."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.data.pixels import normalize
from equivit.layers.dense import patchify
from equivit.layers.position import SinCos
from equivit.models import zoo
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.objectives import mae, masking
from tests.parity.arrays import Comparison, files, images, load, state


@jax.jit
def run(model, x, keep):
    """The encoder's rows, the decoder's after its norm, and the predictions."""
    h, w = (side // 8 for side in x.shape[1:3])
    rows = model.encoder.tokens(x, keep=keep)
    return rows, model.decoder.tokens(rows, keep, (h, w)), model(x, keep)


def loss(predictions, x, mask, target, variance):
    return mae.removed_errors(predictions, mae.targets(x, (8, 8), target, variance), mask).mean()


@pytest.mark.parametrize("path", files("jumbo", "mae_d48.npz"), ids=lambda path: path.stem)
def test_official(path, record_property):
    data = load(path)
    model = pretrained.load("mae_autoencoder", state(data), num_heads=3, decoder_heads=4)
    x, noise = images(data), data["input/noise"]
    comparison = Comparison(data)
    keep, mask = masking.from_noise(jnp.asarray(noise), masking.number_kept(16, 0.75))
    latent, _, predictions = run(model, x, keep)
    comparison.array("output/latent", latent)
    comparison.array("output/mask", mask)
    comparison.array("output/pred", predictions)
    comparison.array("output/loss", loss(predictions, x, mask, "pixels", "unbiased"))
    comparison.array("output/loss_norm_pix", loss(predictions, x, mask, "normalised_pixels", "unbiased"))
    comparison.array("output/patchified", patchify(x, (8, 8)))
    restored = np.take_along_axis(np.argsort(noise, -1), data["output/ids_restore"], -1)  # one undoes the other
    np.testing.assert_array_equal(restored, np.broadcast_to(np.arange(16), (2, 16)))
    comparison.left.discard("output/ids_restore")
    half, half_mask = masking.from_noise(jnp.asarray(noise), masking.number_kept(16, 0.5))
    comparison.array("output/latent_ratio_0.5", model.encoder.tokens(x, keep=half))
    comparison.array("output/mask_ratio_0.5", half_mask)
    comparison.finish(record_property, "mae")
    biased = loss(predictions, x, mask, "normalised_pixels", "biased")
    assert abs(biased - data["output/loss_norm_pix"]) > 1e-3  # the test would notice


def jax_names(data):
    """The tensors of the JAX version under the logical names of ours."""
    plain = {
        "kernel": "weight",
        "wte": "patch_embed",
        "w1": "fc1",
        "w2": "fc2",
        "attn": "attention",
        "ff": "mlp",
        "wo": "proj",
    }
    tensors = {}
    for name, tensor in state(data).items():
        name = name.replace("decoder_model/dec_layer_", "decoder/blocks.").replace("decoder_model/dec_", "decoder/")
        name = name.replace("decoder_proj", "decoder/embed").replace("decoder_image_output", "decoder/pixels")
        name = name.replace("image_mask_embedding", "decoder/mask_token").replace("model/embed/", "encoder/")
        name = name.replace("model/layer_", "encoder/blocks.").replace("model/cls_tokens", "encoder/prefix.jumbo_token")
        name = re.sub(r"^model/", "encoder/", name)
        parts = [plain.get(part, part) for part in name.split("/")]
        tensors[".".join(parts)] = tensor
    tensors["encoder.patch_embed.kernel"] = tensors.pop("encoder.patch_embed.weight")
    for last in ("scale", "bias"):
        tensors[f"encoder.readout.norm.{last}"] = tensors.pop(f"encoder.norm.{last}")
    tensors["encoder.prefix.jumbo_token"] = tensors["encoder.prefix.jumbo_token"][0]
    tensors["decoder.mask_token"] = tensors["decoder.mask_token"][0, 0]
    for name in [name for name in tensors if name.endswith("attention.proj.weight")]:
        tensors[name] = tensors[name].reshape(-1, tensors[name].shape[-1])
        at = name.removesuffix("proj.weight")
        weights, biases = ([tensors.pop(f"{at}w{i}.{kind}") for i in "qkv"] for kind in ("weight", "bias"))
        tensors[f"{at}qkv.weight"] = np.concatenate([w.reshape(len(w), -1) for w in weights], axis=1)
        tensors[f"{at}qkv.bias"] = np.concatenate([b.reshape(-1) for b in biases])
    return tensors


@pytest.mark.parametrize("path", files("jumbo", "jumbo_mae_jax_d48_j3.npz"), ids=lambda path: path.stem)
def test_jax_version_of_jumbo(path, record_property):
    data = load(path)
    size = dict(width=48, depth=3, num_heads=3, patch_size=8, image_size=(32, 32), jumbo=3, num_classes=None)
    config = MaskedAutoencoderConfig(zoo.configuration("jumbo_vit_mae_ti16", **size), 32, 2, 4)
    abstract = jax.eval_shape(lambda: config.build(nnx.Rngs(params=0)))
    model = logical.from_logical(abstract, jax_names(data))
    comparison = Comparison({key: value for key, value in data.items() if key != "output/probe_logits"})
    x = normalize(images(data, "input/images_uint8_nchw"), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    keep, mask = masking.from_noise(jnp.asarray(data["input/noise"]), masking.number_kept(16, 0.75))
    keep, mask = jnp.tile(keep, (2, 1)), jnp.tile(mask, (2, 1))
    latent, decoded, predictions = run(model, x, keep)
    layers = model.encoder.features(x, blocks=(0, 1, 2), norm=False, keep=keep).blocks
    for i, layer in layers.items():
        rows = jnp.concatenate([layer.cls.reshape(2, 3, 48), layer.patches.values], axis=1)
        comparison.array(f"output/layer_{i}", rows)
    comparison.array("output/latent", latent)
    comparison.array("output/mask", mask)
    comparison.array("output/ids_restore", jnp.argsort(jnp.argsort(data["input/noise"])))
    comparison.array("output/decoder_output", decoded)
    comparison.array("output/pred", predictions)
    comparison.array("output/loss", loss(predictions, x, mask, "pixels", "biased"))
    comparison.array("output/loss_norm_pix", loss(predictions, x, mask, "normalised_pixels", "biased"))
    for part, table in (("encoder", model.encoder.position), ("decoder", model.decoder.position)):
        comparison.array(f"output/sincos2d_{part}", table((4, 4)).reshape(4, 4, -1))
    comparison.finish(record_property, "mae")


@pytest.mark.parametrize("path", files("losses", "mae_sincos.npz"), ids=lambda path: path.stem)
def test_sincos_table(path, record_property):
    data = load(path)
    rows = SinCos(int(data["input/embed_dim"])).table((int(data["input/grid"]),) * 2)
    comparison = Comparison(data)
    comparison.array("output/pos_embed", np.concatenate([np.zeros((1, rows.shape[1]), np.float32), rows]))
    comparison.finish(record_property, "mae")


@pytest.mark.parametrize("path", files("jumbo", "mae_d48.npz"), ids=lambda path: path.stem)
def test_encoder_alone(path, capsys):
    """With and without the decoder in the file, and back to the same bits."""
    data = load(path)
    encoder = pretrained.load("mae", state(data), num_heads=3)
    assert "decoder_blocks.*" in capsys.readouterr().out and encoder.config.position == "sincos"
    both = pretrained.load("mae_autoencoder", state(data), num_heads=3, decoder_heads=4)
    jax.tree.map(np.testing.assert_array_equal, encoder, both.encoder)
    back = pretrained.state_dict("mae", encoder)
    for name, tensor in back.items():
        np.testing.assert_allclose(tensor, data[f"param/{name}"], atol=1e-6 if name == "pos_embed" else 0)
    again = pretrained.load("mae", back, num_heads=3)
    jax.tree.map(np.testing.assert_array_equal, again, encoder)
    learned = dict(back, pos_embed=back["pos_embed"] + 0.1)  # as after fine-tuning
    assert pretrained.load("mae", learned, num_heads=3).config.class_position
    with pytest.raises(ValueError, match="mae_autoencoder: no tensor 'decoder_embed.weight'"):
        pretrained.load("mae_autoencoder", back, num_heads=3)
