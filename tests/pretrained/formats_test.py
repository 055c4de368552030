"""Loading and writing official weights: exact there and back, and one clear message for what does not fit."""

import dataclasses
import functools
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from equivit import convert, logical, models, pretrained
from equivit.models import saved
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import PRESETS, JumboViTConfig
from equivit.pretrained import described, flip, reading
from equivit.training import loading
from tests.parity.arrays import load, state
from tests.parity.models_test import FILES, hints
from tests.pretrained import torch_archive

SMALL = dict(width=64, depth=3, num_heads=2, patch_size=8, image_size=(32, 32), num_classes=5, mlp_dim=128)
I8 = dict(family="I8", equivariant_blocks=2)
NO_HEAD = dict(num_classes=None, mask_token=True)
# name: source, flavour, configuration.  Each is written and read again.
MODELS = {
    "H8": ("octic_vits", "deit", dict(family="H8", equivariant_blocks=1)),
    "H8 generic": ("octic_vits", "generic", dict(family="H8", equivariant_blocks=1, qkv_bias=False)),
    "H8 pooled": ("octic_vits", "deit", dict(family="H8", class_token=False, pool="mean")),
    "H8 dinov2": ("octic_vits", "dinov2", dict(family="H8", registers=3, **NO_HEAD)),
    "I8 dinov2": ("octic_vits", "dinov2", I8 | NO_HEAD),
    "D8 dinov2": ("octic_vits", "dinov2", dict(family="I8", equivariant_blocks=3, isotypic_eps=1e-6, **NO_HEAD)),
    "D8": ("octic_vits", "deit", dict(family="D8", class_token=False, pool="mean", invariant="polynomial")),
    "H2": ("flip", "deit", dict(family="H2", isotypic_eps=1e-6)),
    "I2": ("flip", "deit", dict(family="I2", isotypic_eps=1e-6, image_size=(24, 48))),
    "D2": ("flip", "deit", dict(family="D2", isotypic_eps=1e-6, invariant="linear_signed")),
    "D2 both halves": ("flip", "deit", dict(family="D2", isotypic_eps=1e-6, layer_scale=None)),
    "plain": ("timm", "timm", dict(class_position=True, layer_scale=None, position_antialias=True)),
    "plain registers": ("timm", "timm", dict(registers=4, image_size=(16, 48), position_antialias=True)),
    "DeiT III": ("timm", "deit3", dict(mlp_dim=96)),
    "DINOv2": ("timm", "dinov2", dict(class_position=True, position_offset=0.1, **NO_HEAD)),
    "DINOv2 registers": ("timm", "dinov2", dict(class_position=True, registers=4, position_antialias=True, **NO_HEAD)),
}
SWIGLU = dict(mlp="swiglu", mlp_dim=24, registers=4, position_antialias=True)
JUMBO = dict(jumbo=3, jumbo_multiplier=1.5)
MODELS |= {
    "SwiGLU": ("timm", "timm", SWIGLU),
    "DINOv2 SwiGLU": ("timm", "dinov2", SWIGLU | NO_HEAD),
    "Jumbo": ("jumbo", "release", JUMBO | PRESETS["release"]),
    "Jumbo of 2025": ("jumbo", "legacy", JUMBO | PRESETS["legacy"] | dict(image_size=(16, 48))),
    "Jumbo's baseline": ("jumbo", "plain", dict(norm_eps=1e-5, position_antialias=True)),
}
HUB = dict(class_position=True, position_offset=0.1, **NO_HEAD)
WITH_REGISTERS = dict(class_position=True, registers=4, position_antialias=True, **NO_HEAD)
LINEAR_HEAD = dict(num_classes=5, pool="class_and_mean")
MODELS |= {
    "hub": ("dinov2", "hub", HUB),
    "hub registers": ("dinov2", "hub", WITH_REGISTERS),
    "hub giant": ("dinov2", "hub", HUB | dict(mlp="swiglu", mlp_dim=24, image_size=(16, 48))),
    "hub linear": ("dinov2", "hub", HUB | LINEAR_HEAD),
    "hub linear4": ("dinov2", "hub", WITH_REGISTERS | LINEAR_HEAD | dict(pool_blocks=3)),
    "transformers": ("dinov2", "transformers", HUB),
    "transformers registers": ("dinov2", "transformers", WITH_REGISTERS | dict(qkv_bias=False)),
    "transformers giant": ("dinov2", "transformers", WITH_REGISTERS | dict(mlp="swiglu", mlp_dim=24)),
    "transformers linear": ("dinov2", "transformers", HUB | LINEAR_HEAD),
    "timm's DINOv2": ("dinov2", "timm", HUB | dict(mask_token=False)),
    "timm's DINOv2 registers": ("dinov2", "timm", WITH_REGISTERS | dict(mask_token=False, class_position=False)),
}
CLIP = dict(
    projection=7, class_position=True, norm_eps=1e-5, position_antialias=True, patch_bias=False, pre_norm=True,
    layer_scale=None, num_classes=None,
)  # fmt: skip
QUICK = dict(mlp="quick_gelu")
MODELS |= {
    "OpenAI's CLIP": ("clip", "openai", CLIP | QUICK),
    "OpenCLIP": ("clip", "openclip", CLIP | dict(layer_scale=1e-4, image_size=(16, 48))),
    "OpenCLIP quick": ("clip", "openclip", CLIP | QUICK | dict(projection=None)),
    "transformers' CLIP": ("clip", "transformers", CLIP | QUICK),
    "timm's CLIP": ("clip", "timm", CLIP),
}
KINDS = ("linear", "power_spectrum", "triple_correlation", "polynomial", "max_filtering", "canonisation")
MODELS |= {f"I8 {kind}": ("octic_vits", "deit", I8 | dict(invariant=kind)) for kind in KINDS}


@functools.cache
def written(name):
    """A model of `MODELS`, its configuration, and the foreign state dict of it."""
    source, flavour, fields = MODELS[name]
    config = (JumboViTConfig if "jumbo" in fields else ViTConfig)(**(SMALL | fields))
    shapes = jax.eval_shape(lambda: logical.to_logical(config.build(nnx.Rngs(0))))
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=t.shape).astype(np.float32) for name, t in shapes.items()}
    model = logical.from_logical(jax.eval_shape(lambda: config.build(nnx.Rngs(0))), tensors)
    return model, config, pretrained.state_dict(source, model, flavour=flavour)


def same_model(a, b):
    one, two = (jax.device_get(logical.to_logical(model)) for model in (a, b))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_ours_to_theirs_to_ours(name):
    model, config, weights = written(name)
    found = pretrained.load(
        MODELS[name][0],
        weights,
        num_heads=2,
        image_size=config.image_size,
        family=config.family if config.family in ("H2", "I2") else None,
        **dict(mlp=config.mlp) if "CLIP" in name else {},
    )
    same_model(found, model)
    assert found.config.k == config.k
    k = found.config.equivariant_blocks  # None where the family tells
    assert found.config == dataclasses.replace(config, equivariant_blocks=k)


@pytest.mark.parametrize("source, path", FILES, ids=lambda value: getattr(value, "stem", value))
def test_theirs_to_ours_to_theirs(source, path):
    weights = state(load(path))
    source = "timm" if "baseline" in path.stem else source
    flavour = pretrained.FORMATS[source].infer(weights, **hints(path))[1]
    back = pretrained.state_dict(source, pretrained.load(source, weights, **hints(path)), flavour=flavour)
    assert back.keys() == weights.keys()
    # Our model does not hold what it never uses.
    unused = "norm.scaling." if "standard_norm.weight" in weights else None
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        if not (unused and name.startswith(unused)):
            np.testing.assert_array_equal(back[name], tensor, err_msg=name)


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pth"])
def test_files_in_wrappers(tmp_path, ending, capsys):
    model, _, weights = written("H8")
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    if ending == ".pth":
        torch_archive.write(tmp_path / "weights.pth", {"model": wrapped, "epoch": 3})
    else:
        reading.write(tmp_path / f"weights{ending}", wrapped)
    same_model(pretrained.load("octic_vits", tmp_path / f"weights{ending}", num_heads=2), model)
    assert capsys.readouterr().out == "octic_vits: dropped on purpose: cls_token.1-4.\n"


def test_half_precision_becomes_float32():
    model = pretrained.load("timm", {n: t.astype(jnp.bfloat16) for n, t in written("plain")[2].items()}, num_heads=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(np.float32)}


def test_everything_that_does_not_fit_is_in_one_message():
    weights = dict(written("H8")[2])
    del weights["norm.bias"], weights["blocks.2.mlp.fc1.weight"]
    weights |= {"fc_norm.weight": np.ones(64), "blocks.0.attn.proj.lin_E.weight": np.ones((16, 15), np.float32)}
    weights |= {"pos_embed.3": np.ones((2, 2, 8), np.int64), "cls_token.2": np.ones((1, 1, 8), np.float32)}
    with pytest.raises(ValueError) as caught:
        pretrained.load("octic_vits", weights, num_heads=2)
    message = str(caught.value)
    assert message.startswith(
        "octic_vits (deit; ViT, family H8, width 64, depth 3, 2 heads, patch 8x8, equivariant blocks 1): "
        "the tensors do not fit."
    )
    for part in (
        "missing: blocks.2.mlp.fc1.weight, norm.bias;",
        "unexpected: fc_norm.weight;",
        "misshapen: blocks.0.attn.proj.lin_E.weight (16, 15), expected (16, 16);",
        "not floating point: pos_embed.3 (int64);",
        "wrong constants: cls_token.2, which must be zeros.",
    ):
        assert part in message, message


def test_a_gap_between_blocks():
    weights = dict(written("H8")[2]) | {"blocks.1000000000.norm1.weight": np.ones(64)}
    with pytest.raises(ValueError, match="block 3 is missing; the file has 4 blocks, up to 1000000000"):
        pretrained.load("octic_vits", weights, num_heads=2)


@pytest.mark.slow
def test_a_new_head(capsys):
    model, _, weights = written("H8")
    heads = [pretrained.load("octic_vits", weights, num_heads=2, num_classes=7, seed=seed) for seed in (0, 0, 1)]
    assert "head.weight, head.bias" in capsys.readouterr().out
    head = [logical.to_logical(model)["head.weight"] for model in heads]
    assert head[0].shape == (64, 7) and heads[0].config.num_classes == 7
    assert 0.015 < head[0].std() < 0.025
    np.testing.assert_array_equal(head[0], head[1])
    assert abs(head[0] - head[2]).max() > 0.01
    np.testing.assert_array_equal(heads[0].readout.norm.scale[...], model.readout.norm.scale[...])
    backbone = pretrained.load("octic_vits", written("I8 dinov2")[2], num_heads=2, num_classes=3)
    assert backbone(jnp.ones((1, 32, 32, 3))).shape == (1, 3)


def test_options_are_fields_of_the_configuration():
    weights = written("D8")[2]
    model = pretrained.load("octic_vits", weights, num_heads=2, pool_first=True, drop_path=0.1)
    assert model.config.pool_first and model.config.drop_path == 0.1
    with pytest.raises(ValueError, match="'drop_pth' is not an option; the nearest is 'drop_path'"):
        pretrained.load("octic_vits", weights, num_heads=2, drop_pth=0.1)


def test_the_order_of_flip_tokens_is_checked():
    weights = dict(written("H2")[2])
    weights[flip.ORDER] = np.roll(weights[flip.ORDER], 1)
    with pytest.raises(ValueError, match="not the token order of any grid|must be the token order of the grid"):
        pretrained.load("flip", weights, num_heads=2, family="H2")
    weights[flip.ORDER] = np.array(written("H2")[2][flip.ORDER])
    weights[flip.ORDER][[0, 1]] = weights[flip.ORDER][[1, 0]]
    with pytest.raises(ValueError, match=f"{re.escape(flip.ORDER)}, which must be the token order of the grid 4x4"):
        pretrained.load("flip", weights, num_heads=2, family="H2")


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("H2", dict(), "family= is not given"),
        ("H2", dict(family="D2"), "family= is 'D2'"),
        ("D2", dict(family="H2"), "family='H2', but the weights are those of 'D2'"),
        ("H8", dict(family="I8"), "family='I8', but the weights are those of 'H8'"),
        ("H8", dict(num_heads=None), "no published model has the width 64 .* give num_heads="),
        ("H8", dict(num_heads=3), "divisible"),
        ("H8", dict(num_heads=0), "num_heads=0 must be a positive whole number"),
        ("H8", dict(num_classes=0), "num_classes=0 must be a positive whole number"),
        ("plain", dict(image_size=(33, 32)), "the height 33 is not divisible by the patch height 8"),
        ("H8", dict(source="flip"), "flip: no tensor 'patch_embed.proj_sym.weight' among"),
        ("plain", dict(source="octic_vits"), "the file is a plain ViT.* load it with the source 'timm'"),
        ("plain", dict(source="tim"), "source='tim' is not one of octic_vits, .*; the nearest is 'timm'"),
        ("H8", dict(source="jumbo"), "jumbo: no tensor 'patch_embed.proj.weight' among"),
        ("Jumbo", dict(source="timm"), "timm .*unexpected: jumbo_token, blocks.0.norm3.weight"),
        ("Jumbo", dict(num_heads=5), "num_heads=5 must divide width=64"),
        ("Jumbo", dict(normed_residual=True), "jumbo: cannot hold a model with normed_residual=True"),
        ("Jumbo", dict(pool_frist=True), "'pool_frist' is not an option; the nearest is 'pool_first'"),
        ("Jumbo's baseline", dict(jumbo=3), "'jumbo' is not an option"),
        ("Jumbo of 2025", dict(), "jumbo: pos_embed has 12 rows, which form no square grid.* give image_size="),
        ("plain registers", dict(), "no square grid of patches.* give image_size="),
        ("plain", dict(image_size=(64, 64)), "do not fit an image of 64x64 in patches of 8x8"),
        ("OpenCLIP quick", dict(), "clip: the file does not determine its activation; give mlp='quick_gelu' .* or"),
        ("transformers' CLIP", dict(), "clip: the file does not determine its activation"),
        ("timm's CLIP", dict(), "clip: the file does not determine its activation"),
        ("hub", dict(source="clip"), "clip .*missing: norm_pre.weight.*unexpected: patch_embed.proj.bias, mask"),
        ("timm's CLIP", dict(source="timm"), "timm .*missing: patch_embed.proj.bias; unexpected: norm_pre.weight"),
        ("H8", dict(head={}), "octic_vits: head= is only for dinov2; other"),
        ("H8", dict(image_size=(64, 64)), r"misshapen: .*pos_embed.0 \(2, 2, 8\), expected \(4, 4, 8\)"),
    ],
)  # fmt: skip
def test_wrong_hints(name, arguments, message):
    arguments = dict(source=MODELS[name][0], num_heads=2) | arguments
    with pytest.raises(ValueError, match=message):
        pretrained.load(arguments.pop("source"), written(name)[2], **arguments)


def test_the_two_spellings_of_a_swiglu_hold_the_same_arrays():
    timm, dinov2 = (pretrained.state_dict("timm", written("SwiGLU")[0], flavour=f) for f in ("timm", "dinov2"))
    np.testing.assert_array_equal(timm["blocks.1.mlp.fc1.weight"], dinov2["blocks.1.mlp.w12.weight"])
    np.testing.assert_array_equal(timm["blocks.1.mlp.fc2.bias"], dinov2["blocks.1.mlp.w3.bias"])
    same_model(*(pretrained.load("timm", state, num_heads=2) for state in (timm, dinov2)))


def test_models_that_a_format_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="cannot hold a model with family='H8'"):
        pretrained.state_dict("timm", written("H8")[0])
    with pytest.raises(ValueError, match="cannot hold a model with isotypic_eps=1e-06"):
        pretrained.state_dict("octic_vits", written("H2")[0])
    with pytest.raises(ValueError, match="flavour='dino' is not one of deit, dinov2, generic"):
        pretrained.state_dict("octic_vits", written("H8")[0], flavour="dino")
    for flavour in ("release", "legacy"):
        for other in ("Jumbo's baseline", "H8 pooled"):
            with pytest.raises(
                ValueError, match=f"jumbo: flavour='{flavour}' is for models with a Jumbo token; take '"
            ):
                pretrained.state_dict("jumbo", written(other)[0], flavour=flavour)
    with pytest.raises(ValueError, match="jumbo: cannot hold a model with norm_eps=1e-06"):
        pretrained.state_dict("jumbo", written("plain")[0])
    for flavour, other in (("release", "Jumbo of 2025"), ("legacy", "Jumbo"), ("plain", "Jumbo")):
        with pytest.raises(ValueError, match="jumbo: cannot hold a model with"):
            pretrained.state_dict("jumbo", written(other)[0], flavour=flavour)


@pytest.mark.parametrize(
    "name, option",
    [
        ("plain", dict(mlp="gelu_tanh")),
        ("DeiT III", dict(norm_eps=1e-5)),
        ("SwiGLU", dict(norm_eps=1e-5)),
        ("hub", dict(mlp="gelu_tanh")),
        ("Jumbo's baseline", dict(mlp="gelu_tanh")),
        ("H8", dict(norm_eps=1e-5)),
        ("H2", dict(norm_eps=1e-5)),
        ("H8", dict(pool="mean")),
        ("D8", dict(pool_first=True)),
        ("OpenAI's CLIP", dict(adaptive=("token",))),
        ("plain", dict(adaptive=("token",))),
    ],
)
def test_a_function_that_no_reader_of_the_file_restores_is_refused(name, option):
    """A file may be read with options that it does not determine, but not written with them."""
    (source, flavour, fields), ((field, value),) = MODELS[name], option.items()
    model = pretrained.load(source, written(name)[2], num_heads=2, family=fields.get("family"), **option)
    with pytest.raises(ValueError, match=re.escape(f"{source}: cannot hold a model with {field}={value!r}; its code")):
        pretrained.state_dict(source, model, flavour=flavour)


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ("octic_vits", I8 | dict(invariant="linear_signed"), "invariant='linear_signed'; its code has 'linear'"),
        ("octic_vits", I8 | dict(pool="class_and_mean", pool_blocks=2), "pool='class_and_mean'; its code has 'class'"),
        ("transformers", dict(class_position=True, layer_scale=None, adaptive=("token",)), "adaptive=('token',)"),
    ],
)
def test_a_readout_that_no_reader_of_the_file_restores_is_refused(source, fields, message):
    model = jax.eval_shape(lambda: ViTConfig(**SMALL | fields).build(nnx.Rngs(0)))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model)
    with pytest.raises(ValueError, match=re.escape(f"{source}: cannot hold a model with {message}")):
        pretrained.state_dict(source, zeros)


@pytest.mark.parametrize("name", ["H2", "plain registers", "H8"])
def test_a_named_model_has_the_hints_that_its_weights_lack(name, tmp_path):
    """Heads of another width, a family, a rectangle of positions; the latter only if the caller gives it."""
    model, config, weights = written(name)
    reading.write(tmp_path / "weights.npz", weights)
    fields = dict(width=64, depth=3, num_heads=2, patch_size=8, mlp_dim=128)
    preset = {"H2": ("flip_vit_ti16", dict(family="H2")), "H8": ("octic_vit_ti16", dict(family="H8"))}
    named, family = preset.get(name, ("vit_ti16", {}))
    make = functools.partial(models.create, named, pretrained=str(tmp_path / "weights.npz"), **fields, **family)
    same_model(make(image_size=config.image_size), model)
    if name == "plain registers":
        with pytest.raises(ValueError, match="no square grid of patches"):
            make()


def test_a_new_head_keeps_the_statistics_of_clip(tmp_path):
    reading.write(tmp_path / "clip.npz", written("OpenAI's CLIP")[2])
    given = [f"--input={tmp_path / 'clip.npz'}", f"--output={tmp_path / 'model'}", "--num_heads=2", "--num_classes=4"]
    assert convert.main(given) == 0
    assert saved.trained_on(tmp_path / "model").images == loading.CLIP
    model = pretrained.load(tmp_path / "clip.npz", num_heads=2, num_classes=4)
    assert loading.normalisation(str(tmp_path / "clip.npz"), model.config) == loading.CLIP


def test_entries_that_a_configuration_of_transformers_must_have_are_printed(capsys):
    model = pretrained.load("timm", written("plain")[2], num_heads=2, mlp="gelu_tanh")
    state = pretrained.state_dict("transformers", model)
    entries = '"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-06'
    assert capsys.readouterr().out == f"transformers: the config.json beside the file must have {entries}.\n"
    same = pretrained.load("transformers", state, num_heads=2, **described.facts(json.loads(f"{{{entries}}}")))
    assert (same.config.mlp, same.config.norm_eps) == ("gelu_tanh", 1e-6)
    pretrained.state_dict("transformers", pretrained.load("transformers", state, num_heads=2))
    assert capsys.readouterr().out == ""


def test_convert_there_and_back(tmp_path, capsys):
    weights, original, back = written("I2")[2], tmp_path / "weights.npz", tmp_path / "back.safetensors"
    reading.write(original, {f"_orig_mod.{name}": tensor for name, tensor in weights.items()})
    there = [f"--input={original}", f"--output={tmp_path / 'model'}", "--source=flip", "--family=I2", "--num_heads=2"]
    assert convert.main(there) == 0
    assert "I2, width 64, depth 3, 2 heads, patch 8x8" in capsys.readouterr().out
    same_model(saved.load(tmp_path / "model"), written("I2")[0])
    assert convert.main([f"--input={tmp_path / 'model'}", f"--output={back}", "--to=flip"]) == 0
    found = reading.read(back)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_convert_says_what_is_wrong_in_one_line(tmp_path, capsys):
    assert convert.main(["--source=flip", f"--input={tmp_path / 'absent.pth'}", f"--output={tmp_path}"]) == 1
    assert convert.main(["--to=flip", f"--input={tmp_path}", f"--output={tmp_path / 'a.safetensors'}"]) == 1
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 2 and "absent.pth: there is no such file" in errors[0] and "not a saved model" in errors[1]


def test_a_saved_model_that_is_not_whole(tmp_path):
    saved.save(tmp_path, written("plain")[0])
    same_model(saved.load(tmp_path), written("plain")[0])
    (tmp_path / "model.json").write_text((tmp_path / "model.json").read_text().replace('"depth": 3', '"depth": 2'))
    with pytest.raises(ValueError, match="do not fit model.json; missing, unexpected or misshapen: blocks.2"):
        saved.load(tmp_path)
    header = json.dumps({"head.bias": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "parameters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="parameters.safetensors: tensor 'head.bias' has .* F8_E4M3; write it"):
        saved.load(tmp_path)
    (tmp_path / "parameters.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="parameters.safetensors: is damaged"):
        saved.load(tmp_path)
    os.remove(tmp_path / "parameters.safetensors")
    with pytest.raises(FileNotFoundError, match="no parameters.safetensors"):
        saved.load(tmp_path)
    for damaged in (
        b'{"widht": 3}',
        b"null",
        b"[]",
        b"",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"kind": "vit", "width": "16"}',
    ):
        (tmp_path / "model.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{tmp_path}/model.json: is damaged, or of another version"):
            saved.load(tmp_path)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint64", "bool", "complex64"])
def test_a_saved_model_of_numbers_that_are_no_parameters(tmp_path, dtype):
    """It would compute zeros, or fail in the middle of the model."""
    saved.save(tmp_path, written("plain")[0])
    tensors = safetensors.numpy.load_file(tmp_path / "parameters.safetensors")
    tensors["head.weight"] = tensors["head.weight"].astype(dtype)
    safetensors.numpy.save_file(tensors, tmp_path / "parameters.safetensors")
    with pytest.raises(ValueError, match=rf"floating-point numbers, .* These are not: head.weight \({dtype}\).$"):
        saved.load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_saved_model_that_diverged_is_named(tmp_path, value):
    saved.save(tmp_path, written("plain")[0])
    tensors = safetensors.numpy.load_file(tmp_path / "parameters.safetensors")
    tensors["blocks.1.mlp.fc1.bias"][0] = value
    safetensors.numpy.save_file(tensors, tmp_path / "parameters.safetensors")
    with pytest.raises(ValueError, match=r"These are not: blocks.1.mlp.fc1.bias \(NaN or infinity\).$"):
        saved.load(tmp_path)


def test_names_in_brief():
    given = ["cls_token.1", "cls_token.2", "cls_token.3", "permutation", "head.0"]
    assert reading.brief(given) == "cls_token.1-3, permutation, head.0"
    given = [f"stage{i}.blocks.{j}.mask" for i in range(2) for j in range(3)]
    assert reading.brief(["mask", *given, "head.0"]) == "mask, stage*.blocks.*.mask (6), head.0"
