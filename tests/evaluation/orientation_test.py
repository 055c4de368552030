"""The eight orientations and the random turns: predictors with known answers, and models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.evaluation.predictions import predictor
from equivit.evaluation.protocols.orientation import TURNS, field_error, orientation
from equivit.models.vit.model import ViT
from equivit.symmetry.groups import OCTIC
from tests.evaluation.predictors import batches, brightness, corner, marked, random_model

# Where the elements put each corner: r turns anti-clockwise, m mirrors left and right, "mr" turns first.
TO_UPPER_LEFT = {
    "upper left": {"e", "mrrr"},
    "upper right": {"r", "m"},
    "lower right": {"rr", "mr"},
    "lower left": {"rrr", "mrr"},
}


@pytest.mark.parametrize("shape", [(4, 4, 1), (4, 6, 1), (3, 2, 2)])
def test_a_predictor_of_one_corner_is_right_in_the_known_orientations(shape):
    names = [*TO_UPPER_LEFT, "upper left"]  # five images in batches of three
    result = orientation(corner, batches(marked(names, shape), np.ones(5)))
    expected = {g: sum(g in TO_UPPER_LEFT[name] for name in names) / 5 for g in OCTIC.elements}
    assert result["accuracy"] == pytest.approx(expected)
    assert result["upright"] == pytest.approx(0.4)
    assert result["accuracy_mean"] == pytest.approx(0.25)
    assert result["consistency"] == 0 and result["identical"] == 0 and result["decided"] == 5


def test_random_turns_are_multiples_of_a_quarter_that_depend_on_seed_and_index_alone():
    names = np.random.default_rng(0).choice(list(TO_UPPER_LEFT), size=200)
    data = marked(names)
    result = orientation(corner, batches(data, np.ones(200), size=64))
    again = orientation(corner, batches(data, np.ones(200), size=7))
    assert again["rotated"] == pytest.approx(result["rotated"]) and again["accuracy"] == result["accuracy"]
    other = orientation(corner, batches(data, np.ones(200), size=64), seed=1)
    assert other["rotated"] != result["rotated"] and other["accuracy"] == result["accuracy"]
    # Each image is seen in one of four turns, of which one is right: a quarter, give or take 0.03 (one deviation).
    assert 0.13 < result["rotated"] < 0.37
    assert result["delta"] == pytest.approx(result["rotated"] - result["upright"])


def test_each_turn_is_drawn():
    """Images with a white upper left corner are right when they are not turned: about one in four."""
    shares = {}
    for name in TO_UPPER_LEFT:
        shares[name] = orientation(corner, batches(marked([name] * 100), np.ones(100), size=100))["rotated"]
    assert sum(shares.values()) == pytest.approx(1)  # the same turns each time, and each image has one
    assert all(0.1 < share < 0.4 for share in shares.values())
    assert len(TURNS) == 4


def test_an_invariant_predictor_is_consistent_and_ties_are_listed_by_index():
    images = np.zeros((5, 2, 3, 1), np.uint8)  # six pixels, of which `brightness` counts the values
    images[1, :, :2] = 1
    images[2, 0] = 1  # three of 0, three of 1
    images[3, :, 0] = 1
    images[3, :, 1] = 2  # two of each
    images[4] = 2
    result = orientation(brightness, batches(images, np.array([0, 1, 0, 0, 1])))
    assert result["ties"] == [2, 3]
    assert (result["decided"], result["identical"], result["consistency"]) == (3, 3, 1.0)
    assert result["upright"] == result["rotated"] == pytest.approx(0.8) and result["delta"] == 0
    assert result["equivariance_error"] == 0


def test_deviation_is_relative_to_the_largest_logit_and_leaves_out_padding():
    def predict(images):  # the left half counts double; padding is huge
        x = images.astype(jnp.float32)
        padding = 1e6 * (x.max((1, 2, 3)) == 0)
        weighted = x[:, :, :2].sum((1, 2, 3)) * 2 + x[:, :, 2:].sum((1, 2, 3))
        return jnp.stack([weighted, -weighted + padding], axis=-1)

    images = np.zeros((1, 4, 4, 1), np.uint8)
    images[0, :, :2] = 1  # upright 16; mirrored or turned by 180 degrees 8; turned by 90 degrees 12
    result = orientation(predict, batches(images, np.zeros(1)))
    expected = {"e": 0, "m": 0.5, "rr": 0.5, "mrr": 0, "r": 0.25, "rrr": 0.25, "mr": 0.25, "mrrr": 0.25}
    assert result["deviation"] == pytest.approx(expected)
    assert result["equivariance_error"] == pytest.approx(0.5)


def noise(shape, count=12):
    images = np.random.default_rng(0).integers(0, 256, (count, *shape, 1))
    return batches(images, np.arange(count) % 10, size=8)


@pytest.mark.parametrize("shape", [(16, 16), (12, 20)])
@pytest.mark.parametrize("family", ["D8", "I8"])
def test_invariant_models_predict_the_same_in_all_eight(family, shape):
    result = orientation(predictor(random_model(family), (0.5,), (0.25,)), noise(shape))
    assert result["identical"] == result["decided"] >= 10
    assert len(set(result["accuracy"].values())) == 1
    assert result["equivariance_error"] < 1e-5  # rounding of float32 through the model


@pytest.mark.parametrize("family", ["plain", "H8"])
def test_other_models_do_not(family):
    result = orientation(predictor(random_model(family), (0.5,), (0.25,)), noise((12, 20)))
    assert result["identical"] < result["decided"]
    assert result["equivariance_error"] > 1e-2


@pytest.mark.parametrize("family", ["H8", "D8", "H2"])
def test_equivariant_blocks_commute_also_in_hybrid_models(family):
    error = field_error(random_model(family), noise((12, 20))[0], (0.5,), (0.25,))
    assert 0 < error < 1e-5


def test_a_broken_block_is_measured():
    """A bias in every irrep breaks the symmetry; only A1 may have one."""

    class Broken(ViT):
        def fields(self, images, blocks):
            return jax.tree.map(lambda leaf: leaf + 0.1, super().fields(images, blocks))

    broken = nnx.clone(random_model("H8"))
    broken.__class__ = Broken
    assert field_error(broken, noise((12, 20))[0], (0.5,), (0.25,)) > 1e-3


def test_a_model_without_equivariant_blocks_has_no_field():
    with pytest.raises(ValueError, match="no equivariant block"):
        field_error(random_model("plain"), noise((12, 20))[0], (0.5,), (0.25,))
