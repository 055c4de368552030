"""Starting from another model's parameters: other image sizes, other classes, no fit."""

import re
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained, testing
from equivit.depthwise import replacement
from equivit.layers.position import bicubic
from equivit.models import saved, zoo
from equivit.models.vit.replaced import Replaced
from equivit.pretrained import reading
from equivit.training import build, warm_start
from equivit.training import config as configs
from equivit.training.config import get_base

SIZE = dict(width=24, num_heads=2, depth=1, patch_size=4, num_classes=4, in_channels=3)


def create(name, **options):
    return testing.randomise(zoo.abstract(name, **{**SIZE, **options}), jax.random.key(3))


def config(path, name="vit_ti16", **model):
    c = get_base()
    c.init = str(path)
    c.model.update({**SIZE, "name": name, **model})
    return c


def initial_parameters(config):
    return warm_start.initial_parameters(config, build.model_configuration(config))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A saved model of a 2 x 3 grid."""
    path = tmp_path_factory.mktemp("plain")
    model = create("vit_ti16", image_size=(8, 12), position_antialias=True)
    saved.save(path, model)
    return path, model


def test_the_same_model(plain, capsys):
    path, model = plain
    arrays = initial_parameters(config(path, image_size=(8, 12)))
    jax.tree.map(np.testing.assert_array_equal, arrays, logical.take(model))
    assert not capsys.readouterr().out
    assert warm_start.initial_parameters(get_base(), model.config) == {}


def test_other_sizes_and_classes(plain, capsys):
    path, model = plain
    c = config(path, image_size=(20, 16), num_classes=7)
    arrays = initial_parameters(c)
    table = jax.image.resize(model.position.table[...], (5, 4, 24), "cubic", antialias=True)
    np.testing.assert_allclose(arrays["position.table"], table, atol=1e-6)
    assert not any(leaf.startswith("head.") for leaf in arrays)
    said = capsys.readouterr().out
    assert ": resized: position.table; drawn: head.bias, head.weight." in said
    whole = jax.eval_shape(lambda: logical.put(build.make_model(c, nnx.Rngs(0)), arrays))
    assert whole.head.weight.shape == (24, 7) and whole.position.table.shape == (5, 4, 24)


def test_positions_are_antialiased_as_the_new_model_says(tmp_path):
    model = create("vit_ti16", image_size=(16, 24))
    saved.save(tmp_path / "sharp", model)
    tables = [
        initial_parameters(config(tmp_path / "sharp", image_size=(8, 12), position_antialias=antialias))[
            "position.table"
        ]
        for antialias in (False, True)
    ]
    wanted = jax.image.resize(model.position.table[...], (2, 3, 24), "cubic", antialias=True)
    np.testing.assert_allclose(tables[1], wanted, atol=1e-6)
    assert np.abs(tables[0] - wanted).max() > 0.1 * np.abs(wanted).max()


def test_a_model_without_a_head(plain, capsys):
    path = plain[0]
    c = config(path, image_size=(8, 12))
    c.model.num_classes = None
    assert "head.weight" not in initial_parameters(c)
    assert "dropped: head.bias, head.weight" in capsys.readouterr().out


def test_in_a_segmenter_no_head_is_drawn(plain, capsys):
    c = config(plain[0], image_size=(8, 12), num_classes=7)
    c.objective.name = "segmentation"
    assert not any(leaf.startswith("head.") for leaf in initial_parameters(c))
    said = capsys.readouterr().out
    assert "dropped: head.bias, head.weight" in said and "drawn" not in said


def test_a_norm_after_the_mean_is_new(plain, capsys):
    """MAE's fine-tuning drops the norm that the pretraining ended with."""
    c = config(plain[0], image_size=(8, 12), pool="mean", fc_norm=True)
    arrays = initial_parameters(c)
    assert not any(leaf.startswith("readout.") for leaf in arrays)
    said = capsys.readouterr().out
    assert "drawn: readout.fc_norm.bias, readout.fc_norm.scale; dropped: readout.norm.bias, readout.norm.scale" in said


@pytest.mark.parametrize(("fields", "message"), [
    (dict(width=32), r"config\.model\.width=32 instead of 24\.$"),
    (dict(depth=2), r"config\.model\.depth=2 instead of 1\.$"),
    (dict(width=32, depth=2), r"config\.model\.width=32 instead of 24; config\.model\.depth=2 instead of 1\.$"),
    (dict(name="swin_t"), r"config\.model\.name='swin_t' is a Swin, and the model of .* a ViT; set .*='vit_"),
])  # fmt: skip
def test_what_does_not_fit_is_named(plain, fields, message):
    """By keys of the config, not by parameters."""
    if "name" in fields:
        c = config(plain[0])
        c.model = dict(name="swin_t", image_size=(32, 32), num_classes=4)
    else:
        c = config(plain[0], image_size=(8, 12), **fields)
    with pytest.raises(ValueError, match=r"config\.(init|model)") as raised:
        initial_parameters(c)
    assert re.search(message, str(raised.value)), raised.value


@pytest.mark.parametrize(("field", "value", "theirs"), [("num_heads", 3, 2), ("mlp", "quick_gelu", "gelu")])
def test_weights_that_would_fit_and_mean_something_else_are_refused(plain, field, value, theirs):
    message = (
        rf"config.model.{field}={value!r}: the model of config.init=.* has {theirs!r}, .*; set config.model.{field}="
    )
    with pytest.raises(ValueError, match=message):
        initial_parameters(config(plain[0], image_size=(8, 12), **{field: value}))


@pytest.mark.parametrize(
    ("name", "field", "theirs", "ours", "refused"),
    [
        ("vit_ti16", "position", "sincos", "sincos_inclusive", True),
        ("jumbo_vit_ti16", "normed_residual", False, True, True),
        ("flip_vit_ti16", "isotypic_norm", "official", "balanced", True),
        ("flip_vit_ti16", "isotypic_eps", 1e-6, 1e-5, True),
        ("vit_ti16", "isotypic_eps", 1e-6, 1e-5, False),  # without effect
    ],
)
def test_another_table_norm_or_residual_is_refused(tmp_path, name, field, theirs, ours, refused):
    options = dict(image_size=(8, 12), width=32, depth=2)
    saved.save(tmp_path, create(name, **options, **{field: theirs}))
    initial_parameters(config(tmp_path, name, **options, **{field: theirs}))
    with pytest.raises(ValueError, match=f"set config.model.{field}={theirs!r}") if refused else nullcontext():
        initial_parameters(config(tmp_path, name, **options, **{field: ours}))


def test_the_config_tells_what_a_file_does_not(tmp_path):
    """The activation of a CLIP that is not OpenAI's, and the heads of a width that nobody has published."""
    options = dict(image_size=(8, 8), projection=6, num_classes=None, mlp="gelu")
    model = create("clip_vit_b16", **options)
    reading.write(tmp_path / "clip.safetensors", pretrained.state_dict("clip", model, flavour="openclip"))
    c = config(f"clip:{tmp_path / 'clip.safetensors'}", "clip_vit_b16", **options)
    jax.tree.map(np.testing.assert_array_equal, initial_parameters(c), logical.take(model))


def test_positions_are_resized_to_the_exact_size_unless_told(tmp_path):
    """DINOv2's offset is for images of another size than a model's own; a run's images are of its own size."""
    saved.save(tmp_path, model := create("dinov2_vit_ti16", image_size=(20, 20), position_offset=0.1, num_classes=4))
    for offset in (0.0, 0.1):
        options = dict(image_size=(16, 28), position_offset=offset)
        arrays = initial_parameters(config(tmp_path, "dinov2_vit_ti16", **options))
        rows, columns = bicubic(5, 4, offset=offset), bicubic(5, 7, offset=offset)
        expected = np.einsum("ij,kl,jlc->ikc", rows, columns, model.position.table[...])
        np.testing.assert_allclose(arrays["position.table"], expected, rtol=0, atol=1e-6)


def test_positions_of_an_equivariant_model_are_resized(tmp_path, capsys):
    options = dict(width=64, depth=2)
    saved.save(tmp_path, create("octic_vit_ti16", image_size=(16, 16), **options))
    arrays = initial_parameters(config(tmp_path, "octic_vit_ti16", image_size=(32, 32), **options))
    assert arrays["position.lines"].shape == (4, 4, 4, 8)
    assert "resized: position.A1, position.A2, position.B1, position.B2 and 2 more" in capsys.readouterr().out


PUBLIC = {
    "dinov2_vit_ti16": dict(registers=2),
    "clip": dict(projection=7, num_classes=None, pre_norm=True, class_position=True, patch_bias=False),
    "mae": dict(position="sincos"),
    "deit3": dict(),
}


@pytest.mark.parametrize("source", PUBLIC)
def test_patches_alone_of_public_models(tmp_path, capsys, source):
    """Class, register and mask tokens are left out, the head too, and everything else is kept."""
    name = source if "_" in source else "vit_ti16"
    options = dict(image_size=(8, 12)) | PUBLIC[source]
    saved.save(tmp_path, model := create(name, **options))
    kept = {key: options[key] for key in ("pre_norm", "patch_bias", "position") if key in options}
    c = config(tmp_path, name, image_size=(8, 12), class_token=False, pool="mean", mask_token=False, **kept)
    arrays, given = initial_parameters(c), logical.take(model)
    left = [leaf for leaf in given if leaf.startswith(("prefix.", "mask_token", "head."))]
    assert "prefix.class_token" in left and arrays.keys() == given.keys() - set(left)
    for leaf, array in arrays.items():
        np.testing.assert_array_equal(array, given[leaf], err_msg=leaf)
    said = capsys.readouterr().out
    assert f": for patches alone, left out: {', '.join(sorted(left))}; " in said
    assert said.endswith("drawn: head.bias, head.weight.\n")
    whole = jax.eval_shape(lambda: logical.put(build.make_model(c, nnx.Rngs(0)), arrays))
    assert whole.head.weight.shape == (24, 4) and whole.prefix is None


DEEP = dict(image_size=(8, 12), depth=4)
ALONE = dict(class_token=False, pool="mean")


def test_blocks_are_replaced(tmp_path, capsys):
    """As `replace` does it, with the seed of the run; then again for more blocks, which keeps what is there."""
    saved.save(tmp_path / "a", model := create("vit_ti16", **DEEP))
    c = config(tmp_path / "a", **DEEP, **ALONE, replaced=((1,), (2, "dw", 3, None), (3, "ens_dw", 5)))
    c.seed = 5
    arrays = initial_parameters(c)
    assert "attention replaced in 3 blocks: 1, 2, 3" in capsys.readouterr().out
    rngs, expected = nnx.Rngs(params=5), replacement.patches_only(model)
    expected = replacement.replace(expected, {1: None, 2: None}, rngs=rngs)
    expected = replacement.replace(expected, {3: None}, kind="ens_dw", kernel_size=5, rngs=rngs)
    jax.tree.map(np.testing.assert_array_equal, arrays, logical.take(expected))
    saved.save(tmp_path / "b", expected)

    c = config(tmp_path / "b", **DEEP, **ALONE, replaced=((0,), *expected.config.replaced))
    again = initial_parameters(c)
    assert again["blocks.runs.0.attention.taps"].shape == (3, 3, 3, 24)  # blocks 0, 1 and 2 are one run
    np.testing.assert_array_equal(again["blocks.runs.0.attention.taps"][1:], arrays["blocks.runs.1.attention.taps"])
    assert "attention replaced in 1 blocks: 0" in capsys.readouterr().out
    message = r"its block 3 is replaced; keep it in replaced, as \(3, 'ens_dw', 5, None, 'released'\)"
    with pytest.raises(ValueError, match=message):
        initial_parameters(config(tmp_path / "b", **DEEP, **ALONE, replaced=((0,), (1,), (2,))))


def test_replaced_from_the_command_line():
    """Text becomes entries; JSON keeps them."""
    c = get_base()
    c.model = dict(SIZE, name="vit_ti16", image_size=(8, 12), depth=4, **ALONE)
    configs.override(c, "model.replaced=((3,'dw',3,None),(0,'conv',5,(1,)))")
    expected = (Replaced(0, "conv", 5, (1,)), Replaced(3))
    assert build.model_configuration(c).replaced == expected
    assert tuple(map(tuple, configs.plain(c)["model"]["replaced"]))  # as a run writes it
    c.model.replaced = configs.plain(c)["model"]["replaced"]
    assert build.model_configuration(c).replaced == expected
    for text, message in (("dw", "must be entries such as"), ("((3,'dw',3,None))", "must be entries such as")):
        configs.override(c, f"model.replaced={text}")
        with pytest.raises(ValueError, match=message):
            build.model_configuration(c)
