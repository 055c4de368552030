"""Files are read by content: any ending, shards, folders of the Hub, prefixes and containers."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from equivit import convert, models, pretrained
from equivit.models import saved, zoo
from equivit.pretrained import described, mapping, places, reading
from equivit.training import loading
from tests.models.backbones import BACKBONES
from tests.pretrained import torch_archive
from tests.pretrained.formats_test import MODELS, same_model, written

TENSORS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.float16)}


def same(found, expected=TENSORS):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)


def write(path, tensors=TENSORS, kind="torch"):
    """A file of that kind with any ending."""
    ending = {"torch": ".pth", "npz": ".npz", "safetensors": ".safetensors"}[kind]
    whole = path.with_name(f"whole{ending}")
    (torch_archive.write if kind == "torch" else reading.write)(whole, tensors)
    whole.rename(path)


FILES = ["pytorch_model.bin", "last.ckpt", "best.pth.tar", "weights", "model.safetensors", "a.npz"]


@pytest.mark.parametrize("kind", ["torch", "npz", "safetensors"])
@pytest.mark.parametrize("name", FILES)
def test_content_and_not_the_ending_determines_the_kind(tmp_path, name, kind):
    write(tmp_path / name, kind=kind)
    same(reading.read(tmp_path / name))


def shards(folder, ending=".safetensors", name="model"):
    """Two shards and their index."""
    names = [f"{name}-0000{i}-of-00002{ending}" for i in (1, 2)]
    for shard, (tensor, value) in zip(names, TENSORS.items(), strict=True):
        write(folder / shard, {tensor: value}, "torch" if ending == ".bin" else "safetensors")
    index = folder / f"{name}{ending}.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip(TENSORS, names, strict=True))}))
    return index, folder / names[1]


@pytest.mark.parametrize("ending, name", [(".safetensors", "model"), (".bin", "pytorch_model")])
def test_shards_are_one_file(tmp_path, ending, name):
    index, last = shards(tmp_path, ending, name)
    same(reading.read(index))
    same(reading.read(tmp_path))
    with pytest.raises(ValueError, match=f"this is shard 2 of 2; give .*{name}{ending}.index.json, or the folder"):
        reading.read(last)
    write(last, {"c": np.ones(1, np.float32)}, "torch" if ending == ".bin" else "safetensors")
    with pytest.raises(ValueError, match=f"lacks tensors of {name}{ending}.index.json: b"):
        reading.read(tmp_path)
    last.unlink()
    with pytest.raises(FileNotFoundError, match="there is no such file, but .* has it as one of 2 shards"):
        reading.read(tmp_path)


@pytest.mark.parametrize("entry", ["../secret.bin", "/etc/passwd", "a/b.bin"])
def test_an_index_cannot_point_elsewhere(tmp_path, entry):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
    with pytest.raises(ValueError, match="must be a file beside the index"):
        reading.read(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is empty; download it again"),
        (b"PK\3\4 half of an archive", "is damaged, a part of a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS; .* git lfs pull"),
        (b"<!DOCTYPE html><html>", "a web page; download the file itself"),
        (b"\x80\2}q\0.", "is a pickle that torch.save did not write"),
        (b"\x1f\x8b\x08", "a gzip file; unpack it first"),
        (b"nothing of all these", "neither a safetensors file, nor an .npz file, nor one of torch.save"),
    ],
)
def test_other_content_is_named(tmp_path, content, message):
    (tmp_path / "weights.bin").write_bytes(content)
    with pytest.raises(ValueError, match=f"weights.bin: .*{message}"):
        reading.read(tmp_path / "weights.bin")


def test_the_weights_of_a_folder(tmp_path):
    with pytest.raises(IsADirectoryError, match="a directory without weights, such as model.safetensors"):
        reading.read(tmp_path)
    write(tmp_path / "b.ckpt")
    same(reading.read(tmp_path))
    write(tmp_path / "c.pth")
    with pytest.raises(ValueError, match="has 2 files of weights; give one of them: b.ckpt, c.pth"):
        reading.read(tmp_path)
    write(tmp_path / "pytorch_model.bin", {"d": TENSORS["b"]})
    assert reading.read(tmp_path).keys() == {"d"}
    write(tmp_path / "model.safetensors", {"e": TENSORS["b"]}, "safetensors")
    assert reading.read(tmp_path).keys() == {"e"}


CONTAINERS = ["model_state_dict", "model_ema", "state_dict_ema", "student", "ema", "params", "module", "net", "mine"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(container):
    content = {container: TENSORS, "epoch": 3, "optimizer": {"state": {0: {"step": np.ones(1)}}}}
    same(reading.state_dict(content)[0])


NAMES = ("H8", "I2", "plain", "DeiT III", "hub", "hub registers", "transformers", "Jumbo", "Jumbo of 2025")
NAMES += ("OpenAI's CLIP",)
PREFIXES = ("", "model.", "encoder.", "student.backbone.", "module.net.vit.")


@pytest.mark.parametrize("name", NAMES)
def test_names_determine_the_source_under_any_prefix(name):
    """A plain ViT of DINOv2 has its own source, as it resizes positions otherwise."""
    weights = written(name)[2]
    for prefix in PREFIXES:
        content = {"state_dict": {f"{prefix}{key}": value for key, value in weights.items()}}
        format, state, left_out = pretrained._opened(pretrained._ALL, content)
        assert format.name == MODELS[name][0] and state.keys() == weights.keys() and not left_out


@pytest.mark.parametrize("name", BACKBONES)
def test_names_determine_the_source_of_every_family(name):
    """Also of MobileNetV4, whose blocks are numbered like chunks of DINOv2's training."""
    config = zoo.configuration(name, **BACKBONES[name].small)
    format = next(
        format for format in pretrained._ALL if isinstance(config, format.kind) and format.name != "transformers"
    )
    zeros = {tensor: np.broadcast_to(np.float32(0), shape) for tensor, shape in mapping.shapes(config).items()}
    for flavour in format.flavours:
        weights = mapping.write(format.table(config, flavour), zeros, name)
        for prefix in ("", "module.net."):
            found, state, left_out = pretrained._opened(
                pretrained._ALL, {f"{prefix}{key}": value for key, value in weights.items()}
            )
            assert found is format and state.keys() == weights.keys() and not left_out


def test_a_head_outside_the_prefix():
    weights = written("plain")[2]
    content = {key if key.startswith("head") else f"vit.{key}": value for key, value in weights.items()}
    same_model(pretrained.load("timm", content, num_heads=2), written("plain")[0])


def test_two_sets_of_weights_are_not_mixed(capsys):
    weights = written("hub")[2]
    content = {f"student.{key}": np.zeros_like(value) for key, value in weights.items()}
    content |= {f"teacher.{key}": value for key, value in weights.items()}
    same_model(pretrained.load("dinov2", content, num_heads=2), written("hub")[0])
    assert "several sets of weights; using 'teacher.', not 'student.'." in capsys.readouterr().out


def test_names_of_no_source():
    with pytest.raises(ValueError, match="names such as a.weight, b match none of the sources octic_vits,"):
        pretrained._opened(pretrained._ALL, TENSORS)
    with pytest.raises(ValueError, match="'timm' is a source; give its weights too: 'timm', FILE"):
        pretrained.load("timm")


FACTS = dict(model_type="vit", num_attention_heads=2, layer_norm_eps=1e-3, hidden_act="gelu_new", image_size=[32, 32])


@pytest.fixture
def folder(tmp_path):
    """A repository of transformers."""
    model = written("plain")[0]
    reading.write(tmp_path / "model.safetensors", pretrained.state_dict("transformers", model))
    labels = {str(i): name for i, name in enumerate("cdefg")}
    (tmp_path / "config.json").write_text(json.dumps(FACTS | dict(id2label=labels)))
    return tmp_path


def test_the_configuration_of_a_folder_gives_hints(folder, capsys):
    model = pretrained.load(folder)
    same_model(model, written("plain")[0])
    assert (model.config.num_heads, model.config.norm_eps, model.config.mlp) == (2, 1e-3, "gelu_tanh")
    assert pretrained.load(folder / "model.safetensors", norm_eps=1e-5).config.norm_eps == 1e-5  # arguments precede
    assert convert.main([f"--input={folder}", f"--output={folder / 'ours'}"]) == 0
    same_model(saved.load(folder / "ours"), model)
    assert saved.trained_on(folder / "ours").classes == tuple("cdefg")
    assert convert.main([f"--input={folder}", f"--output={folder / 'ours'}", "--num_classes=3"]) == 0
    assert saved.trained_on(folder / "ours").classes == ()
    (folder / "config.json").write_text(json.dumps(FACTS | dict(hidden_act="relu")))
    with pytest.raises(ValueError, match="config.json: hidden_act='relu' is not one of gelu, quick_gelu"):
        pretrained.load(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json: must be a JSON object, not list"):
        pretrained.load(folder)


@pytest.mark.parametrize("head", [True, False])
def test_how_images_are_normalised_is_kept_without_the_head_of_the_weights(folder, head):
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.5] * 3, image_std=[0.25] * 3)))
    if not head:
        tensors = reading.read(folder / "model.safetensors")
        reading.write(folder / "model.safetensors", {k: v for k, v in tensors.items() if "classifier" not in k})
    more = ["--num_classes=3"] if head else []
    assert convert.main([f"--input={folder}", f"--output={folder / 'ours'}", *more]) == 0
    assert saved.load(folder / "ours").config.num_classes == (3 if head else None)
    images = dict(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert saved.trained_on(folder / "ours") == ((), None, images)


def test_a_named_model_with_weights(folder):
    size = dict(width=64, depth=3, num_heads=2, patch_size=8, mlp_dim=128)
    model = models.create("vit_s16", pretrained=str(folder), num_classes=3, drop_path=0.1, **size)
    assert (model.config.num_classes, model.config.drop_path, model.config.norm_eps) == (3, 0.1, 1e-3)
    np.testing.assert_array_equal(model.patch_embed.kernel[...], written("plain")[0].patch_embed.kernel[...])
    with pytest.raises(ValueError, match="vit_b16: the weights at .* are of another model: width 64, not 768, depth 3"):
        models.create("vit_b16", pretrained=str(folder))
    with pytest.raises(ValueError, match="cvt_13: the weights at .* are of another model"):
        models.create("cvt_13", pretrained=str(folder))


def test_places_of_a_config(folder, tmp_path):
    """A run starts from a folder of transformers or a file as from a saved model."""
    for place in (folder, folder / "model.safetensors"):
        same_model(loading.load_model(str(place)), written("plain")[0])
        same_model(loading.load(place)[0], written("plain")[0])  # of export and convert --to
    with pytest.raises(FileNotFoundError, match="is neither a run nor a saved model"):
        loading.load_model(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent: there is no such file or directory"):
        loading.load(tmp_path / "absent")


@pytest.mark.parametrize(
    "config, expected",
    [
        (dict(vision_config=dict(hidden_act="quick_gelu", patch_size=16)), dict(mlp="quick_gelu")),
        (dict(hidden_act="gelu", use_swiglu_ffn=True), {}),
        (dict(model_type="cvt", layer_norm_eps=1e-12, num_heads=[1, 3]), dict(num_heads=(1, 3))),
        (dict(patch_stride=[4, 2], patch_padding=[2, 1]), dict(strides=(4, 2), paddings=(2, 1))),
        (dict(model_type="swinv2", window_size=8, image_size=256), dict(window_size=(8, 8), image_size=(256, 256))),
        (dict(architecture="vit_s", pretrained_cfg=dict(input_size=[3, 96, 64])), dict(image_size=(96, 64))),
        (dict(architecture="vit_base_patch16_clip_224"), dict(mlp="gelu")),
        (dict(architecture="vit_base_patch16_clip_quickgelu_224"), dict(mlp="quick_gelu")),
        (dict(architecture="vit_base_patch16_clip_224", pretrained_cfg=dict(tag="openai")), dict(mlp="quick_gelu")),
        (dict(architecture="vit_base_patch16_clip_224", pretrained_cfg=dict(tag="openai_ft_in1k")), dict(mlp="gelu")),
        (dict(architecture="vit_base_patch16_clip_224", pretrained_cfg=dict(tag="laion2b")), dict(mlp="gelu")),
        (dict(architecture="swinv2_cr_tiny_ns_224"), {}),
        (dict(architecture="swinv2_tiny_window16_256"), dict(window_size=(16, 16))),
        (dict(batch_size=3, model=dict(name="vit_s16")), {}),
    ],
)  # fmt: skip
def test_facts(config, expected):
    assert described.facts(config) == expected


@pytest.mark.parametrize(
    "field, value",
    [
        ("pretrained_window_sizes", [12, 12]),
        ("architecture", "swinv2_base_window12to24_192to384"),
        ("architecture", "swinv2_large_window12to16_192to256"),
    ],
)
def test_windows_that_no_model_has(field, value):
    with pytest.raises(ValueError, match=re.escape(f"config.json: {field}={value!r}, a SwinV2 tuned with larger wi")):
        described.facts({field: value})


@pytest.mark.parametrize(
    "config, names",
    [
        (dict(id2label={"1": "dog", "0": "cat"}), ("cat", "dog")),
        (dict(id2label={"0": "LABEL_0", "1": "LABEL_1"}), ()),
        (dict(id2label={"0": "cat", "2": "dog"}), ()),
        (dict(label_names=["cat", "dog"]), ("cat", "dog")),
        (dict(pretrained_cfg=dict(label_names=["cat"])), ("cat",)),
        ({}, ()),
    ],
)
def test_names_of_classes(config, names):
    assert described.classes(config) == names


def test_a_repository_with_a_model_card(tmp_path, capsys):
    """A saved model with a card; hints are refused, as it determines all."""
    saved.save(tmp_path / "model", written("plain")[0])
    assert convert.main(["--to=hf", f"--input={tmp_path / 'model'}", f"--output={tmp_path / 'repository'}"]) == 0
    shutil.rmtree(tmp_path / "model")
    same_model(pretrained.load(tmp_path / "repository"), written("plain")[0])
    assert "library_name: equivit" in (tmp_path / "repository" / "README.md").read_text()
    with pytest.raises(ValueError, match="repository: is a saved model, .* leave out num_heads, norm_eps"):
        pretrained.load(tmp_path / "repository", num_heads=2, norm_eps=1e-5)
    assert convert.main(["--to=timm", "--push=a/b", f"--input={tmp_path}", f"--output={tmp_path}"]) == 1
    assert "--push=a/b is for --to=hf, not --to=timm." in capsys.readouterr().err


def test_a_repository_replaces_only_its_own_files(tmp_path, capsys):
    """A run keeps its config.json, and a project its README.md; a repository may be written again."""
    saved.save(tmp_path / "model", written("plain")[0])
    there = ["--to=hf", f"--input={tmp_path / 'model'}"]
    for _ in range(2):
        assert convert.main([*there, f"--output={tmp_path / 'repository'}"]) == 0
    again = ["--to=hf", f"--input={tmp_path / 'repository'}", f"--output={tmp_path / 'repository'}"]
    assert convert.main(again) == 0
    assert "## Recipe" not in (tmp_path / "repository" / "README.md").read_text()  # the hub's config.json is none
    capsys.readouterr()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    for place, message in (("run/config.json", "is a run"), ("project/README.md", "its README.md would be replaced")):
        (tmp_path / place).write_text("{}")
        assert convert.main([*there, f"--output={(tmp_path / place).parent}"]) == 1
        assert message in capsys.readouterr().err
        assert (tmp_path / place).read_text() == "{}" and not (tmp_path / place).with_name("model.json").exists()


def test_a_path_is_a_path(tmp_path):
    write(tmp_path / "timm")
    assert places.file(str(tmp_path / "timm")) == pathlib.Path(tmp_path / "timm")
