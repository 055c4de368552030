"""Public backbones under every spelling of their files, against their own codes; and with replaced blocks."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from equivit import logical, models, pretrained
from equivit.depthwise.replacement import patches_only, replace
from equivit.pretrained import reading
from tests.parity.arrays import FIXTURES, TOLERANCE, Comparison, files, images, load, state
from tests.parity.models_test import sequence

# Source, and what no name tells.
SOURCES = {
    "dinov2_hub": ("dinov2", {}),
    "dinov2_transformers": ("dinov2", {}),
    "dinov2_transformers_registers": ("dinov2", {}),
    "clip_openai": ("clip", {}),
    "clip_transformers": ("clip", dict(mlp="quick_gelu")),
    "openclip_gelu": ("clip", dict(mlp="gelu")),
    "mae": ("mae", {}),
    "deit3": ("timm", {}),
}
FILES = [path for path in files("depthwise") if path.stem in SOURCES]
ARCHIVE = FIXTURES / "depthwise" / "clip_openai_torchscript.pt"
COMPARED = ("cls", "patches", "tokens_before_norm", "embedding", "alone", "alone_mean", "replaced")
TEXT = ("logit_scale", "text_projection", "token_embedding", "positional_embedding", "transformer", "ln_final")


@functools.cache
def backbone(path: pathlib.Path):
    data = load(path)
    source, options = SOURCES[path.stem]
    return pretrained.load(source, state(data), num_heads=int(data["num_heads"]), **options), data


@jax.jit
def tokens(model, x):
    """Tokens and embedding, by the names of the files."""
    features = model.features(x)
    found = {"cls": features.cls, "patches": features.patches.values}
    found |= {"tokens_before_norm": sequence(model.features(x, norm=False))}
    return found if model.head is None else found | {"embedding": model(x)}


@jax.jit
def alone(model, x):
    """The patch tokens of a model without any others."""
    return {"alone": model.features(x).patches.values, "alone_mean": model.pooled(x)}


def replaced(model, data):
    """The model of patches alone with head 1 of block 0, block 1 and block 2 replaced."""
    for where, kind in (({0: (1,)}, "conv"), ({1: None}, "dw"), ({2: None}, "ens_dw")):
        model = replace(model, where, kind=kind, form="printed")
    taps = {key.removeprefix("taps/"): x for key, x in data.items() if key.startswith("taps/")}
    tensors = {f"blocks.{block}.attention.taps": x for block, x in taps.items()}
    tensors |= {"blocks.2.attention.gamma": data["gamma/2"]}
    return logical.from_logical(model, logical.to_logical(model) | tensors)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_backbone(path, record_property):
    model, data = backbone(path)
    patches = patches_only(model)
    convolved = replaced(patches, data)
    compared = {key: x for key, x in data.items() if key.startswith("output/") and key.endswith(COMPARED)}
    comparison = Comparison(compared)
    for key in [key for key in data if key.startswith("input/image_")]:
        grid, x = key.removeprefix("input/image_"), images(data, key)
        found = tokens(model, x) | alone(patches, x) | {"replaced": alone(convolved, x)["alone"]}
        for name, array in found.items():
            comparison.array(f"output/{grid}/{name}", array)
    comparison.finish(record_property, "backbones")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_written_as_they_were(path):
    model, data = backbone(path)
    source, theirs = SOURCES[path.stem][0], state(data)
    flavour = pretrained.FORMATS[source].infer(
        {name: x for name, x in theirs.items() if not name.startswith(TEXT)}, num_heads=int(data["num_heads"])
    )[1]
    ours = pretrained.state_dict(source, model, flavour=flavour)
    left_out = {name for name in theirs if name.startswith(TEXT) or name in ("context_length", "vocab_size")}
    assert ours.keys() == theirs.keys() - left_out
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape


def test_a_torchscript_archive_of_openai(capsys):
    """In half precision, which is exact in float32; its code is not run, nor read."""
    half = reading.read(ARCHIVE)
    assert {x.dtype for x in half.values()} == {np.dtype(np.float16), np.dtype(np.int64)}
    model = pretrained.load("clip", ARCHIVE, num_heads=3)
    assert "clip: dropped on purpose: logit_scale, " in capsys.readouterr().out
    config = model.config
    assert (config.mlp, config.projection, config.image_size, config.num_classes) == ("quick_gelu", 24, (64, 64), None)
    ours = pretrained.state_dict("clip", model)
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, half[name].astype(tensor.dtype), err_msg=name)
    for path in FILES:
        if path.stem == "clip_openai":
            for name, tensor in state(load(path)).items():
                np.testing.assert_array_equal(tensor.astype(half[name].dtype), half[name], err_msg=name)


def test_what_is_nearly_right_is_caught():
    """The wrong GELU, epsilon or rule of positions changes the tokens by more than the tolerance."""
    wrong = {
        "clip_openai": [dict(mlp="gelu"), dict(norm_eps=1e-6)],
        "dinov2_hub": [dict(position_offset=0.0), dict(norm_eps=1e-5)],
    }
    for path in FILES:
        model, data = backbone(path)
        key = [key for key in data if key.startswith("input/image_")][-1]
        for options in wrong.get(path.stem, []):
            expected = data[f"output/{key.removeprefix('input/image_')}/patches"]
            other = tokens(models.reconfigure(model, **options)[0], images(data, key))["patches"]
            assert np.abs(other - expected).max() > TOLERANCE * np.abs(expected).max(), options
