"""Consistency under shifts: predictors whose classes are known for every shift, offsets, and what cannot be."""

import functools
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.evaluation import consistency, predictions, runner, summary
from equivit.evaluation.consistency import FRACTIONS, Shifts
from equivit.models import zoo
from equivit.training.config import from_json, get_base, to_json, validate
from tests.evaluation.predictors import batches, brightness, random_model
from tests.models import backbones
from tests.models.adaptive import SWIN

SIZE, SOURCE = (4, 6), (7, 9)  # of the images that are predicted, and of those that crops are cut from
ALL = dict(kinds=("circular", "zeros", "crop"), ranges=("quarter", "full", 2, (0, 3)), pairs=3)
IMAGES = np.random.default_rng(0).integers(1, 4, (7, *SOURCE, 1)).astype(np.uint8)
LABELS = np.random.default_rng(1).integers(0, 4, 7)


@jax.jit
def corner(images):
    """The class is the value of the upper left pixel: it depends on the place, and is easy to look up."""
    return jax.nn.one_hot(images[:, 0, 0, 0], 4)


def measure(predict, images=IMAGES, labels=LABELS, batch=3, source=SOURCE, size=SIZE, **settings):
    return consistency.consistency(
        predict, batches(images, labels, batch), Shifts(**settings), size=size, source=source
    )


def drawn(settings, batch=3, source=SOURCE, size=SIZE):
    """The offsets of all images [measures pairs, 2, 2, N], two copies with (down, right) each."""
    stream = consistency.with_offsets(batches(IMAGES, LABELS, batch), settings, size, source)
    return np.concatenate([part["offsets"][part["weight"] > 0] for part in stream]).transpose(1, 2, 3, 0)


def class_by_hand(kind, image, down, right):
    """The class that `corner` sees in a shifted copy."""
    if kind == "crop":
        return image[down, right]
    (top, left), (height, width) = (2, 2), SIZE  # the centre: (7 - 4) / 2 = 1.5, to even, and (9 - 6) / 2 = 1.5
    if kind == "zeros" and not (0 <= -down < height and 0 <= -right < width):
        return 0
    return image[top + -down % height, left + -right % width]


def test_consistency_and_its_error_by_hand():
    settings = Shifts(**ALL)
    offsets, found = drawn(settings), measure(corner, **ALL)
    for number, (kind, range_) in enumerate(settings.measures):
        share, right = np.zeros(len(IMAGES)), 0
        for first, second in offsets[3 * number : 3 * number + 3]:
            for i, image in enumerate(IMAGES[..., 0]):
                one, other = (class_by_hand(kind, image, *copy[:, i]) for copy in (first, second))
                share[i] += one == other
                right += int(one == LABELS[i]) + int(other == LABELS[i])
        share /= 3
        name = f"{kind}_{range_}" if range_ != (0, 3) else f"{kind}_0x3"
        assert found[name] == pytest.approx(share.mean())
        error = math.sqrt(sum((c - share.mean()) ** 2 for c in share) / 7) / math.sqrt(7)
        assert found[f"{name}_standard_error"] == pytest.approx(error)
        assert found[f"{name}_changed"] == (share < 1).sum()
        assert found[f"{name}_top1"] == pytest.approx(right / (2 * 3 * len(IMAGES)))
    assert found["top1"] == pytest.approx((IMAGES[:, 2, 2, 0] == LABELS).mean()) and found["examples"] == 7
    assert 0 < found["zeros_full"] < 1 and found["circular_full"] != found["crop_full"]


def test_of_one_pair_the_error_is_that_of_a_binomial():
    found = measure(corner, kinds=("circular",))
    share = found["circular_full"]
    assert 0 < share < 1 and found["circular_full_changed"] == round(7 * (1 - share))
    assert found["circular_full_standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 7))


def test_an_invariant_predictor_is_always_consistent():
    found = measure(brightness, **ALL | dict(kinds=("circular",)))  # counts of pixels, which circular shifts keep
    assert all(found[f"circular_{name}"] == 1.0 for name in ("quarter", "full", 2, "0x3"))
    assert all(value == 0 for name, value in found.items() if name.endswith(("_error", "_changed")))
    assert all(value == found["top1"] for name, value in found.items() if name.endswith("_top1"))
    assert measure(brightness, **ALL)["zeros_full"] < 1  # and others do not


def test_whole_images_are_shifted_at_their_own_size():
    """Images of two sizes together are the mean of each alone."""
    settings, parts = Shifts(kinds=("circular", "zeros"), ranges=("half", 2), pairs=3), (IMAGES, IMAGES[:, :4])

    def of(size, *parts):
        stream = itertools.chain(*(batches(images, LABELS) for images in parts))
        return consistency.consistency(corner, stream, settings, size=size)

    together, alone = of(None, *parts), [of(images.shape[1:3], images) for images in parts]
    for name in ("top1", *settings.names, *(f"{name}_top1" for name in settings.names)):
        assert together[name] == pytest.approx(np.mean([found[name] for found in alone])), name
    assert len({found["circular_half"] for found in alone}) == 2


def test_a_centre_larger_than_the_images_is_refused():
    with pytest.raises(ValueError, match="the centre of 4x10 pixels must fit in the images, of 7x9; give a smaller"):
        measure(corner, size=(4, 10))


def test_zeros_are_the_mean_colour():
    def predict(images):  # the class is the red of the darkest pixel, tens of it
        return jax.nn.one_hot(images[..., 0].min((1, 2)) // 10, 20)

    white = np.full((40, 4, 6, 3), 199, np.uint8)
    settings = Shifts(kinds=("zeros",), ranges=(2,))
    mean = (0.455, 0.2, 0.1)  # 116.025
    result = consistency.consistency(predict, batches(white, np.full(40, 19), 8), settings, size=SIZE, mean=mean)
    assert result["top1"] == 1
    blank = [(offset != 0).any(0) for offset in drawn_for(settings, 40)[0]]
    assert result["zeros_2"] == pytest.approx(np.mean(blank[0] == blank[1]))
    fill = consistency._shifted("zeros", SIZE, (116, 51, 26), white[:1], np.full((1, 1, 2, 2), 4, np.int32), 0, 0)
    np.testing.assert_array_equal(np.unique(np.asarray(fill).reshape(-1, 3), axis=0), [[116, 51, 26]])


def drawn_for(settings, count):
    stream = consistency.with_offsets([{"index": np.arange(count)}], settings, SIZE, SOURCE)
    return np.concatenate([part["offsets"] for part in stream]).transpose(1, 2, 3, 0)


@pytest.mark.parametrize("kind", ALL["kinds"])
def test_offsets_are_uniform_in_their_range(kind):
    """Each offset is as frequent as the others, to five standard deviations; axes and copies are independent."""
    room = (3, 3) if kind == "crop" else SIZE
    largest = {name: [round(share * side) for side in room] for name, share in FRACTIONS.items()}
    for range_, sides in (largest | {3: (3, 3), (0, 2): (0, 2)}).items():
        settings = Shifts(kinds=(kind,), ranges=(range_,), pairs=2)
        offsets = drawn_for(settings, 3000)
        for axis, most in enumerate(sides):
            first = {"circular": 0, "zeros": -(most // 2), "crop": (3 - most) // 2}[kind]
            values, counts = np.unique(offsets[:, :, axis], return_counts=True)
            assert values.tolist() == list(range(first, first + most + 1))
            rate = 1 / (most + 1)
            assert np.abs(counts / 12000 - rate).max() <= 5 * math.sqrt(rate * (1 - rate) / 12000)
        if range_ == "full":
            flat = offsets.reshape(8, -1)
            assert np.abs(np.corrcoef(flat) - np.eye(8)).max() < 5 / math.sqrt(3000)


def test_offsets_depend_on_seed_and_index_alone():
    settings = Shifts(**ALL)
    np.testing.assert_array_equal(drawn(settings, batch=3), drawn(settings, batch=7))
    shuffled = [{"index": np.array([5, 0, -1])}]
    (part,) = consistency.with_offsets(shuffled, settings, SIZE, SOURCE)
    np.testing.assert_array_equal(part["offsets"][:2], drawn(settings)[..., [5, 0]].transpose(3, 0, 1, 2))
    assert (drawn(settings) != drawn(Shifts(**ALL, seed=1))).mean() > 0.5
    alone = measure(corner, batch=3, **ALL)
    assert measure(corner, batch=4, **ALL) == alone
    assert measure(corner, batch=3, **ALL, seed=1) != alone


def test_on_a_mesh_equals_one_device():
    alone = measure(corner, batch=8, **ALL)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        seen = []

        def predict(images):
            seen.append(len(images.sharding.device_set))
            return corner(images)

        assert measure(predict, batch=8, **ALL) == alone
    assert set(seen) == {8}


def test_a_program_for_each_kind():
    before = consistency._shifted._cache_size()
    shape = dict(images=np.pad(IMAGES, ((0, 0), (0, 1), (0, 0), (0, 0))), source=(8, 9))
    for seed in (0, 1):
        measure(corner, **shape, **ALL, seed=seed)
    assert consistency._shifted._cache_size() == before + 3


def test_the_earlier_protocol_draws_as_its_code():
    """NumPy's old generator: for each batch two crops, one after the other, then two circular shifts."""
    settings = Shifts(kinds=("circular", "crop"), ranges=("lps_imagenet",))
    offsets = drawn(settings, batch=3, size=(40, 40), source=(72, 72))
    np.random.seed(7)
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
        crops = [np.random.randint(32, size=2) for _ in range(2)]
        circular = [np.random.randint(-32, 32, size=2) for _ in range(2)]
        for measured, expected in zip(offsets, (circular, crops), strict=True):
            assert (measured[..., rows] == np.array(expected)[..., None]).all()
    small = drawn(Shifts(kinds=("zeros", "circular"), ranges=("lps_cifar",), pairs=20))
    assert set(np.unique(small)) == set(range(-3, 3))


@functools.cache
def config():
    config = get_base()
    config.update(steps=1, batch_size=12)
    config.data.update(image_size=(12, 20), mean=(0.3,), std=(0.3,), eval_examples=10, crop_ratio=0.75)
    return config


def changed(data=(), **shift):
    changed = config().copy_and_resolve_references()
    changed.data.update(dict(data))
    changed.evaluation.shift.update(shift)
    return changed


@pytest.mark.parametrize(
    ("shift", "data", "message"),
    [
        ({"ranges": (21,)}, {}, "ranges=21: offsets of up to 21 pixels do not fit in images of 12x20; the largest"),
        ({"ranges": ((8, 21),)}, {}, r"ranges=\(8, 21\): offsets of up to 21 pixels do not fit in images of 12x20"),
        ({"ranges": ("lps_imagenet",)}, {}, "ranges='lps_imagenet': offsets of up to 32 pixels do not fit"),
        ({"kinds": ("crop",), "ranges": (5,)}, {}, "do not fit in the margin of 4x6 around a crop"),
        ({"kinds": ("crop",)}, {"crop_ratio": 1.0}, "cuts 12x20 pixels out of larger images, which have 12x20 here"),
        ({"ranges": ("hall",)}, {}, "config.evaluation.shift.ranges='hall' is not one of quarter, half.*'half'"),
        (
            {"ranges": (1, (0, 0))},
            {},
            r"ranges=\(0, 0\): offsets of 0 move nothing, .* smallest range is 1, or .*\(1, 0\)",
        ),
        ({"ranges": (0,)}, {}, "config.evaluation.shift.ranges=0 is not one of .* or a positive whole number"),
        ({"kinds": ("circle",)}, {}, "config.evaluation.shift.kinds='circle' is not one of circular, zeros, crop"),
        ({"kinds": ("crop",)}, {"eval_crop": "squash"}, "data.eval_crop='squash' cuts nothing; set it to 'centre', or"),
        ({"kinds": ("crop",)}, {"eval_crop": "whole"}, "data.eval_crop='whole' cuts nothing; set it to 'centre', or"),
    ],
)
def test_what_cannot_be_is_one_line(shift, data, message):
    with pytest.raises(ValueError, match=message) as error:
        config = changed(data, **shift)
        validate(config)
        runner.check("shift", config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("adaptive", [True, False])
def test_of_an_adaptive_model_every_prediction_stays(adaptive):
    """Some predictions of the ordinary model with the same weights change."""
    model = backbones.model("swin_t", **SWIN | dict(adaptive=adaptive))
    predict = predictions.predictor(model, (0.5,) * 3, (0.3,) * 3)
    images = np.random.default_rng(2).integers(0, 256, (24, *SWIN["image_size"], 3)).astype(np.uint8)
    mean = np.mean([predict(part) for part in images.reshape(3, 8, *images.shape[1:])], (0, 1))
    settings = dict(kinds=("circular",), ranges=("quarter", "full"), pairs=4, size=SWIN["image_size"], source=None)
    found = measure(lambda x: predict(x) - mean, images, np.zeros(24), 8, **settings)  # so that classes are as likely
    assert 0 < found["top1"] < 1
    shares = [found[f"circular_{name}"] for name in ("quarter", "full")]
    assert shares == [1.0, 1.0] if adaptive else max(shares) < 0.9


def test_a_suite_of_whole_images_sees_each_at_its_size():
    """Here 12x12; `data.image_size` is lower and wider."""
    seen = set()

    class Watching(nnx.Module):
        def __call__(self, images):
            seen.add(images.shape[1:3])
            return jnp.broadcast_to(jnp.arange(10.0), (len(images), 10))

    config = changed(data=dict(eval_crop="whole", multiple=12, image_size=(10, 20)), ranges=("full",))
    assert runner.evaluate(Watching(), config, "shift")["shift"]["examples"] == 10 and seen == {(12, 12)}
    config.evaluation.shift.ranges = (13,)
    with pytest.raises(ValueError, match="offsets of up to 13 pixels do not fit in images of 12x12"):
        runner.prepare(Watching(), config, "shift")


def test_a_model_of_series_is_refused():
    series = zoo.abstract("patchtst", length=16, channels=2, num_classes=10)
    with pytest.raises(ValueError, match=r"a model of PatchTSTConfig takes inputs of \[16, 2\]"):
        runner.prepare(series, changed(), "shift")


def test_no_example_is_refused():
    data = batches(IMAGES[:3], LABELS[:3])
    data[0]["weight"][:] = 0
    with pytest.raises(ValueError, match="no readable examples"):
        consistency.consistency(corner, data, Shifts(), size=SIZE, source=SOURCE)


def test_the_suite_reads_larger_images_and_takes_their_centre(tmp_path):
    """From the configuration as a run reads it again; what is not shifted is what other protocols see."""
    file = tmp_path / "config.json"
    file.write_text(to_json(changed(kinds=ALL["kinds"], ranges=("half", (0, 4)))))
    settings = from_json(file)
    assert json.loads(to_json(settings))["evaluation"]["shift"]["ranges"] == ["half", [0, 4]]
    results = runner.evaluate(random_model("plain"), settings, ["accuracy", "shift"])
    found = results["shift"]
    assert found["top1"] == results["accuracy"]["top1"] and found["examples"] == 10
    assert set(runner.scalars(results)) >= {"shift/circular_half", "shift/crop_0x4", "shift/zeros_half_standard_error"}
    text = summary.text(summary.rows({"shift": found}))
    share, error = (100 * found[f"zeros_0x4{ending}"] for ending in ("", "_standard_error"))
    assert re.search(rf"accuracy after shifts with zeros, 0x4 +{100 * found['zeros_0x4_top1']:.1f} %", text)
    assert re.search(rf"same class after shifts with zeros, 0x4 +{share:.2f} % \+- {error:.2f} \(", text)
