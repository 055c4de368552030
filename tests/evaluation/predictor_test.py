"""Predictions of image files: as in evaluation, in order, without losing an image, and under turns and shifts."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit.data.pixels import normalize
from equivit.evaluation import predictor
from equivit.evaluation.predictor import Predictor
from equivit.training.config import get_base
from tests.evaluation.predictors import random_model

SIDE = 16
NAMES = tuple("abcdefghij")


def config():
    c = get_base()
    c.data.update(image_size=(SIDE, SIDE), mean=(0.5,), std=(0.5,))
    return c


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Five grey images and one file that is none."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE), np.uint8)).save(folder / f"{i}.png")
    (folder / "broken.png").write_text("no image")
    return [*(str(folder / f"{i}.png") for i in range(3)), str(folder / "broken.png"), str(folder / "3.png")]


def test_predictions_are_the_models_own(files):
    model = random_model("plain")
    found = list(Predictor(model, config(), NAMES, top=3, batch_size=3)([*files, str(files[0]) + ".jpg"]))
    assert [one.image for one in found][:-1] == files
    assert found[3].error.startswith("it is not an image file") and not found[3].classes
    assert found[5].error == "there is no such file"
    for one in (found[0], found[4]):
        pixels = np.asarray(Image.open(one.image))[None, ..., None]
        logits = np.asarray(model(normalize(jnp.asarray(pixels), (0.5,), (0.5,))))[0]
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        assert one.classes == tuple(NAMES[k] for k in np.argsort(-logits)[:3])
        np.testing.assert_allclose(one.probabilities, np.sort(shares)[::-1][:3], rtol=1e-4)


def test_an_array_is_an_image_too(files):
    model = Predictor(random_model("plain"), config())
    (one,) = model([np.asarray(Image.open(files[0]))[..., None]])
    (same,) = model(files[:1])
    assert one.image == "" and one.classes == same.classes and set(one.classes) <= set(map(str, range(10)))


def test_turns_and_shifts(files):
    """An I8 model is invariant under turns, not under shifts; the plain model under neither."""
    images = [np.asarray(Image.open(file))[..., None] for file in (*files[:3], files[4])]
    invariant = list(Predictor(random_model("I8"), config(), orientations=True)(images))
    assert {one.turned for one in invariant} == {1.0}
    assert min(one.shifted or 0 for one in invariant) < 1
    assert min(one.turned or 0 for one in Predictor(random_model("plain"), config(), orientations=True)(images)) < 1


class Halves(nnx.Module):
    """A segmenter: class 1 where the image is bright."""

    class config:
        num_classes, input_shape = 2, (SIDE, SIDE, 1)

    def label_maps(self, images):
        return self(images).argmax(-1)

    def __call__(self, images):
        return jnp.concatenate([-images, images], -1)


def test_label_maps_have_the_size_of_their_images():
    image = np.zeros((24, 40, 1), np.uint8)
    image[:, 20:] = 255
    (found,) = Predictor(Halves(), config(), ("dark", "bright"))([image])
    np.testing.assert_array_equal(found.map, image[..., 0] > 0)
    with pytest.raises(ValueError, match="--orientations is for classifiers"):
        Predictor(Halves(), config(), orientations=True)


def test_what_cannot_predict_is_refused(files):
    with pytest.raises(ValueError, match="a ViT without a head predicts no classes; fine-tune it first"):
        Predictor(random_model("plain", num_classes=None), config())
    c = config()
    c.data.image_size = (SIDE, 18)
    with pytest.raises(ValueError, match="config.data.image_size"):
        Predictor(random_model("plain"), c)
    with pytest.raises(ValueError, match="outputs are NaN"):
        predictor._check_finite(jnp.array([0.0, jnp.nan]))


def test_images_of_any_mode_are_read(tmp_path):
    for mode in ("RGB", "RGBA", "P", "I;16"):
        Image.new(mode, (30, 20)).save(tmp_path / f"{mode.replace(';', '')}.png")
    found = list(Predictor(random_model("plain"), config())(sorted(tmp_path.iterdir())))
    assert len(found) == 4 and not any(one.error for one in found)
