import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.data.order import TrainOrder
from equivit.objectives import mixing

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "losses" / "mixup_bce.npz"


@pytest.fixture(scope="module")
def official():
    with np.load(FIXTURE) as file:
        return dict(file)


def images_of(official):
    return jnp.asarray(official["input/x"]).transpose(0, 2, 3, 1)  # 20 x 24 pixels: not square


def smoothed(official, smoothing):
    return mixing.soft_targets(official["input/labels"].astype(int), 11, smoothing)


@pytest.mark.parametrize(("name", "smoothing"), [("s0", 0.0), ("s1", 0.1)])
def test_mixup_equals_the_official_one(official, name, smoothing):
    lam = official["input/mixup_lam_drawn"]
    targets = mixing.blend(smoothed(official, smoothing), lam[None])
    # float32 with one multiplication and one addition: a few units in the last place of values up to 4
    chex.assert_trees_all_close(targets, official[f"output/mixup_{name}_soft_targets"], atol=1e-6)
    np.testing.assert_array_equal(targets > 0, official[f"output/mixup_{name}_bce_targets"])
    if not smoothing:  # mixed images are stored for this case only
        mixed = mixing.blend(images_of(official), lam[None])
        chex.assert_trees_all_close(mixed.transpose(0, 3, 1, 2), official["output/mixup_s0_x"], atol=2e-6)


@pytest.mark.parametrize(("name", "smoothing"), [("s0", 0.0), ("s1", 0.1)])
def test_cutmix_equals_the_official_one(official, name, smoothing):
    top, bottom, left, right = official["input/cutmix_bbox_yl_yh_xl_xh"].astype(int)
    box = mixing.Box(top, bottom, left, right)
    lam = mixing.cutmix_lambda(box, 20, 24)
    chex.assert_trees_all_close(lam, official[f"output/cutmix_{name}_lam_used"], atol=1e-6)
    targets = mixing.blend(smoothed(official, smoothing), lam[None])
    chex.assert_trees_all_close(targets, official[f"output/cutmix_{name}_soft_targets"], atol=1e-6)
    if not smoothing:
        mixed = mixing.blend(images_of(official), mixing.cutmix_weights(box, 20, 24)[None, ..., None])
        np.testing.assert_array_equal(mixed.transpose(0, 3, 1, 2), official["output/cutmix_s0_x"])


def test_the_official_box_comes_from_its_lambda_and_a_centre(official):
    lam = official["input/cutmix_lam_drawn"]
    expected = official["input/cutmix_bbox_yl_yh_xl_xh"].astype(int)  # cut off at the lower right corner
    half = (int(20 * np.sqrt(1 - lam)) // 2, int(24 * np.sqrt(1 - lam)) // 2)
    box = mixing.cutmix_box(lam, jnp.array(expected[0] + half[0]), jnp.array(expected[2] + half[1]), 20, 24)
    np.testing.assert_array_equal(jnp.stack(box), expected)


def test_smoothing_makes_every_binary_target_true(official):
    assert (smoothed(official, 0.1) > 0).all() and (smoothed(official, 0.0) > 0).sum(-1).tolist() == [1] * 6


def draws(count, **options):
    """Lambda [count] and weights [count, H, W] of `count` batches of one group."""
    keys = jax.random.split(jax.random.key(0), count)
    return jax.jit(jax.vmap(lambda key: jax.tree.map(lambda a: a[0], mixing.draw(key, 1, 6, 10, **options))))(keys)


def test_rates_of_mixing_and_of_cutmix():
    lam, weights = draws(10_000, mixup=0.8, cutmix=1.0, probability=0.7, switch_probability=0.4)
    constant = (weights == weights[:, :1, :1]).all((1, 2))
    mixup = constant & (lam > 0) & (lam < 1)
    # 5 standard deviations of a binomial: a right rate fails once in two million runs, and the seed is fixed anyway.
    assert abs(mixup.mean() - 0.7 * 0.6) < 5 * np.sqrt(0.42 * 0.58 / 10_000)
    # Cutmix of an image of 60 pixels is at times empty (its box is below two pixels), so it is the rate of boxes that
    # is bounded: below 0.7 * 0.4 by at most the chance that sqrt(1 - lam) * 6 < 2, which is 1/9.
    assert 0.28 * 8 / 9 - 0.025 < (~constant).mean() < 0.28 + 0.025


def test_lambda_follows_its_beta_distribution():
    lam, _ = draws(10_000, mixup=0.8, cutmix=0.0, probability=1.0, switch_probability=0.5)
    variance = 1 / (4 * (2 * 0.8 + 1))  # of Beta(a, a)
    assert abs(lam.mean() - 0.5) < 5 * np.sqrt(variance / 10_000)
    assert abs(lam.var() - variance) < 0.005  # standard error below 0.001


def test_lambda_is_the_share_of_an_image_in_its_mixture():
    lam, weights = draws(1000, mixup=0.8, cutmix=1.0, probability=0.7, switch_probability=0.5)
    chex.assert_trees_all_close(weights.mean((1, 2)), lam, atol=1e-6)


def test_one_draw_for_the_batch_and_none_if_off():
    images, targets = jnp.arange(4 * 6 * 10 * 3.0).reshape(4, 6, 10, 3), jnp.eye(4)
    options = {"probability": 1.0, "switch_probability": 0.5}
    same = mixing.mix(jax.random.key(0), images, targets, mixup=0.0, cutmix=0.0, **options)
    chex.assert_trees_all_equal(same, (images, targets))
    mixed, soft = jax.jit(lambda key: mixing.mix(key, images, targets, mixup=0.8, cutmix=0.0, **options))(
        jax.random.key(1)
    )
    lam = soft[0, 0]
    chex.assert_trees_all_close(mixed, lam * images + (1 - lam) * images[::-1], rtol=1e-6)
    chex.assert_trees_all_close(soft.sum(-1), jnp.ones(4), atol=1e-6)


def test_one_group_has_the_bits_of_scalar_draws():
    """The draws of a batch before there were groups, written out."""
    images, targets = jax.random.normal(jax.random.key(1), (5, 6, 10, 3)), jnp.eye(5)

    @jax.jit
    def expected(key):
        mix_key, switch_key, beta_key, row_key, column_key = jax.random.split(key, 5)
        use_cutmix = jax.random.uniform(switch_key) < 0.5
        alpha = jnp.where(use_cutmix, 1.0, 0.8)
        lam = jnp.where(jax.random.uniform(mix_key) < 0.7, jax.random.beta(beta_key, alpha, alpha), 1.0)
        row, column = jax.random.randint(row_key, (), 0, 6), jax.random.randint(column_key, (), 0, 10)
        top, bottom, left, right = mixing.cutmix_box(lam, row, column, 6, 10)
        rows, columns = jnp.arange(6)[:, None], jnp.arange(10)
        inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
        weights = jnp.where(use_cutmix, 1.0 - inside, lam)[..., None]
        lam = jnp.where(use_cutmix, 1 - (bottom - top) * (right - left) / 60, lam)
        return weights * images + (1 - weights) * images[::-1], lam * targets + (1 - lam) * targets[::-1]

    ours = jax.jit(lambda key: mixing.mix(key, images, targets, mixup=0.8, cutmix=1.0, probability=0.7, groups=1))
    for key in jax.random.split(jax.random.key(0), 20):
        chex.assert_trees_all_equal(ours(key), expected(key))


def test_the_groups_of_a_batch_draw_their_modes_independently():
    options = dict(mixup=0.8, cutmix=1.0, probability=1.0, switch_probability=0.4)
    lam, weights = jax.jit(lambda key: mixing.draw(key, 16_000, 6, 10, **options))(jax.random.key(0))
    is_mixup = (weights == weights[:, :1, :1]).all((1, 2)) & (lam > 0) & (lam < 1)
    assert len(np.unique(lam[is_mixup])) > 0.99 * is_mixup.sum()  # some equal each other after rounding
    # Sixteen groups at a time, as a step has.  A group is mixup's with probability 0.6.
    mixup = is_mixup.reshape(1000, 16).sum(1)
    binomial = np.array([math.comb(16, n) * 0.6**n * 0.4 ** (16 - n) for n in range(17)])
    found = np.bincount(mixup, minlength=17) / 1000
    assert (abs(found - binomial) < 5 * np.sqrt(binomial / 1000) + 1e-3).all()  # 1e-3: a single step in a rare cell
    assert abs(mixup.mean() - 9.6) < 5 * np.sqrt(3.84 / 1000)


def test_partners_are_inside_a_group_and_copies_of_an_image_in_different_ones(monkeypatch):
    lam = np.linspace(0.2, 0.8, 16, dtype=np.float32)
    drawn = (jnp.asarray(lam), jnp.broadcast_to(lam[:, None, None], (16, 2, 3)))
    monkeypatch.setattr(mixing, "draw", lambda key, groups, *options: drawn)
    examples = TrainOrder(num_examples=100, batch_size=64, repeats=3, seed=0).rows(0).examples
    assert len(set(examples)) == 22  # the last one once
    targets = jnp.eye(64)  # of each row, which rows are in its mixture
    images = jnp.broadcast_to(targets[:, None, None], (64, 2, 3, 64))
    mixed, soft = mixing.mix(jax.random.key(0), images, targets, mixup=0.8, cutmix=1.0, groups=16)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(mixed[:, i, j], soft)  # images and targets are mixed alike
    for value in lam:
        (group,) = np.nonzero(np.diag(soft) == value)
        expected = value * np.eye(4) + (1 - value) * np.eye(4)[::-1]  # mirror images
        np.testing.assert_allclose(soft[group], expected @ np.eye(64)[group], atol=1e-7)  # and nothing from elsewhere
        assert len(set(examples[group])) == 4


@pytest.mark.parametrize(("groups", "nearest"), [(5, 4), (8, 4), (16, 4), (0, 1), (-2, 1), (3, 2)])
def test_groups_that_do_not_divide_the_batch_are_refused(groups, nearest):
    message = rf"mix: groups={groups} must divide the batch of 8 examples into groups of two or more; .* is {nearest}\."
    with pytest.raises(ValueError, match=message):
        mixing.mix(jax.random.key(0), jnp.zeros((8, 2, 2, 1)), jnp.eye(8), mixup=0.8, cutmix=0.0, groups=groups)
