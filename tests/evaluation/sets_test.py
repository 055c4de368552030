"""Evaluation sets whose labels are not simply one of the model's classes: v2, ReaL, R; ImageNet-C's official files."""

import io
import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds
from flax import nnx
from PIL import Image

from equivit import evaluate
from equivit.data import corruptions, loader, sources, transforms
from equivit.evaluation import runner, summary
from equivit.evaluation.protocols.corruptions import first
from equivit.training import config as configs
from equivit.training.config import get_base
from tests.evaluation.predictors import random_model

SIZE = (8, 12)


def picture(level):
    buffer = io.BytesIO()
    Image.new("RGB", SIZE[::-1], (level,) * 3).save(buffer, "PNG")
    return buffer.getvalue()


def write(root, levels):
    """A grey picture for each path."""
    for name, level in levels.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(level))


def config_of(source, **data):
    config = get_base()
    config.batch_size = 8
    config.data.update(source=source, image_size=SIZE, mean=(0.0,), std=(1.0,), **data)
    return config


class Level(nnx.Module):
    """Ranks class k, where the grey level is 10 k, behind the classes `first`."""

    def __init__(self, classes, first=()):
        self.classes, self.first = classes, first

    def __call__(self, images):
        level = jnp.round(25.5 * images[:, 0, 0, 0])
        logits = -jnp.abs(jnp.arange(self.classes) - level[:, None])
        return logits.at[:, jnp.array(self.first, int)].add(100.0)


def test_folders_named_by_numbers_are_in_the_order_of_numbers(tmp_path):
    write(tmp_path, {f"{k}/x.png": 10 * k for k in range(12)})  # as text, 10 and 11 would come before 2
    results = runner.evaluate(Level(12), config_of(f"folder:{tmp_path}", eval_split="all"), ["accuracy"])
    assert 0 < results["accuracy"].pop("loss") < 0.7 and results["accuracy"] == {
        "top1": 1.0,
        "top5": 1.0,
        "examples": 12,
    }


def test_a_split_with_fewer_classes_is_counted_both_ways(tmp_path):
    wnids = ["n01", "n02", "n03", "n04", "n05", "n06", "n07"]
    write(tmp_path, {f"train/{wnid}/x.png": 0 for wnid in wnids})
    write(tmp_path, {f"imagenet-r/{wnids[k]}/{i}.jpg": 10 * k for k in (1, 4) for i in range(3)})
    config = config_of(f"folder:{tmp_path}", eval_split="imagenet-r")
    assert sources.present(sources.open_source(config.data, "imagenet-r")).tolist() == [1, 4]
    results = runner.evaluate(Level(7, first=(2,)), config, ["accuracy", "present_classes"])
    # The absent class 2 is always first, 99 or 98 above the right one.
    assert results["accuracy"].pop("loss") == pytest.approx(98.5)
    assert results["accuracy"] == {"top1": 0.0, "top5": 1.0, "examples": 6}
    assert 0 < results["present_classes"].pop("loss") < 0.1
    assert results["present_classes"] == {"top1": 1.0, "top5": 1.0, "examples": 6, "classes": 2}
    assert "among the 2 classes present  100.0 %" in summary.text(summary.rows(results))


def test_classes_present_in_sources_of_any_kind():
    config = config_of("synthetic", eval_examples=5)
    source = sources.open_source(config.data, "test")  # a subset of a source that lists no labels
    labels = [source[i]["label"] for i in range(5)]
    assert sources.present(source).tolist() == sorted(set(labels))
    digits = sources.open_source(config_of("digits", eval_examples=2).data, "test")
    assert sources.present(digits).tolist() == sorted({digits[0]["label"], digits[1]["label"]})


LABELS = [(0,), (1, 3), (), (4,), (2, 0, 3)]  # of the images of grey level 0, 10, ...


class TinyReal(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        label = tfds.features.ClassLabel(names=["a", "b", "c", "d", "e", "f"])
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "original_label": label,
            "real_label": tfds.features.Sequence(label),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager):
        return {"validation": self._generate_examples()}

    def _generate_examples(self):
        for k, labels in enumerate(LABELS):
            yield k, {"image": io.BytesIO(picture(10 * k)), "original_label": 5, "real_label": list(labels)}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(directory))
        TinyReal(data_dir=directory, file_format="array_record").download_and_prepare()
        yield config_of("tfds:tiny_real", eval_split="validation", split="validation")


def test_any_of_several_labels_is_right_and_images_without_one_do_not_count(real):
    batch = next(loader.evaluate(real.data, batch_size=8).batches())
    assert batch["label"].shape == (8, 6) and batch["label"].dtype == bool
    level = batch["image"][:, 0, 0, 0] // 10
    for k, labels, weight in zip(level[:5], batch["label"], batch["weight"], strict=False):
        assert set(np.flatnonzero(labels)) == set(LABELS[k]) and weight == bool(LABELS[k])
    assert not batch["label"][5:].any() and not batch["weight"][5:].any()
    results = runner.evaluate(Level(6), real, ["accuracy", "present_classes", "orientation"])
    # The four that count are predicted 0, 1, 3 and 4: right, right, wrong, wrong.
    assert results["accuracy"] == {"top1": 0.5, "top5": 1.0, "examples": 4}
    assert results["present_classes"]["classes"] == 5
    assert results["orientation"]["accuracy_mean"] == 0.5


def test_sets_of_labels_are_not_for_training(real):
    with pytest.raises(ValueError, match="sets of labels are for evaluation only"):
        loader.train(real.data, batch_size=2, seed=0)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    """Files as ImageNet-C's: of the k-th corruption k images of 20 have the wrong label."""
    root = tmp_path_factory.mktemp("imagenet")
    write(root, {f"train/{name}/x.png": 0 for name in "ab"})
    for (k, name), i in itertools.product(enumerate(corruptions.NAMES), range(20)):
        label = i % 2
        folder = "ab"[label if i >= k else 1 - label]
        write(root, {f"imagenet-c/{name}/5/{folder}/{i}.jpg": 10 * label})
    return config_of(f"folder:{root}", eval_split="imagenet-c", crop_ratio=0.5)


def test_official_files_are_taken_where_they_are(official):
    result = runner.evaluate(Level(2), official, ["corruptions"])["corruptions"]
    expected = {name: pytest.approx(1 - k / 20) for k, name in enumerate(corruptions.NAMES)}
    assert result["top1"] == {"5": expected}
    assert result["mean_top1"] == pytest.approx(1 - 7 / 20)
    lines = summary.text(summary.rows({"corruptions": result})).splitlines()
    assert lines[0].split()[-16:] == ["Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost",
                                      "Fog", "Brit.", "Contr.", "Elastic", "Pixel", "JPEG", "Avg."]  # fmt: skip
    assert lines[1].split()[-16:] == [f"{100 - 5 * k:.1f}" for k in range(15)] + ["65.0"]


@pytest.mark.parametrize(
    ("severities", "without", "message"),
    [
        ((5,), "fog", r"has official files of corruptions, but lacks fog/5; add these folders\.$"),
        ((5, 3), None, r"lacks gaussian_noise/3, .*; add these folders, or set config.evaluation.severities=\(5,\)\.$"),
        ((3,), "fog", r"but lacks gaussian_noise/3, .*; add these folders\.$"),
    ],
)
def test_a_part_of_the_official_files_is_refused_before_anything_runs(tmp_path, severities, without, message):
    for name in set(corruptions.NAMES) - {without}:
        (tmp_path / "imagenet-c" / name / "5").mkdir(parents=True)
    config = config_of(f"folder:{tmp_path}", eval_split="imagenet-c")
    config.evaluation.severities = severities
    for suite in ("corruptions", "corruptions_sar"):
        with pytest.raises(ValueError, match=message):
            runner.check(suite, config)
    (tmp_path / "imagenet-c").rename(tmp_path / "other")
    runner.check("corruptions", config)


def test_images_are_cropped_as_imagenet_c_before_they_are_corrupted():
    """256 pixels bilinearly, 224 of them; the run's own crop is for clean images."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    config = config_of("folder:nowhere", crop_ratio=1.0)
    config.data.image_size = (224, 224)
    data = first(config)
    assert data.corruption == "gaussian_noise" and config.data.crop_ratio == 1.0
    found = transforms.Evaluation(data)({"image": image})["image"]
    small = image.resize((341, 256), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found, small.crop((58, 16, 282, 240)))
    config.evaluation.corruption_crop_ratio = 1.0
    assert first(config).crop_ratio == 1.0


def test_the_command_of_table_2_is_there_and_valid():
    """All options in the help of the command are ones that a config has; SAR is the public code's in Table 2."""
    config = config_of("digits", eval_split="test")
    options = re.findall(r"--config\.([\w.]+=\S+)", evaluate.__doc__.replace("KEY=VALUE", ""))
    for option in options:
        configs.override(config, option.rstrip(".;:"))
    assert "evaluation.sar.official=True" in options and "data.interpolation=bilinear." in options
    assert config.evaluation.sar.official is True


def test_batches_of_sar_are_as_large_as_the_config_says():
    """A batch that the devices do not divide would be padded, and its learning rate be another."""
    config = config_of("digits", eval_split="test")
    for size, crop, message in (
        (12, "centre", "sar.batch_size=12 must be .* by the 8 .* 8 and 16"),
        (64, "whole", "one"),
    ):
        config.evaluation.sar.batch_size, config.data.eval_crop = size, crop
        for name in ("sar", "corruptions_sar"):
            with pytest.raises(ValueError, match=message):
                runner.check(name, config)
    config.data.eval_crop = "centre"
    assert runner.check("sar,corruptions_sar", config) == ("sar", "corruptions_sar")


@pytest.mark.slow
def test_every_corruption_is_adapted_to_anew(official):
    model = random_model("plain", in_channels=3, num_classes=2)
    with official.unlocked():
        official.evaluation.sar.update(batch_size=8, lr=0.1, margin=1.0, reset_below=0.0)
    results = runner.evaluate(model, official, ["corruptions", "corruptions_sar"])
    assert results["corruptions_sar"]["unadapted_top1"] == results["corruptions"]["top1"]
    assert results["corruptions_sar"]["examples"]["5"] == dict.fromkeys(corruptions.NAMES, 20)
    assert "with SAR" in summary.text(summary.rows(results))
    assert set(runner.scalars(results)) >= {"corruptions/mean_top1", "corruptions_sar/mean_unadapted_top1"}
    assert "corruptions_sar/mean_examples" not in runner.scalars(results)
