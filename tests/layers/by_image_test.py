"""Branches that run a few images at a time on a CPU."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from equivit import models, testing
from equivit.layers import by_image as module
from equivit.layers.by_image import by_image
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC
from tests.drawing import normal


@pytest.fixture
def small_caches(monkeypatch):
    """Images of 6 tokens and 8 channels are large, and two of them fill a group."""
    monkeypatch.setattr(module, "IMAGE_BYTES", 6 * 16 * 4)
    monkeypatch.setattr(module, "GROUP_BYTES", 2 * 6 * 16 * 4)


def field(*batch):
    return jax.device_put(fields.from_dense(np.asarray(normal(*batch, 6, 16)), OCTIC))


def centred(x: Isotypic) -> Isotypic:
    """Tokens meet, images do not; one leaf is not the other."""
    return Isotypic(jnp.sin(x.lines) - x.lines.mean(-2, keepdims=True), x.planes * x.planes.max(-2, keepdims=True))


@pytest.mark.parametrize("batch", [(), (1,), (8,), (7,), (3, 4)])
def test_values_and_gradients_are_those_of_the_whole(small_caches, batch):
    x = field(*batch)
    chex.assert_trees_all_close(jax.jit(lambda x: by_image(centred, x))(x), centred(x), atol=1e-6)

    def loss(function):
        return lambda x: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(function(x)))

    gradient = jax.grad(loss(lambda x: by_image(centred, x)))(x)
    chex.assert_trees_all_close(gradient, jax.grad(loss(centred))(x), atol=1e-5)


@pytest.mark.parametrize(("images", "groups"), [(8, [4, 4]), (7, [7]), (6, [3, 3]), (2, []), (1, [])])
def test_groups_are_the_largest_that_fit(small_caches, images, groups):
    """Eight images run one of each half at a time, as two fit; seven run one by one.  A batch that fits stays whole."""
    lengths = [
        eqn.params["length"] for eqn in loops(jax.make_jaxpr(lambda x: by_image(centred, x))(field(images)).jaxpr)
    ]
    assert lengths == groups


@pytest.mark.parametrize(("images", "parts"), [(8, 2), (6, 2), (7, 1), (2, 2), (1, 1)])
def test_halves_do_not_wait_for_each_other(small_caches, images, parts):
    """An even number of images is two calls, one for each half."""
    lowered = jax.jit(lambda x: by_image(centred, x)).lower(field(images))
    assert lowered.as_text().count("stablehlo.sine") == parts


def test_small_images_are_not_divided():
    assert not loops(jax.make_jaxpr(lambda x: by_image(centred, x))(field(64)).jaxpr)


def test_only_a_cpu_divides(small_caches):
    traced = jax.jit(lambda x: by_image(centred, x)).trace(field(8))
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in ("cuda", "tpu"):
        assert "stablehlo.while" not in traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_mesh_has_its_images_spread_already(small_caches):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert not loops(jax.make_jaxpr(lambda x: by_image(centred, x))(field(8)).jaxpr)


def test_a_stack_divides_when_nothing_is_random(small_caches, monkeypatch):
    options = dict(family="D8", width=16, num_heads=2, depth=1, image_size=(32, 32), num_classes=None)
    blocks = testing.randomise(models.abstract("octic_vit_ti16", **options).blocks, jax.random.key(1))
    x, key = field(8), jax.random.key(2)
    divided, whole = (jax.make_jaxpr(lambda x, k=k: blocks(x, key=k)[0])(x).jaxpr for k in (None, key))
    assert [len(loops(eqn.params["jaxpr"].jaxpr)) for jaxpr in (divided, whole) for eqn in loops(jaxpr)] == [2, 0]
    expected = blocks(x, key=key)[0]  # no dropout in these blocks: the key changes nothing else
    found = jax.jit(lambda x: blocks(x)[0])(x)
    chex.assert_trees_all_close(found, expected, atol=2e-6 * np.abs(expected.lines).max())


def loops(jaxpr):
    """The scans in a jaxpr, those inside its choices by platform included."""
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inner = (sub.jaxpr for eqn in jaxpr.eqns for sub in eqn.params.get("branches", ()))
    return found + [eqn for sub in inner for eqn in loops(sub)]
