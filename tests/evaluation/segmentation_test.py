"""Protocols of label maps: models whose maps are known, in windows and views, shifted, turned, on eight devices."""

import functools
import json
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit.evaluation import consistency, figures, label_maps, predictions, runner, scores, summary
from equivit.evaluation.consistency import Shifts
from equivit.evaluation.label_maps import Views
from equivit.evaluation.protocol import offers
from equivit.evaluation.protocols.segmentation_shift import agreeing
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training.config import get_base, validate
from tests.evaluation.predictors import random_model

SIZE, COUNT, CLASSES = (6, 8), 5, 4  # five images: in a batch of eight, three rows are padding
NAMES = ("sky", "tree", "road", "unseen")
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 3, (COUNT, *SIZE, 1)).astype(np.uint8)  # the colour of a pixel is mostly its class, 0 to 2
MAPS = np.where(RNG.random((COUNT, *SIZE)) < 0.3, RNG.integers(0, 3, (COUNT, *SIZE)), IMAGES[..., 0])
MAPS[RNG.random(MAPS.shape) < 0.2] = 255  # no class
REAL = np.where(MAPS == 255, -1, MAPS)


def one_hot(classes):
    return jax.nn.one_hot(classes.astype(jnp.int32) % CLASSES, CLASSES)


def colour(images):
    """The class of a pixel is its colour, which any shift and turn moves with it."""
    return one_hot(jnp.round(images[..., 0]))


def neighbours(images):
    """The class is a sum over the neighbours on the torus: it follows circular shifts and turns, but not borders."""
    x = jnp.round(images[..., 0])
    return one_hot(x + sum(jnp.roll(x, step, axis) for step in (-1, 1) for axis in (1, 2)))


def stripes(images):
    """The class is colour and place: it follows no shift by an odd number of rows, and few turns."""
    return one_hot(jnp.round(images[..., 0]) + (jnp.arange(images.shape[1]) % 2)[:, None])


class Config(NamedTuple):
    num_classes: int
    input_shape: tuple[int, ...] = (*SIZE, 1)
    own_size: bool = False


class Segmenter(nnx.Module):
    def __init__(self, logits, num_classes=CLASSES):
        self.logits, self.config = logits, Config(num_classes)

    def __call__(self, images):
        return self.logits(images)

    def label_maps(self, images):
        return self(images).argmax(-1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "maps.npz"
    np.savez(path, classes=np.array(NAMES), test_image=IMAGES, test_map=MAPS.astype(np.int32))
    return path


@pytest.fixture
def config(file):
    config = get_base()
    config.batch_size = 8
    config.data.update(source=f"npz:{file}", image_size=SIZE, mean=(0.0,), std=(1 / 255,))
    return config


def measure(logits, config, name="segmentation", **settings):
    for key, value in settings.items():
        with config.evaluation.unlocked():
            config.evaluation.update({key: value})
    return runner.evaluate(Segmenter(logits), config, [name])[name]


def by_hand(logits, maps=REAL):
    predicted = np.asarray(jax.jit(logits)(IMAGES)).argmax(-1)
    return scores.segmentation(maps, predicted, num_classes=CLASSES)


def test_scores_of_a_split_without_padding_and_void(config):
    found, expected = measure(neighbours, config), by_hand(neighbours)
    for name in ("miou", "miou_official", "accuracy"):
        assert found[name] == expected[name]
    assert list(found["iou"]) == list(NAMES) and found["examples"] == COUNT
    np.testing.assert_array_equal(list(found["iou"].values()), expected["iou"])
    config.batch_size = 1  # eight on eight devices, and as many here
    assert measure(neighbours, config) == found


def test_a_class_in_no_map_has_no_score(config):
    found = measure(colour, config)
    assert found["iou"]["unseen"] is None and found["miou"] == by_hand(colour)["miou"]
    json.dumps(found, allow_nan=False)
    lines = dict(summary.rows({"segmentation": found}))
    assert lines["IoU of unseen"] == "in no map" and lines["mean IoU"].endswith("% of 3 classes")
    assert runner.scalars({"segmentation": found}).keys() == {
        f"segmentation/{name}" for name in ("miou", "miou_official", "accuracy", "examples")
    }


def test_eight_devices_equal_one(config):
    names = ("segmentation", "segmentation_shift", "segmentation_orientation")
    alone = runner.evaluate(Segmenter(stripes), config, names)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert runner.evaluate(Segmenter(stripes), config, names) == alone


def halved(images):
    """Logits on a grid of half the size."""
    return stripes(images)[:, ::2, ::2]


def test_a_model_of_its_own_size_is_compared_there(config):
    """Labels are taken where the centre of its entries lies; windows and scales would join what cannot be joined."""
    model = Segmenter(halved)
    model.config = Config(CLASSES, own_size=True)
    found = runner.evaluate(model, config, ["segmentation", "segmentation_orientation"])
    assert found["segmentation"]["miou"] == by_hand(halved, REAL[:, 1::2, 1::2])["miou"]
    assert found["segmentation_orientation"]["upright"] == found["segmentation"]["miou"]
    for key, value in (("window", (3, 4)), ("scales", (1.0, 1.5))):
        config.evaluation.segmentation.update(window=None, scales=(1.0,))
        config.evaluation.segmentation[key] = value
        with pytest.raises(ValueError, match="do not fit a model with own_size=True.*; set window=None and scales="):
            runner.prepare(model, config, ["segmentation_shift"])


# ---- Windows and views.


@pytest.mark.parametrize("stride", [None, (1, 3), (2, 2)])
def test_windows_of_a_pointwise_model_equal_the_whole(stride):
    """Its logits are whole numbers, whose sums and means are exact."""
    views = Views(window=(3, 5), stride=stride)
    (found,) = label_maps.logits(jax.jit(lambda x: 9 * colour(x)), IMAGES, views)
    np.testing.assert_array_equal(found, 9 * np.asarray(colour(IMAGES)))


def test_logits_are_averaged_where_windows_overlap():
    """A model that says in which row of a window a pixel is: 0, 1, 2, 3; windows begin at rows 0, 2 and 2 = 6 - 4."""
    predict = jax.jit(lambda x: jnp.broadcast_to(jnp.arange(x.shape[1])[:, None, None], x.shape).astype(jnp.float32))
    (found,) = label_maps.logits(predict, IMAGES, Views(window=(4, 8), stride=(3, 8)))
    np.testing.assert_array_equal(found[0, :, 0, 0], [0, 1, (2 + 0) / 2, (3 + 1) / 2, 2, 3])


def test_views_are_averaged_after_softmax():
    """The image, its mirror image and both at twice the size, each resized to the label's size."""

    def predict(images):
        x = images[..., 0].astype(jnp.float32) * (1 + jnp.arange(images.shape[2]) / images.shape[2])
        return jnp.stack([x, 2 - x * x / 3, jnp.sin(3 * x)], axis=-1)

    predict, softmax, views = jax.jit(predict), jax.jit(jax.nn.softmax), Views(scales=(1.0, 2.0), flip=True)
    found, finite = label_maps.classes(label_maps.logits(predict, IMAGES, views), (9, 7))
    total = 0
    for scale in (1, 2):
        large = np.asarray(resize(IMAGES, (6 * scale, 8 * scale))).round().astype(np.uint8)
        for step in (1, -1):
            view = np.asarray(predict(large[:, :, ::step]))[:, :, ::step]
            total += np.asarray(softmax(resize(view, (9, 7))))
    first, second = np.sort(total)[..., -1], np.sort(total)[..., -2]
    decided = first - second > 1e-4  # both sum in float32
    assert finite.all() and decided.mean() > 0.95
    np.testing.assert_array_equal(np.asarray(found)[decided], total.argmax(-1)[decided])


@functools.partial(jax.jit, static_argnums=1)
def resize(x, size):
    shape = (len(x), *size, x.shape[-1])
    return jax.image.resize(x.astype(jnp.float32), shape, "linear", antialias=False)


@pytest.mark.parametrize("size", [(9, 7), (3, 16)])
def test_resizing_is_bilinear(size):
    x = RNG.normal(size=(2, 6, 8, 3)).astype(np.float32)
    found = jax.jit(label_maps.resized, static_argnums=1)(x, size)
    np.testing.assert_allclose(found, resize(x, size), atol=2e-6)  # of float32, values about 3
    np.testing.assert_array_equal(label_maps.resized(x, (6, 8)), x)


def test_labels_may_have_sizes_of_their_own():
    """They lie in the upper left corner of a batch; what it is filled up with never counts."""
    x, sizes = RNG.normal(size=(2, 6, 8, 3)).astype(np.float32), np.array([(9, 7), (3, 12)], np.int32)
    together, _ = label_maps.classes(iter([x]), (10, 12), sizes)
    for labels, one, (height, width) in zip(together, x, sizes, strict=True):
        alone = np.asarray(resize(one[None], (height, width)))[0]
        decided = np.diff(np.sort(alone)[..., -2:])[..., 0] > 1e-4
        np.testing.assert_array_equal(labels[:height, :width][decided], alone.argmax(-1)[decided])


def test_predictions_are_resized_to_the_labels(config, monkeypatch):
    """As a loader may give them: maps of other sizes than the images."""
    double = np.full((COUNT, 13, 17), 255, np.int32)
    double[:, :12, :16] = MAPS.repeat(2, 1).repeat(2, 2)

    def batches(run, pipeline=None):
        large = {"image": IMAGES, "map": double, "map_size": np.array([(12, 16)] * COUNT, np.int32)}
        yield large | {"weight": np.ones(COUNT, np.float32), "index": np.arange(COUNT)}

    whole = resize(np.asarray(jax.jit(neighbours)(IMAGES)), (12, 16))
    maps = np.where(double == 255, -1, double)[:, :12, :16]
    expected = scores.segmentation(maps, np.asarray(whole).argmax(-1), num_classes=CLASSES)
    monkeypatch.setattr("equivit.evaluation.protocol.Run.batches", batches)
    assert measure(neighbours, config)["miou"] == expected["miou"]
    turned = measure(neighbours, config, "segmentation_orientation")
    assert turned["upright"] == expected["miou"] and turned["changed"] == 0 and turned["same"] == 1


# ---- Shifts.


def test_a_model_that_follows_shifts_has_exactly_one(config):
    shift = dict(ranges=("quarter", "full", (0, 3)), pairs=3)
    found = measure(neighbours, config, "segmentation_shift", shift=shift)
    for name in ("circular_quarter", "circular_full", "circular_0x3"):
        assert (found[name], found[f"{name}_standard_error"], found[f"{name}_changed"]) == (1.0, 0.0, 0)
    assert found["examples"] == COUNT
    text = summary.text(summary.rows({"segmentation_shift": found}))
    assert "mASCC, circular shifts, quarter  100.00 % +- 0.00 (0 of 5 images change)" in text


def test_others_follow_as_far_as_by_hand(config):
    """With stripes every pixel changes where the copies lie an odd number of rows apart, and none otherwise."""
    shift = dict(ranges=("full",), pairs=5)
    found = measure(stripes, config, "segmentation_shift", shift=shift)
    (batch,) = consistency.with_offsets([{"index": np.arange(COUNT)}], Shifts(**shift), SIZE)
    share = ((batch["offsets"][:, :, 0, 0] - batch["offsets"][:, :, 1, 0]) % 2 == 0).mean(1)
    assert 0 < share.mean() < 1 and len(set(share)) > 1
    assert found["circular_full"] == pytest.approx(share.mean())
    assert found["circular_full_standard_error"] == pytest.approx(share.std() / np.sqrt(COUNT))
    assert found["circular_full_changed"] == (share < 1).sum()


@pytest.mark.parametrize("kind", ["zeros", "crop"])
def test_of_standard_shifts_only_what_both_copies_show_counts(kind):
    """Pixel by pixel: where each of the image (or, of crops, of the larger image) is in both copies."""
    offsets = np.array([[(0, 0), (0, 0)], [(1, -2), (0, 3)], [(-2, 1), (1, 1)], [(0, 0), (6, 0)]], np.int32)
    offsets += 3 * (kind == "crop")
    first, second = (RNG.integers(0, 2, (4, *SIZE)).astype(np.int32) for _ in range(2))
    same, seen = agreeing(kind, first, second, offsets)
    extent = range(SIZE[0]) if kind == "zeros" else range(-9, 20), range(SIZE[1]) if kind == "zeros" else range(-9, 20)
    for image in range(4):
        expected = []
        for row in extent[0]:
            for column in extent[1]:
                sign = -1 if kind == "crop" else 1
                places = [(row + sign * down, column + sign * right) for down, right in offsets[image]]
                if all(0 <= y < SIZE[0] and 0 <= x < SIZE[1] for y, x in places):
                    expected.append(first[image][places[0]] == second[image][places[1]])
        assert (same[image], seen[image]) == (sum(expected), len(expected))
    assert seen[0] == 48 and seen[3] == 0


def test_standard_shifts_of_models(config):
    """Colours follow every shift, and so does a model of neighbours inside: its borders see what was put in."""
    shift = dict(kinds=("zeros", "crop"), ranges=((2, 2),), pairs=4)
    config.data.crop_ratio = 0.75  # of 8x10 pixels, which the files do not have: they are enlarged
    found = measure(colour, config, "segmentation_shift", shift=shift)
    assert found["zeros_2x2"] == found["crop_2x2"] == 1
    found = measure(neighbours, config, "segmentation_shift", shift=shift)
    assert 0.3 < found["zeros_2x2"] < 1 and found["zeros_2x2_changed"] > 0


def test_pairs_without_a_common_pixel_tell_nothing():
    settings = Shifts(kinds=("zeros",), pairs=2)
    nan = np.nan
    found = consistency.statistics(settings, np.array([[1, 0.5, nan], [nan, 0.25, nan]]))
    assert found["zeros_full"] == (1 + 0.375) / 2 and found["zeros_full_changed"] == 1
    assert found["zeros_full_standard_error"] == pytest.approx(np.std([1, 0.375]) / np.sqrt(2))
    with pytest.raises(ValueError, match="ranges='full': no two copies of kind 'zeros' have a pixel in common"):
        consistency.statistics(settings, np.full((2, 3), nan))


# ---- Orientations.


def test_a_model_that_turns_with_the_image(config):
    found, upright = measure(neighbours, config, "segmentation_orientation"), by_hand(neighbours)["miou"]
    assert found["miou"] == dict.fromkeys(OCTIC.elements, upright) and found["miou_mean"] == pytest.approx(upright)
    assert (found["same"], found["changed"], found["examples"]) == (1.0, 0, COUNT)


def test_one_that_does_not(config):
    found, upright, views = measure(stripes, config, "segmentation_orientation"), jax.jit(stripes), []
    for g in OCTIC.elements:
        turned = np.asarray(upright(fields.act_on_image(g, IMAGES))).argmax(-1)
        truth = fields.act_on_grid(g, REAL, (1, 2))
        assert found["miou"][g] == scores.segmentation(truth, turned, num_classes=CLASSES)["miou"]
        views.append(fields.act_on_grid(OCTIC.inverse(g), turned, (1, 2)))
    assert found["same"] == np.mean(np.all(np.array(views) == views[0], 0)) < 1
    assert found["changed"] == COUNT and len(set(found["miou"].values())) > 1


def test_windows_turn_with_the_image(config):
    """An image of 6x8 pixels has windows of 4x8; turned, 8x4 in 8x6.  Unturned windows would not fit."""
    views = dict(window=(4, 8), stride=(2, 8))
    found = measure(colour, config, "segmentation_orientation", segmentation=views)
    assert found["upright"] == by_hand(colour)["miou"] and found["same"] == 1


# ---- What cannot be.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            dict(window=(7, 8)),
            r"window=\(7, 8\) must not be larger than the images, 6x8 at scale 1; the nearest is \(6",
        ),
        (dict(window=(6, 8), scales=(1.0, 0.5)), r"larger than the images, 3x4 at scale 0.5; the nearest is \(3, 4\)"),
        (dict(window=(4, 4), stride=(2, 5)), r"stride=\(2, 5\) must not exceed window=\(4, 4\).*nearest is \(2, 4\)"),
        (dict(stride=(2, 5)), r"stride=\(2, 5\) needs a window; set config.evaluation.segmentation.window too"),
        (dict(scales=(1.0, 1e5)), r"scales=100000 makes images of .* larger than 32768 pixels a side; the largest is"),
        (dict(scales=(0.0,)), "config.evaluation.segmentation.scales=0.0 must be positive"),
        (dict(window=(0, 4)), r"config.evaluation.segmentation.window=\(0, 4\) must be \(height, width\) in pixels"),
    ],
)
def test_windows_that_cannot_be_are_one_line(config, section, message):
    with pytest.raises(ValueError, match=message) as error:
        config.evaluation.segmentation.update(section)
        config.steps = 1
        validate(config)
        runner.check("segmentation", config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "shift", "message"),
    [
        (
            "segmentation_shift",
            {},
            dict(ranges=(9,)),
            "ranges=9: offsets of up to 9 pixels do not fit in images of 6x8",
        ),
        ("segmentation", dict(source="digits"), {}, "an example of digits has only image, label; set data.source to"),
        ("segmentation", dict(channels=3), {}, "they have 3 channels and the model takes 1"),
    ],
)
def test_data_that_do_not_fit(config, name, data, shift, message):
    config.data.update(data)
    with pytest.raises(ValueError, match=message):
        measure(colour, config, name, shift=shift)


def test_maps_without_labels_and_logits_that_are_not_finite(config, tmp_path):
    with pytest.raises(ValueError, match="NaN or infinite"):
        measure(lambda images: colour(images) / 0, config)
    void = np.full_like(MAPS, 255, np.int32)
    np.savez(tmp_path / "void.npz", classes=np.array(NAMES), test_image=IMAGES, test_map=void)
    config.data.source = f"npz:{tmp_path}/void.npz"
    with pytest.raises(ValueError, match=r"no pixel of the split 'test' has a class, with data.void=\(255,\)"):
        runner.prepare(Segmenter(colour), config, "segmentation")


def test_another_number_of_classes_is_refused(config):
    model = Segmenter(colour, num_classes=7)
    with pytest.raises(ValueError, match=r"has 7 classes, the data \(npz:.*\) 4; set data.source .* another model.$"):
        runner.prepare(model, config, "segmentation")


def test_models_of_maps_are_no_classifiers(config):
    assert offers(Segmenter(colour)) == {"maps"}
    assert runner.check(None, config, Segmenter(colour)) == ("segmentation",)
    with pytest.raises(ValueError, match="'accuracy' is for classifiers, but this Segmenter offers no logits; .*'segm"):
        runner.check("accuracy", config, Segmenter(colour))
    with pytest.raises(ValueError, match="'segmentation' is for models that predict label maps, but this ViT"):
        runner.check("segmentation", config, random_model("plain"))


# ---- Pictures.


def test_pictures_of_what_was_measured(config, tmp_path):
    assert summary.draw(tmp_path, Segmenter(colour), config, {"accuracy": {}}) == {}
    config.batch_size = 16  # more than are shown
    measure(colour, config)
    compiled = predictions._forward._cache_size()
    (path,) = summary.draw(tmp_path, Segmenter(colour), config, {"segmentation": {}}).values()
    assert predictions._forward._cache_size() == compiled  # the program that has measured draws too
    with Image.open(path) as image:
        assert path.name == "segmentation.png" and image.format == "PNG"


def test_colours_stand_for_classes_and_grey_for_none(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    image = np.full((4, 6, 1), 128, np.uint8)  # a middle grey
    true, predicted = np.array([[0, 2, -1], [0, 2, 255]]), np.array([[0, 0, 1], [2, 2, 1]])
    figures.label_maps([(image, true, predicted)], NAMES, tmp_path / "a.png")
    (figure,) = drawn
    pictures = [axes.images[0].get_array() for axes in figure.axes]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["sky", "tree", "road", "no class"]
    meant = dict(zip(names, (patch.get_facecolor()[:3] for patch in legend.get_patches()), strict=True))
    for picture, labels in zip(pictures[1:], (true, predicted), strict=True):
        for place, label in np.ndenumerate(labels):
            name = NAMES[label] if 0 <= label < 4 else "no class"
            np.testing.assert_allclose(picture[place], meant[name], atol=0.01)  # 128 / 255 is a little above a half


def test_whole_images_count_once_at_the_size_of_their_labels(tmp_path, config):
    """Images of three sizes, some resized to even sides, on eight devices."""
    rng, pairs = np.random.default_rng(0), []
    for kind in ("images", "labels"):
        (tmp_path / kind / "test").mkdir(parents=True)
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    for k, size in enumerate([(6, 8), (4, 10), (5, 7)]):
        image, labels = rng.integers(0, 3, size).astype(np.uint8), rng.integers(0, 4, size).astype(np.uint8)
        labels[0, k] = 255
        Image.fromarray(image).save(tmp_path / f"images/test/{k}.png")
        Image.fromarray(labels).save(tmp_path / f"labels/test/{k}.png")
        pairs.append((np.where(labels == 255, -1, labels.astype(int)), image))
    whole = dict(source=f"pairs:{tmp_path}", channels=1, eval_crop="whole", multiple=2)
    with config.data.unlocked():
        config.data.update(whole)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        found = measure(colour, config)
        shifted = measure(colour, config, "segmentation_shift")
    assert found["examples"] == shifted["examples"] == 3 and shifted["circular_full"] == 1

    def predicted(image):
        side = [-(-n // 2) * 2 for n in image.shape]
        seen = np.asarray(Image.fromarray(image).resize(side[::-1], Image.Resampling.BICUBIC), np.float32)
        return np.asarray(label_maps.resized(colour(seen[None, ..., None]), image.shape).argmax(-1))[0]

    maps, images = zip(*pairs, strict=True)
    expected = scores.segmentation(list(maps), [predicted(image) for image in images], num_classes=4)
    assert found["miou"] == pytest.approx(expected["miou"]) and found["accuracy"] == pytest.approx(expected["accuracy"])


def test_windows_are_cut_to_whole_images_and_scales_keep_their_multiple():
    """A window is larger than the image along one axis; 6x8 at three quarters is 5x6, of which 8x8 is made."""
    views = label_maps.WholeViews(window=(4, 20), scales=(0.75,), multiple=4)
    sizes = []

    def predict(images):
        sizes.append(images.shape[1:3])
        return colour(images)

    (found,) = label_maps.logits(jax.jit(predict), IMAGES, views)
    assert found.shape[1:3] == (8, 8) and sizes == [(4, 8)]
    assert label_maps.sizes(views, SIZE) == {"config.evaluation.segmentation.window": (4, 8)}


@pytest.mark.parametrize(
    ("data", "section", "message"),
    [
        (dict(multiple=9), {}, r"config.data.multiple=9: an image of npz:.* 9x9: the height 9 is not divisible by"),
        ({}, dict(shift=dict(ranges=(9,))), "offsets of up to 9 pixels do not fit in images of 6x8"),
        ({}, dict(segmentation=dict(window=(50, 50), scales=(0.5, 2.0))), None),
    ],
)
def test_whole_images_are_checked_by_the_first(config, data, section, message):
    """Not by data.image_size, which says how large those of training are."""
    config.data.update(eval_crop="whole", image_size=(64, 64), multiple=2)
    config.data.update(data)
    config.evaluation.update(section)
    model = Segmenter(colour)
    with mock.patch.object(Config, "patch_size", (2, 2), create=True):
        if message is None:
            runner.prepare(model, config, "segmentation_shift")
            return
        with pytest.raises(ValueError, match=message):
            runner.prepare(model, config, "segmentation_shift")


def test_crops_of_whole_images_are_refused(config):
    with config.unlocked():
        config.data.eval_crop, config.evaluation.shift.kinds = "whole", ("crop",)
    with pytest.raises(
        ValueError, match="'crop' cuts images out of larger ones, and data.eval_crop='whole' cuts nothing"
    ):
        runner.check(["segmentation_shift"], config)
