"""CLIP's files: sizes, the head that is a projection, what is left out, and TorchScript archives."""

import dataclasses
import pathlib
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import convert, models, precision, pretrained
from equivit.models import saved, zoo
from equivit.pretrained import clip, mapping, reading
from tests.pretrained import torch_archive
from tests.pretrained.dinov2_test import broadcast
from tests.pretrained.formats_test import same_model, written

COUNTS = {"clip_vit_b16": (152, 86_192_640), "clip_vit_l14": (296, 303_966_208), "clip_vit_l14_336": (296, 304_293_888)}


@pytest.mark.parametrize("name", COUNTS)
def test_sizes_are_those_of_openai(name):
    config = zoo.configuration(name)
    tensors = broadcast(config)
    state = mapping.write(clip.table(config, "openai"), tensors, name)
    del state[clip.OFFICIAL]
    assert (len(state), sum(tensor.size for tensor in tensors.values())) == COUNTS[name]
    found, _ = clip.FORMAT.infer(state | {clip.OFFICIAL: np.asarray(224)})
    assert dataclasses.replace(found, mlp_dim=None) == config


def test_all_spellings_hold_the_same_arrays():
    model, _, openai = written("OpenAI's CLIP")
    for flavour in ("openclip", "transformers", "timm"):
        state = pretrained.state_dict("clip", model, flavour=flavour)
        same_model(pretrained.load("clip", state, num_heads=2, mlp="quick_gelu"), model)
    assert openai["input_resolution"] == 32 and not state["head.bias"].any()
    np.testing.assert_array_equal(state["head.weight"], openai["visual.proj"].T)
    for source, name, reason in (
        ("clip", "hub", "norm_eps=1e-06"),
        ("clip", "Jumbo's baseline", "class_position=False"),
        ("timm", "OpenAI's CLIP", "patch_bias=False"),
    ):
        with pytest.raises(ValueError, match=f"{source}: cannot hold a model with {reason}"):
            pretrained.state_dict(source, written(name)[0])
    with pytest.raises(ValueError, match="clip: cannot hold a model with mlp='gelu'; its code has 'quick_gelu'"):
        pretrained.state_dict("clip", written("OpenCLIP")[0], flavour="openai")


def test_the_text_encoder_is_left_out(tmp_path, capsys):
    model, _, state = written("transformers' CLIP")
    text = {"text_model.encoder.layers.0.mlp.fc1.weight": np.ones((2, 2)), "text_projection.weight": np.ones((2, 2))}
    text |= {"logit_scale": np.ones(()), "vision_model.embeddings.position_ids": np.arange(17)[None]}
    reading.write(tmp_path / "clip.safetensors", state | text)
    there = ["--source=clip", f"--input={tmp_path / 'clip.safetensors'}", f"--output={tmp_path / 'model'}"]
    assert convert.main([*there, "--num_heads=2"]) == 1
    assert "clip: the file does not determine its activation; give mlp=" in capsys.readouterr().err
    assert convert.main([*there, "--num_heads=2", "--mlp=quick_gelu"]) == 0
    said = capsys.readouterr().out
    for name in text:
        assert name.replace("0", "*") in said or name in said
    same_model(saved.load(tmp_path / "model"), model)
    back = ["--to=clip", f"--input={tmp_path / 'model'}", f"--output={tmp_path / 'back.npz'}"]
    assert convert.main([*back, "--flavour=transformers"]) == 0
    assert reading.read(tmp_path / "back.npz").keys() == state.keys()


def test_a_safetensors_file_of_openai_comes_back(tmp_path):
    """With its resolution, a tensor without axes."""
    model, *_ = written("OpenAI's CLIP")
    saved.save(tmp_path / "model", model)
    file = tmp_path / "clip.safetensors"
    assert convert.main(["--to=clip", "--flavour=openai", f"--input={tmp_path / 'model'}", f"--output={file}"]) == 0
    back = ["--source=clip", f"--input={file}", "--num_heads=2", f"--output={tmp_path / 'back'}"]
    assert convert.main(back) == 0
    same_model(saved.load(tmp_path / "back"), model)


def test_the_head_is_a_projection():
    """A projection of the class token after the final norm; a classifier replaces it."""
    model, _, state = written("OpenAI's CLIP")
    images = np.random.default_rng(0).normal(size=(2, 3, 24, 40, 3)).astype(np.float32)
    call = jax.jit(lambda m, x: (m(x), m.features(x).cls))
    embedding, token = call(model, images)
    assert embedding.shape == (2, 3, 7)
    np.testing.assert_allclose(embedding, token @ state["visual.proj"], rtol=0, atol=1e-5 * np.abs(embedding).max())
    classifier = pretrained.load("clip", state, num_heads=2, num_classes=5)
    assert classifier.config.projection is None and classifier.head.weight.shape == (64, 5)
    with pytest.raises(ValueError, match="ViT: num_classes=5 and projection=7 are two heads; set one to None"):
        models.reconfigure(model, num_classes=5)


def test_a_head_with_a_bias_is_a_classifier():
    """timm's CLIP fine-tuned for ImageNet; without a bias the head is the projection."""
    model, _, state = written("timm's CLIP")
    assert (model.config.num_classes, model.config.projection) == (None, 7)
    tuned = state | {"head.bias": np.arange(7, dtype=np.float32)}
    found = pretrained.load("clip", tuned, num_heads=2, mlp="gelu")
    assert (found.config.num_classes, found.config.projection) == (7, None)
    np.testing.assert_array_equal(found.head.weight[...], model.head.weight[...])
    np.testing.assert_array_equal(found.head.bias[...], np.arange(7))
    back = pretrained.state_dict("clip", found)
    assert back.keys() == tuned.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tuned[name], err_msg=name)
    with pytest.raises(ValueError, match="clip .*the format has no such model; no counterpart for head.bias, head.w"):
        pretrained.state_dict("clip", found, flavour="openclip")


def test_the_stream_stays_in_float32_without_a_bias_of_the_patches():
    model = precision.cast(written("OpenAI's CLIP")[0], "mixed")
    tokens, _ = jax.eval_shape(model.embed, jnp.zeros((1, 32, 32, 3)))
    assert model.patch_embed.kernel.dtype == jnp.bfloat16 and tokens.dtype == jnp.float32


class Module:
    """A module of a TorchScript archive, once its class has the name that such archives have."""


Module.__module__, Module.__qualname__ = "__torch__", "Module"


def script(path, root, monkeypatch):
    """Write a tree of modules as a TorchScript archive."""
    package = types.ModuleType("__torch__")
    package.Module = Module
    monkeypatch.setitem(sys.modules, "__torch__", package)
    torch_archive.write(path, root)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("weights/code/__torch__.py", "import os; os.system('touch touched')")


def module(**attributes):
    made = Module()
    made.__dict__.update(attributes)
    return made


def test_a_torchscript_archive_is_a_state_dict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weight = np.arange(6, dtype=np.float16).reshape(2, 3)
    inner = module(weight=weight, training=True)
    root = module(visual=module(conv1=inner, proj=weight.T), logit_scale=np.asarray(4.6, np.float32), training=False)
    script("model.pt", root, monkeypatch)
    found = reading.read("model.pt")
    assert found.keys() == {"visual.conv1.weight", "visual.proj", "logit_scale"}
    np.testing.assert_array_equal(found["visual.conv1.weight"], weight)
    np.testing.assert_array_equal(found["visual.proj"], weight.T)
    assert not pathlib.Path("touched").exists()


@pytest.mark.parametrize("kind", ["shared", "cycle"])
def test_modules_in_two_places_are_refused(tmp_path, monkeypatch, kind):
    """Names of nested modules that are there twice could be more than any memory holds, or endless."""
    one = module(weight=np.ones(2, np.float32))
    root = module(a=one, b=one)
    if kind == "cycle":
        one.root = root
        del root.b
    script(tmp_path / "model.pt", root, monkeypatch)
    with pytest.raises(
        ValueError, match="model.pt: has the module .* in two places, which no state dict can represent"
    ):
        reading.read(tmp_path / "model.pt")


def test_other_code_in_a_torchscript_archive_is_refused(tmp_path, monkeypatch):
    script(tmp_path / "model.pt", module(hook=print), monkeypatch)
    with pytest.raises(ValueError, match="model.pt: asks for (builtins|__builtin__).print; only tensors"):
        reading.read(tmp_path / "model.pt")
