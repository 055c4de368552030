"""Sigma: one pass for all blocks, on any number of devices, and the choice of blocks and heads by it."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from equivit.depthwise import published, replacement, selection
from equivit.models import zoo
from tests.depthwise import attending

X = attending.images()
weights = jax.jit(lambda m, x: [m.attention_weights(x, i) for i in range(m.config.depth)])


def deviations(model, x):
    """In two passes."""
    return np.stack([np.asarray(w, np.float64).std(0) for w in weights(model, x)])


@pytest.mark.parametrize("options", [attending.SMALL, attending.OCTIC], ids=["plain", "octic"])
def test_one_pass_equals_two(options):
    """For plain and equivariant blocks; the batches have 4 and 2 images."""
    model = attending.model(**options)
    found = selection.moments(model, [X[:4], X[4:]])
    expected = deviations(model, X)
    np.testing.assert_allclose(jax.vmap(selection.Moments.deviation)(found), expected, atol=1e-6)
    sums = selection.Sigma.from_moments(found)
    np.testing.assert_allclose(sums.heads, expected.sum((2, 3)), rtol=1e-5)
    np.testing.assert_allclose(sums.blocks, expected.sum((2, 3)).mean(1), rtol=1e-5)
    assert expected.min(0).max() > 1e-3  # an attention that never changes would show nothing


def test_under_a_mesh():
    """Six images on four devices, which do not divide them."""
    model = attending.model(**attending.SMALL)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with jax.set_mesh(Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))):
        found = selection.sigma(model, [X[:4], X[4:]])
    np.testing.assert_allclose(found.heads, deviations(model, X).sum((2, 3)), rtol=1e-5)


def test_the_moments_are_updated_in_place():
    """Two buffers a head, which are given back, and the attention of one block."""
    options = dict(depth=24, patch_size=1, num_heads=4, image_size=(12, 12))
    model = zoo.abstract("vit_b16", **attending.SMALL | options)
    found = jax.eval_shape(lambda: jax.vmap(lambda _: selection.Moments.zeros((4, 144, 144)))(np.arange(24)))
    images, weight = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 12, 12, 3), (2,)))
    memory = selection.step.lower(model, found, images, weight).compile().memory_analysis()
    block = 4 * 4 * 144**2  # bytes of the attention of one image in one block
    assert memory.alias_size_in_bytes >= 2 * 24 * block
    assert memory.temp_size_in_bytes < 12 * block  # a copy of the buffers would be 48


@pytest.mark.parametrize("kind", ["dw", "identity"])
def test_what_is_replaced_has_no_sigma(kind):
    model = replacement.replace(attending.model(**attending.SMALL), {0: (1,)})
    found = selection.sigma(replacement.replace(model, {2: None}, kind=kind), [X])
    assert np.isnan(found.heads[[0, 2]]).all() and np.isnan(found.blocks[[0, 2]]).all()
    assert np.isfinite(found.heads[1]).all() and selection.select(found.blocks, 1) == (1,)


def test_select():
    scores = np.array([[3.0, 1.0], [np.nan, 2.0], [1.0, 5.0]])
    assert selection.select(scores, 3) == ((0, 1), (1, 1), (2, 0))
    assert selection.select(scores, 1) == ((0, 1),)  # of equals the first
    assert selection.select(scores, 2, "highest") == ((0, 0), (2, 1))
    assert selection.by_block(selection.select(scores, 4)) == {0: (0, 1), 1: (1,), 2: (0,)}
    assert selection.by_block(selection.select(scores[:, 0], 2)) == {0: None, 2: None}
    drawn = {selection.select(np.arange(9), 4, "random", seed) for seed in range(5)}
    assert len(drawn) > 1 and all(len(set(one)) == 4 and one == tuple(sorted(one)) for one in drawn)
    assert selection.select(np.arange(9), 4, "random", 0) == selection.select(np.arange(9), 4, "random", 0)
    with pytest.raises(ValueError, match="number=6 must be at most 5"):
        selection.select(scores, 6)
    with pytest.raises(ValueError, match="number=-1 must be .* at least 0"):
        selection.select(scores, -1)
    with pytest.raises(ValueError, match="order"):
        selection.select(scores, 1, "low")


def test_the_published_selection():
    """Half of the blocks and of the heads of ViT-L; the numbers of heads by block are the released lists'."""
    assert published.BLOCKS == (8, 6, 4, 9, 7, 5, 10, 1, 3, 11, 13, 12)
    counts = [6, 13, 8, 10, 15, 16, 15, 16, 14, 13, 11, 10, 9, 10, 8, 9, 3, 4, 1, 1]
    assert [len(heads) for heads in published.HEADS.values()] == counts and sum(counts) == 192
    assert list(published.HEADS) == list(range(20))
    for heads in published.HEADS.values():
        assert heads == tuple(sorted(set(heads) & set(range(16))))
    # The sums of the lists, and some heads that they have and lack.
    assert sum(map(sum, published.HEADS.values())) == 1449
    assert 4 not in published.HEADS[8] and 15 not in published.HEADS[6] and published.HEADS[19] == (6,)
    model = zoo.abstract("dinov2_vit_l14", **replacement.PATCHES_ONLY, image_size=(28, 28))
    replaced = jax.eval_shape(lambda model: replacement.replace(model, published.HEADS), model).config.replaced
    assert {one.block: len(one.heads or range(16)) for one in replaced} == dict(enumerate(counts))


def test_the_released_sigma_has_the_same_order():
    """It is of the sample deviation, and rounded to two digits."""
    attention = np.random.default_rng(0).dirichlet(np.ones(9), size=(20, 6, 9)) ** np.arange(1, 7)[:, None, None]
    ours, theirs = (attention.std(0, ddof=ddof).sum((1, 2)) for ddof in (0, 1))
    np.testing.assert_array_equal(np.argsort(ours), np.argsort(theirs.round(2)))
    assert np.abs(ours - theirs.round(2)).min() > 0


def test_what_cannot_be_measured_is_refused():
    model = attending.model(**attending.SMALL)
    with pytest.raises(ValueError, match="no images"):
        selection.sigma(model, [])
    after = r"sigma: a batch is .* after one of \(2, 12, 20, 3\)"
    with pytest.raises(ValueError, match=f"{after}; give the largest batch first"):
        selection.sigma(model, [X[:2], X[:3]])
    with pytest.raises(ValueError, match=f"{after}; give images of one size"):
        selection.sigma(model, [X[:2], X[:2, :8]])
    with pytest.raises(ValueError, match="1 tokens before the patches"):
        selection.sigma(zoo.abstract("vit_b16", depth=1), [X])


def test_aligned_puts_the_query_in_the_centre():
    """Attention to the token below only, on a grid of 3x4: one cell."""
    attention = np.eye(12, k=4, dtype=np.float32)
    expected = np.zeros((5, 7))
    expected[3, 3] = 1
    np.testing.assert_array_equal(selection.aligned(attention, (3, 4)), expected)
