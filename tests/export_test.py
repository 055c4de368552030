"""Exported files against the models that they were made of, what is in them, and how long they take."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import convert, export, models, onnx_files, profile, safetensors_files, testing
from equivit.models import saved
from equivit.models.features import Grid
from equivit.models.inference import deployed
from equivit.models.segmenter.model import SegmenterConfig
from equivit.models.vit.config import ViTConfig
from equivit.trained_on import TrainedOn
from tests.models import backbones
from tests.models.adaptive import SWIN

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax2onnx", "onnxruntime")),
    reason="make install-export installs jax2onnx and onnxruntime",
)
needs_flatbuffers = pytest.mark.skipif(
    importlib.util.find_spec("flatbuffers") is None, reason="make install-export installs flatbuffers"
)
SMALL = dict(width=32, depth=2, num_heads=2, patch_size=8, image_size=(32, 32), num_classes=5)
SIZE = (24, 40)  # another grid than that of the learned positions, odd and not square
PATCHES = dict(class_token=False, num_heads=4)
# Every kind of replacement, beside an attention that stays; in two models, so that each is small.
WHOLE = dict(PATCHES, depth=5, replaced=((0, "dw", 5), (1, "conv"), (2, "spvit"), (3, "ens_dw")))
SCATTERED = dict(PATCHES, replaced=((0, "dw", 3, (1, 3)), (1, "conv", 3, (0,))))


@functools.cache
def model(name="vit_ti16", **options):
    return testing.randomise(models.abstract(name, **SMALL | options), jax.random.key(0))


def segmenter(**backbone):
    config = SegmenterConfig(
        ViTConfig(**SMALL | dict(num_classes=None, class_token=False) | backbone), 3, decoder="convolutions", width=8
    )
    return testing.randomise(jax.eval_shape(lambda: config.build(nnx.Rngs(0))), jax.random.key(0))


@needs_onnx
@pytest.mark.parametrize(
    "make, options, convolutions",
    [
        (lambda: model(), dict(layout="nchw", batch=2), 0),
        (lambda: model(**WHOLE), {}, 4),
        (lambda: model(**SCATTERED), dict(opset=20), 2),
        (lambda: model("clip_vit_b16", projection=6, num_classes=None), {}, 0),
        (lambda: model("octic_vit_ti16", family="I8", width=64, replaced=((0,),), class_token=False), {}, 1),
        (lambda: segmenter(replaced=((1,),)), {}, 3),  # the decoder has two
    ],
    ids=["plain", "replaced", "scattered", "clip", "octic", "segmenter"],
)
def test_onnx_runtime_agrees_with_the_model(make, options, convolutions, tmp_path):
    """`write` compares, within 1e-4; rounding leaves less than a hundredth of that."""
    path = tmp_path / "model.onnx"
    written = export.write(path, make(), SIZE, **options)
    assert written.deviation < 1e-6 and written.bytes == path.stat().st_size
    operations = onnx_files.operations(path)
    assert operations.count("Conv") == convolutions
    assert not {"Loop", "Scan", "If"} & set(operations)
    assert [path] == list(tmp_path.iterdir())


@needs_onnx
@pytest.mark.parametrize("options", [WHOLE, SCATTERED, dict(num_classes=None)], ids=["whole", "scattered", "tokens"])
def test_a_dynamic_batch_takes_any_number_of_images(options, tmp_path):
    """`write` compares on one image and on three; here two and five."""
    path, given = tmp_path / "model.onnx", model(**options)
    assert export.write(path, given, SIZE, batch=None).deviation < 1e-6
    session = onnx_files.session(path)
    assert [each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())] == ["batch"] * (
        3 if given.head is None else 2
    )
    _, function = export._function(given, SIZE, ())
    images = np.random.default_rng(0).normal(size=(5, *SIZE, 3)).astype(np.float32)
    outputs = jax.jit(function)(given, images)
    for number in (2, 5):
        for found, wanted in zip(session.run(None, {"image": images[:number]}), outputs, strict=True):
            np.testing.assert_allclose(found, wanted[:number], atol=1e-6 * np.abs(wanted).max())
    profile.profile([path], runs=1, warmup=0)  # one image


@pytest.mark.slow
@needs_onnx
def test_a_dynamic_batch_that_runs_on_one_image_only_is_not_left(tmp_path):
    """In a file of a replaced octic block jax2onnx writes the batch as 1."""
    path = tmp_path / "model.onnx"
    octic = model("octic_vit_ti16", family="I8", width=64, replaced=((0,),), class_token=False)
    with pytest.raises(ValueError, match=r"^--batch=dynamic: ONNX Runtime cannot run the file; nothing was written"):
        export.write(path, octic, SIZE, batch=None)
    assert not list(tmp_path.iterdir())


@needs_flatbuffers
def test_stablehlo_with_a_dynamic_batch(tmp_path):
    octic = model("octic_vit_ti16", family="I8", width=64, replaced=((0,),), class_token=False)
    assert export.write(tmp_path / "model.stablehlo", octic, SIZE, batch=None).deviation < 1e-6


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_off_on_a_gpu_unless_it_is_asked_for(tf32, monkeypatch):
    """By a stand-in for ONNX Runtime, which records how it is opened."""
    opened = []

    def session(path, options, providers):
        opened.append((providers, os.environ.get(onnx_files.TF32)))
        return types.SimpleNamespace(get_providers=lambda: list(onnx_files.PROVIDERS.values()))

    runtime = types.SimpleNamespace(
        get_available_providers=lambda: list(onnx_files.PROVIDERS.values()),
        SessionOptions=types.SimpleNamespace,
        InferenceSession=session,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setenv(onnx_files.TF32, "0")
    for provider in profile.PROVIDERS:
        onnx_files.session("a.onnx", provider=provider, tf32=tf32)
    cuda = ("CUDAExecutionProvider", {"use_tf32": "1" if tf32 else "0"})
    by_name = [["CPUExecutionProvider"], [cuda], ["TensorrtExecutionProvider", cuda]]
    assert [providers for providers, _ in opened] == by_name
    assert opened[-1][1] == (None if tf32 else "0")


@needs_onnx
def test_a_file_has_the_names_of_the_classes(tmp_path):
    """Also one of weights for another library."""
    names, place = ("ant", "bee", "cat", "dog", "eel"), tmp_path / "model"
    saved.save(place, model(depth=1), TrainedOn(names, 12))
    output = tmp_path / "model.onnx"
    assert export.main([f"--input={place}", f"--output={output}", "--image_size=24,40"]) == 0
    metadata = onnx_files.session(output).get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == list(names)
    weights = tmp_path / "timm.safetensors"
    assert convert.main(["--to=timm", f"--input={place}", f"--output={weights}"]) == 0
    assert json.loads(safetensors_files.metadata(weights)["classes"]) == list(names)


@needs_onnx
def test_attention_is_two_products_around_a_softmax(tmp_path):
    """And beside the weights, which are wide here, the file holds next to nothing."""
    path = tmp_path / "model.onnx"
    written = export.write(path, model(width=256), SIZE)
    assert written.bytes <= 1.02 * written.parameters
    operations = onnx_files.operations(path)
    # Per block: three maps to queries, keys and values, two products, the projection, two of the MLP; and the head.
    assert operations.count("Softmax") == 2 and operations.count("MatMul") == 1 + 2 * 8 + 1
    assert operations.count("LayerNormalization") == 5 and "Einsum" not in operations


@needs_onnx
def test_half_precision_and_tokens(tmp_path):
    path = tmp_path / "model.onnx"
    written = export.write(path, model(num_classes=None), SIZE, half=True)
    assert 1e-5 < written.deviation < 1e-2  # it is rounded, and not more than is said
    session = onnx_files.session(path)
    (image,), outputs = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("image", "tensor(float16)", [1, *SIZE, 3])
    assert [(each.name, each.shape) for each in outputs] == [("patches", [1, 3, 5, 32]), ("class", [1, 32])]


@needs_onnx
def test_the_backbone_of_a_segmenter(tmp_path):
    """It has the maps that the decoder reads, each after the final norm."""
    place, path = tmp_path / "model", tmp_path / "backbone.onnx"
    segments = segmenter(depth=3)
    segments.config = dataclasses.replace(segments.config, blocks=(0, 1))
    saved.save(place, segments)
    assert export.main([f"--input={place}", f"--output={path}", "--image_size=24,40", "--backbone"]) == 0
    session, image = onnx_files.session(path), np.ones((1, *SIZE, 3), np.float32)
    names = [each.name for each in session.get_outputs()]
    assert names == ["patches_0", "patches_1", "patches"]
    grids = jax.jit(lambda m, x: m.features(x, blocks=(0, 1)).grids)(segments, image)
    for found, grid in zip(session.run(names, {"image": image}), grids, strict=True):
        np.testing.assert_allclose(found, grid.values, atol=1e-5 * np.abs(grid.values).max())
    # Two in each block, and the final one of each map.
    assert onnx_files.operations(path).count("LayerNormalization") == 2 * 3 + 3


def test_blocks_of_a_model_with_a_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"blocks=\(0,\) are outputs of a model without a head"):
        export.write(tmp_path / "model.stablehlo", model(), SIZE, blocks=(0,))


@needs_onnx
def test_a_file_that_deviates_is_not_left(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("an older file")
    monkeypatch.setattr("equivit.models.inference.attend", lambda q, k, v: v)  # a wrong attention
    with pytest.raises(ValueError, match=r"deviates from the model by .* more than 0.0001; nothing was written"):
        export.write(path, model(), SIZE)
    assert path.read_text() == "an older file" and [path] == list(tmp_path.iterdir())


def test_nan_in_any_output_is_a_deviation(tmp_path, monkeypatch):
    def damaged(path, call, inputs):
        path.touch()
        patches, token = jax.device_get(jax.jit(call)(inputs[0]))
        return [[patches, np.full_like(token, np.nan)]]

    monkeypatch.setattr(export, "_through_stablehlo", damaged)
    with pytest.raises(ValueError, match="deviates from the model by nan of the largest entry"):
        export.write(tmp_path / "model.stablehlo", model(num_classes=None), SIZE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("a.onnx", "float32", "try another --opset, or write a .stablehlo file"),
        ("a.stablehlo", "float32", "write an .onnx file"),
        ("a.stablehlo", "float16", "leave out --half"),
    ],
)
def test_a_deviation_names_what_the_format_allows(name, kind, hint):
    with pytest.raises(ValueError, match=rf"--output={name}: .*; nothing was written: {hint}\.$"):
        export._check(pathlib.Path(name), math.nan, export.TOLERANCES[kind])


@needs_onnx
def test_what_cannot_be_written_is_refused_and_still_runs(tmp_path):
    """Functions that are traced for ONNX must not stay in JAX's caches."""
    padded = jax.jit(lambda x: jnp.pad(x, 1))
    function = lambda x: (jax.image.resize(padded(x), (2, 3), "linear"),)  # noqa: E731
    with pytest.raises(ValueError, match=r"jax2onnx cannot write this function at opset 17: .*antialias.*\.stablehlo"):
        onnx_files.write(tmp_path / "f.onnx", function, jax.ShapeDtypeStruct((4, 5), "float32"), ("y",), opset=17)
    assert not list(tmp_path.iterdir()) and jax.jit(function)(np.ones((4, 5), np.float32))[0].shape == (2, 3)


@needs_onnx
def test_an_opset_that_the_libraries_do_not_have_is_named(tmp_path, monkeypatch, capsys):
    path, newest = tmp_path / "model.onnx", onnx_files.library("onnx").defs.onnx_opset_version()
    for opset, near in ((3, 13), (newest + 1, newest)):
        message = f"--opset={opset} must lie between 13 and {newest}; the nearest is {near}."
        assert export.main([f"--input={tmp_path}", f"--output={path}", "--image_size=24,40", f"--opset={opset}"]) == 1
        assert message in capsys.readouterr().err
        with pytest.raises(ValueError, match=message):
            onnx_files.write(path, jnp.sin, jax.ShapeDtypeStruct((2,), "float32"), ("y",), opset=opset)
    monkeypatch.setattr(onnx_files, "OLDEST", 3)  # an ONNX Runtime may have fewer than the standard
    with pytest.raises(ValueError, match=r"--opset=3: nothing was written: leave it out for the default, 17") as raised:
        export.write(path, model(), SIZE, opset=3)
    assert str(path) in str(raised.value) and ".part" not in str(raised.value) and not list(tmp_path.iterdir())


def test_endings_and_layouts_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.pb: the ending selects the format and must be .onnx or .stablehlo"):
        export.write(tmp_path / "model.pb", model(), SIZE)
    with pytest.raises(ValueError, match="layout='hwc' is not one of nhwc, nchw; the nearest is 'nhwc'"):
        export.write(tmp_path / "model.onnx", model(), SIZE, layout="hwc")
    with pytest.raises(ValueError, match="write: batch=0 must be positive, or None for any number of images"):
        export.write(tmp_path / "model.onnx", model(), SIZE, batch=0)
    with pytest.raises(ValueError, match="^image_size 24x41: the width 41 is not divisible"):
        export.write(tmp_path / "model.onnx", model(), (24, 41))


def test_a_model_in_training_is_written_as_it_evaluates(tmp_path):
    training = model(depth=1, drop_path=0.5)
    training.train()
    assert export.write(tmp_path / "model.stablehlo", training, SIZE).deviation < 1e-4
    assert training.deterministic is False


@needs_flatbuffers
def test_patches_of_an_adaptive_model_come_with_their_place(tmp_path):
    """Placed on the image by "offset", they move with it, by shifts that no stride divides."""
    adaptive = backbones.model("swin_t", **SWIN | dict(depths=(1, 1), num_classes=None))
    path, size = tmp_path / "model.stablehlo", (16, 24)
    assert export.write(path, adaptive, size).deviation < 1e-5
    call = jax.export.deserialize(bytearray(path.read_bytes())).call
    image, shift = np.random.default_rng(1).normal(size=(1, *size, 3)).astype(np.float32), (3, 5)
    (values, offset), (moved, place) = jax.device_get([call(image), call(np.roll(image, shift, (1, 2)))])
    np.testing.assert_array_equal(place, (offset + np.array(shift)) % size)
    pixels = [Grid(patches, (4, 4), at).pixels() for patches, at in ((values, offset), (moved, place))]
    np.testing.assert_allclose(pixels[1], np.roll(pixels[0], shift, (1, 2)), atol=1e-5)


def test_another_place_of_the_patches_is_a_deviation():
    """However near: of an image of 224 pixels one more is less than half precision leaves."""
    offset = np.array([[223, 7]], np.int32)
    assert export._deviation(offset.copy(), offset) == 0 and export._deviation(offset + 1, offset) > 1


@needs_flatbuffers
def test_stablehlo_comes_back(tmp_path):
    written = export.write(tmp_path / "model.stablehlo", model(**WHOLE), SIZE)
    assert written.deviation < 1e-6


def test_what_is_deployed_is_folded_and_has_the_positions_of_the_grid():
    form = deployed(model(**WHOLE), SIZE)
    assert form.position((3, 5)).shape == (15, 32)
    assert deployed(model(position="sincos"), SIZE).position((3, 5)).shape == (15, 32)  # which has no parameters
    shapes = [block.attention.proj.weight[...].shape for block in form.blocks.blocks]
    assert shapes == [(32, 32), (32, 32), (8, 32), (8, 32), (32, 32)]
    image = np.random.default_rng(1).normal(size=(1, *SIZE, 3)).astype(np.float32)
    call = jax.jit(lambda model, image: (model(image), model.features(image, blocks=(1,)).blocks[1].patches.values))
    for ours, theirs in zip(call(form, image), call(model(**WHOLE), image), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@needs_onnx
def test_profile_of_two_files(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, options in zip(files, ({}, WHOLE), strict=True):
        export.write(path, model(**options), SIZE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("nobody asked for another priority"))
    cores = os.sched_getaffinity(0)
    arguments = [*map(str, files), "--runs=3", "--warmup=1", f"--out={tmp_path / 'out.json'}"]
    assert profile.main(arguments) == 0
    assert os.sched_getaffinity(0) == cores and "at ordinary priority" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    first, second = report["files"]
    assert first["ratio"] == 1 and second["ratio"] == pytest.approx(second["milliseconds"] / first["milliseconds"])
    before = files[1].read_bytes()
    (tmp_path / "link.json").symlink_to(files[1])
    for out in (files[1], tmp_path / "link.json"):
        assert profile.main([*map(str, files), f"--out={out}"]) == 1
        assert f"--out={out}: this is one of the files to time; give another, such as" in capsys.readouterr().err
        assert files[1].read_bytes() == before
    for provider in ("cuda", "tensorrt"):
        assert profile.main([str(files[0]), f"--provider={provider}"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --provider={provider}: this ONNX Runtime has ")
    assert profile.main([str(files[0]), "--tf32"]) == 1
    assert "error: --tf32: a CPU has no such products; leave it out" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are not pinned to cores here")
@pytest.mark.parametrize("allowed", [True, False])
def test_real_time_priority_is_taken_when_asked_for_and_given_back(allowed, monkeypatch, capsys):
    asked, before = [], (os.sched_getaffinity(0), os.sched_getscheduler(0))

    def take(process, policy, parameters):
        asked.append(policy)
        if policy == os.SCHED_FIFO and not allowed:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", take)
    with contextlib.ExitStack() as stack:
        if not allowed:
            stack.enter_context(pytest.raises(PermissionError, match="this process may not .*; leave it out"))
        with profile.alone(realtime=True) as conditions:
            assert conditions.endswith("at real-time priority 99 (FIFO)")
    assert asked == [os.SCHED_FIFO, before[1]] and os.sched_getaffinity(0) == before[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output": "model.pb"}, "the ending selects the format and must be .onnx or .stablehlo"),
        ({"output": "there/is/no.onnx"}, "there is no directory"),
        ({"image_size": "24,41"}, "the width 41 is not divisible by the patch width 8; the nearest are 40 and 48"),
        ({"output": "model.stablehlo", "opset": "18"}, "--opset=18 is only for .onnx"),
    ],
)
def test_errors_are_one_line(changes, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved.save(tmp_path / "model", model())
    given = {"input": "model", "output": "model.onnx", "image_size": "24,40", **changes}
    assert export.main([f"--{name}={value}" for name, value in given.items()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_without_the_extra_one_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    for name in ("jax2onnx", "onnxruntime", "flatbuffers"):
        monkeypatch.setitem(sys.modules, name, None)
    for ending, name in ((".onnx", "jax2onnx"), (".stablehlo", "flatbuffers")):
        with pytest.raises(ValueError, match=f"{name} is not installed .* make install-export"):
            export.write(tmp_path / f"model{ending}", model(), SIZE)
    (tmp_path / "model.onnx").write_bytes(b"")
    assert profile.main([str(tmp_path / "model.onnx")]) == 1
    assert "make install-export" in capsys.readouterr().err


def test_the_standard_library_keeps_its_profile():
    import cProfile
    import profile as standard

    assert standard is not profile and cProfile.Profile is not None
