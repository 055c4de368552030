"""Branches on a subset of the images: values, the mean over draws, groups, devices, and what does not fit."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from equivit.kernels.mesh import on_rows
from equivit.layers.stochastic_depth import on_subset, subset
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC
from equivit.targets import collectives, program
from tests.drawing import normal
from tests.training.state_test import mesh_of

DENSE = normal(3, 8, 5, 16)  # 8 images of 5 tokens, with another batch axis before them


def branch(x):
    """Tokens meet, images do not."""
    return jax.tree.map(lambda leaf: jnp.sin(leaf) * leaf.mean(-2, keepdims=True), x)


run = jax.jit(lambda x, kept: on_subset(branch, x, kept))


@pytest.mark.parametrize("group", [None, FLIP, OCTIC])
def test_some_images_get_more_and_the_others_nothing(group):
    x = DENSE if group is None else jax.device_put(fields.from_dense(np.asarray(DENSE), group))
    kept = np.array([6, 1, 4])
    y, whole = jax.device_get((run(x, kept), jax.jit(branch)(x)))
    for before, after, part in zip(*map(jax.tree.leaves, (x, y, whole)), strict=True):
        expected = np.array(before)
        expected[..., kept, :, :] += 8 / 3 * part[..., kept, :, :]
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)


def test_indices_count_within_groups():
    within = run(DENSE, np.array([[3, 0, 1], [2, 1, 0]]))
    halves = [run(half, np.array(kept)) for half, kept in ((DENSE[:, :4], [3, 0, 1]), (DENSE[:, 4:], [2, 1, 0]))]
    chex.assert_trees_all_close(within, jnp.concatenate(halves, axis=1), rtol=1e-6)
    assert np.abs(within - run(DENSE, np.array([3, 0, 1, 6, 5, 4]))).max() < 1e-6  # the same images, 8 of 6


def test_gradients_are_those_of_the_plain_formula():
    kept = np.array([[1, 3], [0, 2]])

    def plain(x):
        chosen = np.zeros((8, 1, 1), np.float32)
        chosen[[1, 3, 4, 6]] = 2
        return x + chosen * branch(x)

    ours, theirs = (
        jax.jit(jax.grad(lambda x, f=f: jnp.square(f(x)).sum()))(DENSE) for f in (lambda x: run(x, kept), plain)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("images", "rate", "groups", "size"), [(10, 0.3, 1, 7), (12, 0.4, 3, 2), (4, 0.9, 2, 1)])
def test_sizes_are_exact_and_every_image_is_as_likely(images, rate, groups, size):
    draw = jax.jit(jax.vmap(lambda key: subset(key, images, rate, groups)))
    kept = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    assert kept.shape == (2000, groups, size)
    each = images // groups
    often = (kept[..., None] == np.arange(each)).sum(2)  # [2000, groups, each]
    assert often.max() == 1  # without replacement
    np.testing.assert_allclose(often.mean(0), size / each, atol=0.056)  # five deviations of at most 1/2 sqrt(1/2000)
    assert groups == 1 or (kept[:, 0] != kept[:, 1]).any()


def test_groups_stay_on_their_devices():
    """Nothing moves between devices, forward and backward; with a plain gather tokens would."""
    mesh = mesh_of(4, 2)
    x = fields.from_dense(np.asarray(normal(16, 5, 16)), OCTIC)
    rows = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))

    def lowered(kept):
        def total(x):
            y = on_subset(branch, x, kept)
            return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(y))

        with jax.set_mesh(mesh):
            return jax.jit(jax.value_and_grad(total)).lower(jax.device_put(x, rows)).compile()

    def moved(compiled):
        found = re.findall(r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)", compiled.as_text())
        return [kind for shape, kind in found if not shape.startswith("f32[]")]

    kept = np.array([[1], [0], [0], [1], [0], [1], [1], [0]])
    local = lowered(kept)
    assert not moved(local)
    assert moved(lowered((2 * np.arange(8) + kept[:, 0])[::-1].copy()))
    alone = jax.jit(lambda x: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(on_subset(branch, x, kept))))
    np.testing.assert_allclose(local(jax.device_put(x, rows))[0], alone(x), rtol=1e-6)


@pytest.mark.parametrize("together", [2, 8])
def test_tokens_of_a_group_move_among_its_devices_alone(together):
    """An odd number of images of each group is kept, and the branch splits images over all devices, as attention may.

    Uneven splits would be gathered on all devices.
    """
    mesh, x = mesh_of(4, 2), normal(24, 5, 16)
    kept = np.argsort(normal(8 // together, 3 * together))[:, :3]

    def total(x):
        y = on_subset(functools.partial(on_rows, branch), x, kept)
        return jnp.square(y).sum()

    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        compiled = jax.jit(jax.value_and_grad(total)).lower(split).compile()
    found = [i for c in program.parse(compiled.as_text()).computations.values() for i in c.values()]
    moving = [i for i in found if collectives.kind(i) and i.bytes > 4]  # not the sum
    assert moving and {collectives._groups(i.attributes, 8).shape[1] for i in moving} <= {together, 2}
    chex.assert_trees_all_close(compiled(split), jax.value_and_grad(total)(x), rtol=1e-5, atol=1e-5)


def test_devices_of_a_group_share_its_images():
    """Each multiplies 2 of the 4 images, 3 that are kept and one past the end, not all of them."""
    mesh, x, w = mesh_of(4, 2), normal(24, 5, 16), normal(16, 32)
    kept = np.argsort(normal(4, 6))[:, :3]

    def total(x, w):
        return jnp.square(on_subset(lambda x: jnp.sin(x @ w) @ w.T, x, kept)).sum()

    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        compiled = jax.jit(jax.grad(total)).lower(split, w).compile()
    found = [i for c in program.parse(compiled.as_text()).computations.values() for i in c.values()]
    products = [math.prod(i.result[0].shape) for i in found if i.opcode == "dot"]
    assert len(products) >= 3 and max(products) == 2 * 5 * 32


def test_impossible_subsets_are_refused():
    with pytest.raises(ValueError, match="rate=1.0 must be at least 0 and below 1"):
        subset(jax.random.key(0), 4, 1.0)
    with pytest.raises(ValueError, match="groups=3 must divide the batch of 8 images; .* is 2"):
        subset(jax.random.key(0), 8, 0.3, 3)
