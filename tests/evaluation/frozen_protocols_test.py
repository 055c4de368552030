"""Protocols on frozen features: what they measure, read once, and what does not change in eight orientations."""

import functools
import io
import itertools
import types

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image

from equivit import models
from equivit.data import config as data_config
from equivit.data.label_maps import Legend
from equivit.evaluation import frozen, linear_probe, predictions, runner
from equivit.evaluation.protocols import linear_probe as protocol
from equivit.evaluation.protocols import patch_knn
from equivit.evaluation.protocols.knn import Neighbours
from equivit.models import saved
from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.training.config import get_base, validate
from tests.evaluation.predictors import random_model

pytestmark = pytest.mark.slow

IMAGES, MAPS = ("knn", "linear_probe", "hematology"), ("patch_knn", "patch_linear")


@pytest.fixture
def config():
    return changed()


def changed(**data):
    config = get_base()
    config.update(batch_size=32, steps=1)
    config.data.update(image_size=(12, 12), mean=(0.3,), std=(0.3,), train_examples=160, eval_examples=40)
    config.data.update(data)
    config.evaluation.knn.ks = (20, 5)
    config.evaluation.linear_probe.update(
        steps=300, batch_size=16, base_rates=(1e-5, 2.0), blocks=(1, 2), averages=(False, True), augment=False
    )
    validate(config)
    return config


def headless(family, **options):
    return random_model(family, num_classes=None, image_size=(12, 12), **options)


@pytest.fixture(scope="module")
def plain():
    """As a run has it before its first step: shapes in place of arrays."""
    return jax.eval_shape(lambda: headless("plain"))


@pytest.fixture(scope="module")
def results():
    """Results of an I8 model, with its streams noted."""
    streams = []

    def track(batches, total, name):
        streams.append(name)
        return batches

    return runner.evaluate(headless("I8"), changed(), IMAGES, track=track), streams


def test_features_are_read_once_for_all_protocols(results):
    assert results[1] == ["knn"] * 2 + ["hematology, squashed"] * 2  # the training and the test split


def test_what_no_turn_changes_is_classified_alike(results):
    for name in ("knn", "linear_probe"):
        found = results[0][name]
        assert found["consistency"] == 1 and abs(found["delta"]) < 1e-9
        assert found["accuracy"]["e"] == found["top1"] and found["examples"] == 40
    assert all(results[0]["hematology"][name]["turned"]["consistency"] == 1 for name in ("knn1", "knn20", "linear"))


def test_digits_are_learnt_and_the_head_is_chosen_elsewhere(results):
    found = results[0]["linear_probe"]
    assert found["head"].endswith("lr2") and found["top1"] > 0.3 and found["best"] >= found["top1"]
    assert results[0]["hematology"]["accuracy"] > 0.3  # chance is 0.1, give or take 0.05
    assert runner.scalars(results[0]).keys() >= {"knn/top1", "linear_probe/best", "hematology/balanced_accuracy"}
    for name, result in results[0].items():
        words = " ".join(" ".join(line) for line in runner.PROTOCOLS[name].lines(result))
        assert "in the mean" in words and "nan" not in words


def test_votes_are_those_of_the_class_tokens(results, config):
    model = headless("I8")
    run = runner.prepare(model, config, ["knn"])["knn"]
    train, test = (frozen.images(run, split)["e"] for split in ("train", "test"))
    (votes,) = Neighbours(train.tokens[:, 0], train.labels, ks=(20, 5), num_classes=10).votes(test.tokens[:, 0])
    top1 = (votes.argmax(-1) == test.labels).mean(1)
    assert results[0]["knn"]["each"] == pytest.approx({"20": top1[0], "5": top1[1]})
    batch = next(iter(run.batches()))
    features = predictions.extractor(model, config.data.mean, config.data.std)(batch["image"])
    np.testing.assert_allclose(test.tokens[:32, 0], features.cls, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(test.average[:32], features.patches.values.mean((1, 2)), rtol=1e-4, atol=1e-5)


def test_images_that_cannot_be_read_are_left_out(tmp_path):
    """And what is left keeps its place in the split, where the augmented probe reads it again."""
    files = []
    for value in range(6):
        Image.fromarray(np.full((12, 12, 3), 40 * value, np.uint8)).save(content := io.BytesIO(), "PNG")
        files.append(content.getvalue() if value != 2 else b"damaged")
    blob, ends = np.frombuffer(b"".join(files), np.uint8), np.cumsum([0, *map(len, files)])
    parts = {f"{split}_{kind}": value for split in ("train", "test") for kind, value in
             {"jpeg": blob, "offset": ends, "label": np.arange(6) % 2}.items()}  # fmt: skip
    np.savez(tmp_path / "data.npz", classes=np.array(["a", "b"]), **parts)
    config = changed(source=f"npz:{tmp_path}/data.npz", train_examples=None, eval_examples=None)
    with config.unlocked():
        config.evaluation.knn.ks = (5,)
    found = frozen.images(runner.prepare(headless("plain", in_channels=3), config, ["knn"])["knn"], "train")["e"]
    assert found.index.tolist() == [0, 1, 3, 4, 5] and found.labels.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("family", ["D8", "plain"])
def test_a_fully_octic_model_is_read_by_its_invariants(family, config):
    run = runner.prepare(headless(family), config, ["knn"])["knn"]
    found = frozen.images(run, "test", ("e", "mr"))
    size = np.abs(found["e"].tokens).max()
    assert (np.abs(found["mr"].tokens - found["e"].tokens).max() < 1e-4 * size) == (family == "D8")


@pytest.mark.slow
def test_augmented_images_of_a_masked_autoencoder_on_a_mesh(config, monkeypatch):
    """A mesh changes nothing; random crops are not the whole images."""
    encoder, losses, fit = headless("plain"), [], linear_probe.fit
    model = MaskedAutoencoder(MaskedAutoencoderConfig(encoder.config, 16, 1, 2), encoder, rngs=nnx.Rngs(0))

    def noting(*given, **options):
        probe = fit(*given, **options)
        losses.append(probe.losses)
        return probe

    monkeypatch.setattr(linear_probe, "fit", noting)
    with config.unlocked():
        config.evaluation.linear_probe.update(augment=True, steps=2)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
        found = runner.evaluate(placed, config, ["linear_probe", "knn"])
    alone = runner.evaluate(model, config, ["knn", "linear_probe"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert all(found[name]["accuracy"] == result["accuracy"] for name, result in alone.items())
    with config.unlocked():
        config.evaluation.linear_probe.augment = False
    runner.evaluate(model, config, ["linear_probe"])
    assert (np.abs(losses[2] - losses[1])[0] > 1e-3).all()


def test_a_probe_of_augmented_images_that_was_cut_off_goes_on(config, monkeypatch, tmp_path):
    model, seen, fit = headless("plain"), [], linear_probe.fit
    with config.unlocked():
        config.evaluation.linear_probe.update(augment=True, steps=4)
    monkeypatch.setattr(protocol, "KEEP_EVERY", 2)

    def noting(batches, heads, *, watch=None, cut=None, **options):
        probe = fit(itertools.islice(batches, cut), heads, watch=watch, **options)
        seen.append((probe.losses, options.get("state")))
        return probe

    def evaluate():
        return runner.evaluate(model, config, ["linear_probe"], directory=tmp_path)

    monkeypatch.setattr(linear_probe, "fit", noting)
    whole = evaluate()
    monkeypatch.setattr(linear_probe, "fit", functools.partial(noting, cut=3))
    with pytest.raises(ValueError, match="there are 3 batches, and steps=4"):
        evaluate()
    monkeypatch.setattr(linear_probe, "fit", noting)
    assert evaluate() == whole
    assert seen[0][1] is None and seen[1][1]["step"] == 2
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    assert [path.name for path in tmp_path.iterdir()] == ["linear_probe"]
    # The head is a classifier's: it classifies as the probe does, and "n2_avg1" reads what it should.
    with config.unlocked():
        config.evaluation.linear_probe.update(blocks=(2,), averages=(True,), augment=False)
    found = evaluate()["linear_probe"]
    as_classifier = runner.evaluate(saved.load(found["classifier"]), config, ["accuracy"])["accuracy"]
    assert as_classifier["top1"] == pytest.approx(found["top1"]) and found["head"].startswith("n2_avg1")
    assert saved.trained_on(found["classifier"]).images == data_config.preparation(config.data)


def test_what_a_probe_has_kept_is_whole_or_named(tmp_path):
    state = protocol.Unfinished(tmp_path, "mine")
    np.savez(state.path, step=np.int64(2))
    assert state.read()["step"] == 2
    assert protocol.Unfinished(tmp_path, "another").read() is None
    state.path.write_bytes(state.path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="linear_probe_mine.npz: is damaged"):
        state.read()


@pytest.mark.slow
def test_label_maps_from_patches():
    config = changed(source="synthetic_maps", channels=1, train_examples=20, eval_examples=6)
    found = runner.evaluate(headless("I8"), config, MAPS)
    for name, result in found.items():
        assert result["examples"] == 6 and 0 < result["miou_official"] <= result["miou"] <= 1
        assert result["miou_by_orientation"].keys() == {"e", "r", "rr", "rrr", "m", "mr", "mrr", "mrrr"}
        assert max(result["validation"], key=result["validation"].get) == result["selected"]
        assert "in the mean" in runner.PROTOCOLS[name].lines(result)[-1][1]
    assert found["patch_knn"]["selected"].partition(",")[0] in ("cosine", "L2")
    assert found["patch_linear"]["selected"].startswith("C=")


def test_ties_with_pixels_without_a_class_are_those_of_the_files():
    """ADE20K has 0 for them, below the classes, VOC2012 255, above; of equally frequent labels the smallest counts."""
    ade, voc = (types.SimpleNamespace(legend=Legend(("other", "wall"), void)) for void in ((0, 255), (255,)))
    assert patch_knn._void(ade, 1) < 0 and patch_knn._void(voc, 2) == 2


SINGLE = {"data.source": "synthetic_maps", "data.channels": 1, "data.train_examples": 1}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("knn", {"evaluation.knn.ks": (20, 161)}, r"k=161 must be in 1\.\.160, the number of keys"),
        ("knn", {"data.eval_split": "train"}, "config.data.eval_split='train' must not be data.split"),
        ("knn", {"data.eval_crop": "whole"}, "features are read at one size; use 'centre' or 'squash'"),
        ("linear_probe", {"data.eval_crop": "whole"}, "features are read at one size; use 'centre' or 'squash'"),
        ("patch_linear", {"data.eval_split": "train"}, "config.data.eval_split='train' must not be data.split"),
        ("knn", {"data.image_size": (12, 14)}, "the width 14 is not divisible by the patch width 4"),
        (
            "linear_probe",
            {"evaluation.linear_probe.blocks": (1, 4)},
            "the last 4 blocks are needed, and the model has 2",
        ),
        (
            "linear_probe",
            {"evaluation.linear_probe.batch_size": 12},
            "batch_size=12 must be divisible by the 8",
        ),
        ("linear_probe", {"evaluation.linear_probe.base_rates": (0.1, 0.1)}, "n1_avg0_lr0.1, .* must differ"),
        ("linear_probe", {"evaluation.linear_probe.batch_size": 256}, "batch_size=256 must be at most 144, the"),
        ("hematology", {"data.train_examples": 19}, "needs at least 20 training examples, .* 'digits' has 19"),
        ("patch_knn", {}, "the examples of 'train' must have a label map each; use"),
        ("patch_linear", SINGLE, "patch_linear needs at least 2 training examples, .* 'synthetic_maps' has 1"),
    ],
)
def test_mistakes_are_one_clear_line_before_anything_runs(name, change, message, config, plain):
    with config.unlocked():
        for key, value in change.items():
            config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message):
        runner.prepare(plain, config, [name])


@pytest.mark.parametrize("name", ["hematology", "patch_knn", "patch_linear"])
def test_images_that_are_squashed_may_be_whole_for_others(name, plain):
    source = {} if name == "hematology" else dict(source="synthetic_maps", channels=1)
    whole, centre = (changed(eval_crop=kind, **source) for kind in ("whole", "centre"))
    section = runner.PROTOCOLS[name].data
    assert section(whole) == section(centre)
    runner.prepare(plain, whole, [name])


def test_a_grid_that_does_not_divide_the_maps_is_told_before_anything_runs():
    config = changed(source="synthetic_maps", channels=1, train_examples=20, eval_examples=6, image_size=(36, 36))
    model = models.abstract("swin_t", width=16, depths=(1, 1), num_heads=(1, 2), in_channels=1, num_classes=None)
    with pytest.raises(ValueError, match="maps; resize the maps to the size of the images"):
        runner.prepare(model, config, ["patch_knn"])


def test_a_model_without_features_is_refused(config):
    with pytest.raises(ValueError, match="'knn' is for models with features, but this Linear offers no features"):
        runner.check(["knn"], config, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
