import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit.objectives import masking

KEY = jax.random.key(0)


@pytest.mark.parametrize("groups", [None, 1, 3, 6])
def test_kept_and_removed_tokens_make_up_an_image(groups):
    keep, mask = masking.random_keep(KEY, 6, 15, 4, groups)
    assert keep.shape == (6, 4) and mask.shape == (6, 15)
    for row, removed in zip(np.asarray(keep), np.asarray(mask), strict=True):
        assert sorted([*row, *np.flatnonzero(removed)]) == list(range(15))


def test_images_of_a_group_share_a_mask_and_groups_do_not():
    masks = np.asarray(masking.random_keep(KEY, 6, 64, 16, groups=2)[1])
    assert (masks[:3] == masks[0]).all() and (masks[3:] == masks[3]).all()
    assert (masks[0] != masks[3]).any()
    own = np.asarray(masking.random_keep(KEY, 6, 64, 16)[1])
    assert len({tuple(row) for row in own}) == 6


def test_the_key_decides():
    again, other = (masking.random_keep(key, 2, 64, 16)[0] for key in (KEY, jax.random.key(1)))
    keep = masking.random_keep(KEY, 2, 64, 16)[0]
    np.testing.assert_array_equal(keep, again)
    assert (keep != other).any()


def test_every_token_is_removed_as_often():
    mask = masking.random_keep(KEY, 4000, 12, 3)[1]
    np.testing.assert_allclose(mask.mean(0), 0.75, atol=0.035)  # five deviations of sqrt(0.75 * 0.25 / 4000)


def test_the_number_of_devices_changes_nothing():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.jit(
        lambda key: masking.random_keep(key, 16, 15, 4, 2), out_shardings=NamedSharding(mesh, PartitionSpec("data"))
    )(KEY)
    jax.tree.map(np.testing.assert_array_equal, spread, masking.random_keep(KEY, 16, 15, 4, 2))


def test_the_least_noise_is_kept():
    keep, mask = masking.from_noise(jnp.asarray([[0.5, 0.1, 0.9, 0.3], [0.0, 0.4, 0.2, 0.3]]), 2)
    np.testing.assert_array_equal(keep, [[1, 3], [0, 2]])
    np.testing.assert_array_equal(mask, [[1, 0, 1, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize(("tokens", "ratio", "kept"), [(196, 0.75, 49), (10, 0.9, 1), (15, 0.75, 3), (16, 0.5, 8)])
def test_number_kept(tokens, ratio, kept):
    assert masking.number_kept(tokens, ratio) == kept


def test_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="ratio=0.95 of 16 patches keeps 0; .* from 0.0625 to 0.938"):
        masking.number_kept(16, 0.95)
    with pytest.raises(ValueError, match="keeps 16"):
        masking.number_kept(16, 0.0)
    with pytest.raises(ValueError, match="kept=5 must lie between 1 and the number of tokens, 4"):
        masking.random_keep(KEY, 2, 4, 5)
    with pytest.raises(ValueError, match="groups=4 must divide the batch of 6 images; .* is 3"):
        masking.random_keep(KEY, 6, 4, 2, groups=4)
