"""Fine-tuning completes its configuration from weights and data, and words choose what stays frozen."""

import types

import jax
import numpy as np
import pytest
from PIL import Image

from equivit import logical, pretrained
from equivit.models import saved, zoo
from equivit.pretrained import reading
from equivit.trained_on import TrainedOn
from equivit.training import build, fine_tuning, freezing, loading, warm_start
from equivit.training import config as configs
from equivit.training.run import held_out_list

CONFIG = "configs/finetune_folder.py"
SMALL = dict(image_size=(16, 16), num_classes=6)
MODELS = {
    "vit_ti16": dict(width=16, depth=2, num_heads=2, patch_size=4),
    "octic_vit_ti16": dict(width=32, depth=2, num_heads=2, patch_size=4, family="I8"),
    "jumbo_vit_ti16": dict(width=24, depth=2, num_heads=2, patch_size=4),
    "swin_t": dict(width=8, depths=(1, 1), num_heads=(1, 2), window_size=(2, 2), patch_size=4),
    "cvt_13": dict(widths=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 1, 2), adaptive=True),
}


def zeros(name, **fields):
    shapes = zoo.abstract(name, **SMALL | fields)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


@pytest.fixture
def photos(tmp_path):
    """Two classes of five images, without splits."""
    for i in range(10):
        place = tmp_path / "photos" / ("cats", "dogs")[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (20 * i, 0, 0)).save(place)
    return tmp_path / "photos"


def load(words, *changes):
    return configs.load(CONFIG + words, changes)


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_determine_the_model(name, tmp_path, photos):
    """The model of a run has all parameters of the weights but the head, for models of every kind."""
    saved.save(tmp_path / "w", zeros(name, **MODELS[name]), TrainedOn(images={"mean": (0.3,), "std": (0.2,)}))
    c = load("", f"init={tmp_path / 'w'}", f"data.source=folder:{photos}", "model.drop_path=0.25")
    assert (c.data.image_size, c.data.mean, c.data.std, c.data.channels) == ((16, 16), (0.3,), (0.2,), 3)
    assert (c.data.split, c.data.eval_split, c.data.held_out) == ("train", "held_out", 0.2)
    with c.unlocked():
        c.model.update(image_size=c.data.image_size, num_classes=2, in_channels=3)
    model = build.model_configuration(c)
    arrays = warm_start.initial_parameters(c, model)
    names = logical.take(zoo.abstract(name, **SMALL | MODELS[name])).keys()
    assert {leaf for leaf in names if not leaf.startswith("head.")} <= arrays.keys()
    assert (model.drop_path, model.num_classes) == (0.25, 2)


def test_options_are_the_inverse_of_configuration():
    for name in ("octic_dinov2_vit_h14", "clip_vit_b16", "swin_t", "mobilenetv4_conv_small", "jumbo_vit_b16"):
        for config in (zoo.configuration(name), zoo.configuration(name, drop_path=0.3, image_size=(224, 448))):
            assert zoo.configuration(**zoo.options(config)) == config
    assert zoo.options(zoo.configuration("vit_s16", num_classes=3)) == {"name": "vit_s16", "num_classes": 3}


def test_a_projection_gives_way_to_a_head_and_its_images_keep_their_statistics(tmp_path, photos):
    model = zeros("clip_vit_b16", **MODELS["vit_ti16"] | dict(projection=6, num_classes=None))
    reading.write(tmp_path / "clip.npz", pretrained.state_dict("clip", model))
    c = load(
        "",
        f"init=clip:{tmp_path / 'clip.npz'}",
        f"data.source=folder:{photos}",
        "data.image_size=(32,32)",
        "model.num_heads=2",
    )
    assert c.model.projection is None and c.data.mean[0] == 0.48145466 and c.data.image_size == (32, 32)


@pytest.mark.parametrize(("folders", "split", "evaluated"), [
    (("train", "val", "test"), "train", "val"), (("training", "test"), "training", "test"),
])  # fmt: skip
def test_splits_of_the_data_are_found(folders, split, evaluated, photos, tmp_path):
    for name in folders:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).symlink_to(photos)
    c = configs.get_base()
    c.data.update(dict.fromkeys(fine_tuning.OF_DATA), source=f"folder:{tmp_path / 'data'}")
    fine_tuning.complete(c)
    assert (c.data.split, c.data.eval_split, c.data.held_out) == (split, evaluated, 0.0)


def test_what_is_missing_is_asked_for(photos):
    with pytest.raises(ValueError, match=r"config\.init is missing: give the weights"):
        load("", f"data.source=folder:{photos}")
    with pytest.raises(ValueError, match=r"config\.data\.source is missing: give your images"):
        load("", "init=somewhere")
    with pytest.raises(ValueError, match=r"'head' and freeze= exclude each other"):
        load(":head,freeze=2,quicktest")


@pytest.mark.parametrize(("words", "freeze", "decay"), [
    ("head", ("*", "!head.*"), 0.75), ("freeze=6,decay=0.5", ("{first_6}",), 0.5), ("decay=1", (), None),
])  # fmt: skip
def test_words_freeze_and_decay(words, freeze, decay):
    c = load(f":{words},quicktest")
    assert (c.optimizer.freeze, c.optimizer.layer_decay) == (freeze, decay)


@pytest.mark.parametrize(("name", "frozen", "free"), [
    ("vit_ti16", ("patch_embed.kernel", "position.table", "blocks.0.mlp.fc1.weight"), ("blocks.1.norm1.scale",)),
    ("swin_t", ("patch_embed.kernel", "stages.0.blocks.0.norm1.scale"), ("stages.1.blocks.0.norm1.scale",)),
])  # fmt: skip
def test_the_first_blocks_of_any_model_are_frozen(name, frozen, free):
    module = zoo.abstract(name, **SMALL | MODELS[name])
    tables = logical.tensors(module)
    c = configs.get_base()
    c.model.num_classes, c.optimizer.freeze = 6, ("{first_1}",)
    rule = freezing.rule(build.make_objective(c), tables)
    found = {tensor.name: rule(tensor).frozen for table in tables.values() for tensor in table.flat}
    assert all(found[tensor] for tensor in frozen)
    assert not any(found[tensor] for tensor in (*free, "head.weight"))
    c.optimizer.freeze = ("{first_3}",)
    with pytest.raises(ValueError, match="the model has 2 blocks; give at most 2"):
        freezing.rule(build.make_objective(c), tables)


def test_the_list_of_held_out_images_is_data_and_stays(photos, tmp_path):
    section = configs.get_base().data
    section.update(source=f"folder:{photos}", held_out=0.2, eval_split="held_out")
    held_out_list.record(tmp_path, section)
    lines = (tmp_path / held_out_list.FILE).read_text().splitlines()
    assert lines[0] == "path,label" and len(lines) == 3 and lines[1].endswith("cats")
    held_out_list.record(tmp_path, section)  # the same again
    for i in range(20, 40):
        Image.new("RGB", (4, 4)).save(photos / "cats" / f"{i}.png")
    with pytest.raises(ValueError, match=r"the images have changed since the run began, .*csv:.*held_out\.csv"):
        held_out_list.check(tmp_path, section)


@pytest.mark.parametrize(("key", "value", "count"), [
    ("held_out", 0.4, "4 of its training images would now be held out, and 0 no longer"),
    ("held_out", 0.1, "0 of its training images would now be held out, and 2 no longer"),
    ("split_seed", 1, "([1-4]) of its training images would now be held out, and \\1 no longer"),
])  # fmt: skip
def test_a_changed_share_or_seed_of_the_held_out_images_is_named(tmp_path, key, value, count):
    for i in range(20):
        place = tmp_path / "photos" / ("cats", "dogs")[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(place)
    config = configs.get_base()
    config.steps = 1
    config.data.update(source=f"folder:{tmp_path / 'photos'}", held_out=0.2, eval_split="held_out")
    held_out_list.record(tmp_path, config.data)
    (tmp_path / "config.json").write_text(configs.to_json(config))
    before, config.data[key] = config.data[key], value
    with pytest.raises(ValueError, match=f"config.data.{key}={value}: the run in .* has {before}, and {count}; give"):
        held_out_list.check(tmp_path, config.data)


def test_a_model_without_a_name_is_refused():
    with pytest.raises(ValueError, match="no name of a model fits a SimpleNamespace"):
        zoo.options(types.SimpleNamespace())


def test_weights_of_the_hub_bring_their_classes_and_statistics(tmp_path):
    """Many public ViTs expect images in -1..1, not ImageNet's statistics."""
    (tmp_path / "config.json").write_text('{"model_type": "vit", "id2label": {"0": "cat", "1": "dog"}}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    known = loading.trained_on(tmp_path)
    assert known.classes == ("cat", "dog") and known.images == {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "config.json").write_text(
        '{"architecture": "vit", "pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}}'
    )
    assert loading.trained_on(tmp_path).images == {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    config = zoo.configuration("vit_ti16")
    (tmp_path / "model.safetensors").touch()
    for place in (tmp_path, f"timm:{tmp_path}", f"timm:{tmp_path / 'model.safetensors'}"):
        assert loading.preparation(str(place), config)["std"] == (0.25,) * 3, place
