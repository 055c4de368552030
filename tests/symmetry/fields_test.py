"""The action on images, grids and fields, on square, odd and non-square grids."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP, OCTIC
from tests.drawing import normal

GROUPS = pytest.mark.parametrize("group", [FLIP, OCTIC], ids=lambda g: g.name)
GRIDS = pytest.mark.parametrize("grid", [(4, 4), (3, 5), (2, 6)], ids=str)


def random_field(group, grid, channels=3, prefix=0, batch=(2,), seed=0):
    dense = normal(*batch, prefix + grid[0] * grid[1], channels * group.order, seed=seed)
    return jax.device_put(fields.from_dense(np.asarray(dense), group))


@GROUPS
@GRIDS
def test_act_is_a_group_action(group, grid):
    x = random_field(group, grid, prefix=2)
    for g, h in itertools.product(group.elements, repeat=2):
        turned = grid[::-1] if h.count("r") % 2 else grid
        twice = fields.act(g, fields.act(h, x, grid, 2), turned, 2)
        chex.assert_trees_all_close(twice, fields.act(group.product(g, h), x, grid, 2), atol=1e-6)


def test_turn_is_anticlockwise_and_mirror_is_left_right():
    image = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.float32)[None, :, :, None]
    np.testing.assert_array_equal(fields.act_on_image("r", image)[0, :, :, 0], [[3, 6], [2, 5], [1, 4]])
    np.testing.assert_array_equal(fields.act_on_image("m", image)[0, :, :, 0], [[3, 2, 1], [6, 5, 4]])
    mr = fields.act_on_image("mr", image)  # turn, then mirror
    np.testing.assert_array_equal(mr, fields.act_on_image("m", fields.act_on_image("r", image)))


@GROUPS
def test_prefix_tokens_stay_but_their_channels_turn(group):
    x = random_field(group, (2, 2), prefix=1)
    for g in group.elements:
        y = fields.act(g, x, (2, 2), 1)
        first = jax.tree.map(lambda leaf: leaf[..., :1, :], x)
        chex.assert_trees_all_close(jax.tree.map(lambda leaf: leaf[..., :1, :], y), fields.act_on_channels(g, first))


@GROUPS
def test_packings_are_inverse(group):
    x = random_field(group, (2, 3), batch=(2, 3))
    chex.assert_trees_all_equal(fields.from_components(fields.to_components(x)), x)
    chex.assert_trees_all_equal(fields.from_dense(fields.to_dense(x), group), x)
    chex.assert_trees_all_close(fields.from_regular(fields.to_regular(x)), x, atol=1e-6)
    assert x.shape == fields.to_dense(x).shape == (2, 3, 6, 3 * group.order)


@GROUPS
def test_regular_values_are_permuted(group):
    x = random_field(group, (1, 1))
    values = fields.to_regular(x)
    for g in group.elements:
        permuted = jnp.einsum("ij,j...->i...", group.regular(g).astype(np.float32), values)
        np.testing.assert_allclose(fields.to_regular(fields.act_on_channels(g, x)), permuted, atol=1e-6)


@GROUPS
def test_unfolded_maps_are_fixed(group):
    shape = (3, 3) if group is OCTIC else (5, 3)
    one = normal(len(group.lines), *shape, 2)
    two = normal(1, *shape, 4, seed=1) if group is OCTIC else None
    full = fields.unfold(Isotypic(one, two))
    flat = jax.tree.map(lambda leaf: leaf.reshape(len(leaf), -1, leaf.shape[-1]), full)
    for g in group.elements:
        chex.assert_trees_all_close(fields.act(g, flat, full.lines.shape[1:3]), flat, atol=1e-6)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="width 12 must be divisible by 8"):
        fields.from_dense(jnp.zeros((1, 4, 12)), OCTIC)
    with pytest.raises(ValueError, match="5 tokens do not match prefix=0 plus a 2x2 grid"):
        fields.act_on_tokens("r", jnp.zeros((1, 5, 8)), (2, 2))


@GROUPS
@pytest.mark.parametrize(
    "of_field",
    [
        lambda x, y: x - y,
        lambda x, y: -x,
        lambda x, y: 2 * x + y * np.float32(0.5),
        lambda x, y: x / jnp.float32(3.0),
        lambda x, y: x[:, 1:],
        lambda x, y: x[0, 1],
        lambda x, y: x[..., :2, :],
        lambda x, y: x[:, np.array([2, 0])],
        lambda x, y: x.mean(-2),
        lambda x, y: x.mean(0),
    ],
)
def test_operators_are_those_of_the_dense_array(group, of_field):
    x, y = random_field(group, (2, 2)), random_field(group, (2, 2), seed=1)
    found, expected = of_field(x, y), of_field(fields.to_dense(x), fields.to_dense(y))
    assert found.shape == expected.shape
    chex.assert_trees_all_close(fields.to_dense(found), expected, atol=1e-6)
    host = jax.tree.map(np.asarray, x)
    chex.assert_trees_all_close(of_field(host, jax.tree.map(np.asarray, y)), found, atol=1e-6)


@GROUPS
def test_operators_that_break_the_symmetry_are_refused(group):
    x = random_field(group, (2, 2))
    other = random_field(OCTIC if group is FLIP else FLIP, (2, 2))
    chex.assert_trees_all_equal(x.mean(), x.mean(-2))
    for wrong in (
        lambda: x + 1,
        lambda: jnp.ones(x.shape) + x,
        lambda: np.ones(x.shape) - x,
        lambda: x - other,
        lambda: x * x,
        lambda: x * jnp.ones(x.shape),
        lambda: x[..., 0],
        lambda: x[0, 0, 0],
        lambda: x[0, :, ::2],
        lambda: x.mean(-1),
        lambda: x.mean(2),
        lambda: x.mean(3),
    ):
        with pytest.raises(ValueError, match=f"^{group.name} field .*equivariant.*\\.$"):
            wrong()
    with pytest.raises(TypeError, match="not iterable"):
        list(x)


@GROUPS
def test_fields_of_different_ranks_are_not_added(group):
    x = random_field(group, (2, 3))
    for combine in (lambda: x + x[0], lambda: x[0] - x):
        with pytest.raises(ValueError, match="both must have as many axes; position.add_positions"):
            combine()


def test_wrong_components_masks_axes_and_elements_are_refused():
    x = random_field(OCTIC, (2, 3))
    mask = np.ones((2, 6), bool)
    assert x[mask].shape == (12, 24)
    calls = {
        "from_components: 4 components": lambda: fields.from_components(np.ones((4, 2, 6, 3))),
        "an index of channels": lambda: x[mask, 0],
        "mean over axis None": lambda: x.mean(None),
        "group octic: element 'x' is not one of": lambda: fields.act("x", x, (2, 3)),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
