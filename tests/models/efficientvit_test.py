"""EfficientViT of MIT: maps of any size, linear attention, training, folding, and the contracts of models."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, precision
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording
from equivit.models import saved, zoo
from equivit.models.efficientvit.attention import linear_attention
from equivit.models.inference import fold

SMALL = dict(widths=(4, 4, 6, 8, 12), depths=(1, 1, 2, 1, 1), neck_widths=(10, 9), head_channels=4)
SMALL |= dict(image_size=(50, 72), num_classes=5)
SIZE = (50, 72)  # maps of 25x36, then 13x18, 7x9, 4x5 and 2x3
# Of each block: the map, its width and its stride.  In the first stage the block that halves the map is the only one.
BLOCKS = [((13, 18), 4, 4), *[((7, 9), 6, 8)] * 2, *[((4, 5), 8, 16)] * 2, *[((2, 3), 12, 32)] * 2]


@functools.cache
def model(**options):
    """The model with every parameter and statistic random, by NumPy: scales and variances near 1, biases of 1/2."""
    abstract, random = zoo.abstract("efficientvit_b0", **SMALL | options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = np.exp(0.2 * noise) if tensor.name.endswith(("scale", "variance")) else 0.5 * noise
        return noise.astype(np.float32)

    tensors = {t.name: draw(t) for table in logical.tensors(abstract, nnx.Variable).values() for t in table.flat}
    return logical.from_logical(abstract, tensors, nnx.Variable)


def images(batch=2, size=SIZE):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, *size, 3)), jnp.float32)


@jax.jit
def run(model, x):
    """The head's input and the features of all blocks, for the model and its folded form."""
    blocks = tuple(range(model.config.depth))

    def outputs(m):
        features = m.features(x, blocks=blocks)
        return m.neck(features.patches.values), features

    return [outputs(m) for m in (model, fold(model))]


@jax.jit
@recording()
def trained(model, x, key):
    """Logits in training, the convolution before the first batch norm, and the statistics after that."""
    first = model.stem.conv.conv(x)
    return model(x, key=key, train=True), first, logical.to_logical(model, nnx.BatchStat)


def near(a, b, tolerance=1e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_linear_attention_is_attention_by_products():
    """relu(q) relu(k)^T, of all pairs; in bfloat16 too it is computed in float32."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, 7, 3, 4)).astype(np.float32) for _ in range(3))
    weights = np.einsum("bnhd,bmhd->bhnm", np.maximum(q, 0), np.maximum(k, 0), dtype=np.float64)
    expected = np.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdims=True) + 1e-5), v)
    attend = jax.jit(linear_attention)
    np.testing.assert_allclose(attend(q, k, v), expected, rtol=0, atol=1e-5)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    y = attend(*rounded)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, attend(*(x.astype(jnp.float32) for x in rounded)))


def test_features_of_all_blocks_and_of_the_folded_model():
    """In float64: the quotients of linear attention enlarge what float32 rounds where their denominators are small."""
    m, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (model(), images()))
    with jax.enable_x64(True):
        (pooled, features), (folded_pooled, folded) = run(m, x)
    assert pooled.shape == (2, 9)
    for index, (grid, width, stride) in enumerate(BLOCKS):
        at = features.blocks[index]
        chex.assert_shape(at.patches.values, (2, *grid, width))
        assert at.patches.stride == (stride, stride) and at.cls is None
        assert at.patches.offset.shape == (2, 2) and not np.any(at.patches.offset)
        near(folded.blocks[index].patches.values, at.patches.values, 1e-12)
    assert features.registers.shape == (2, 0, 12)
    near(features.blocks[6].patches.values, features.patches.values)
    near(folded_pooled, pooled, 1e-12)
    forms = (m, jax.eval_shape(fold, m))
    norms = [sum(isinstance(part, BatchNorm) for _, part in nnx.iter_modules(form)) for form in forms]
    assert norms == [3 + 3 + 6 + 3 + 3 + 1, 0]


def test_training_records_statistics_and_drops_branches():
    m, x = model(drop_path=(0.0, 0.5)), images(batch=4)
    before = logical.to_logical(m, nnx.BatchStat)
    (one, first, after), (two, _, _) = (trained(m, x, jax.random.key(i)) for i in range(2))
    assert len(before) == 2 * 19 and all(np.abs(before[n] - after[n]).max() > 1e-4 for n in before)
    rows = np.asarray(first).reshape(-1, 4)
    near(after["stem.conv.norm.mean"], 0.9 * before["stem.conv.norm.mean"] + 0.1 * rows.mean(0))
    near(after["stem.conv.norm.variance"], 0.9 * before["stem.conv.norm.variance"] + 0.1 * rows.var(0, ddof=1))
    assert np.abs(one - two).max() > 1e-2
    chex.assert_trees_all_equal(one, trained(m, x, jax.random.key(0))[0])


def test_types():
    """The stream of mixed precision is float32, in training too; in bfloat16 it is rounded."""
    x, m = jax.ShapeDtypeStruct((2, 1, *SIZE, 3), jnp.float32), model()
    fn = recording()(lambda m, x: m.features(x, blocks=tuple(range(7)), train=True))
    for name, dtype in (("mixed", "float32"), ("bfloat16", "bfloat16")):
        features = jax.eval_shape(fn, precision.cast(m, name), x)
        assert {f.patches.values.dtype for f in features.blocks.values()} == {jnp.dtype(dtype)}
        assert features.patches.values.shape == (2, 1, 2, 3, 12)


def test_all_norms_have_the_groups():
    parts = nnx.iter_modules(zoo.abstract("efficientvit_b0", **SMALL, statistics_groups=4))
    assert {part.groups for _, part in parts if isinstance(part, BatchNorm)} == {4}


# As any model


@pytest.mark.parametrize(
    ("name", "number", "folded", "products"),
    [
        ("efficientvit_b0", 3_410_008, 3_407_328, {128: 34.5}),
        ("efficientvit_b1", 9_102_024, 9_095_320, {128: 172.3, 224: 519.2}),
    ],
)
def test_published_sizes(name, number, folded, products):
    """With the M multiply-adds of timm's models, for images of that many pixels."""
    m = zoo.abstract(name)
    assert parameters(m) == number and parameters(jax.eval_shape(fold, m)) == folded
    for size, macs in products.items():
        counted = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
        assert not counted.notes and counted.macs == counted["linear"].macs + counted["attention"].macs
        assert counted.macs / 1e6 == pytest.approx(macs, abs=0.051)


def parameters(m):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(m, nnx.Param)))


def test_layers_count_through_the_stages():
    tables = logical.tensors(zoo.abstract("efficientvit_b0", **SMALL)).values()
    layers = {t.name: t.layers for table in tables for t in table.flat}
    assert layers["stem.blocks.0.reduce.norm.scale"] == (0,)
    assert layers["stages.0.0.local.expand.conv.kernel"] == (1,)
    assert layers["stages.1.1.local.depthwise.conv.kernel"] == (3,)
    assert layers["stages.3.0.local.expand.conv.bias"] == (6,)
    assert layers["stages.3.1.attention.pointwise.0.kernel"] == (7,)
    assert layers["neck.linear.weight"] == layers["head.weight"] == (8,)


def test_saved_and_loaded(tmp_path):
    m = model()
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) must have 5 entries, of the stem and of 4 stages"),
        (dict(depths=(1, 1, 1, 1)), r"depths=\(1, 1, 1, 1\) must have 5 entries"),
        (dict(head_channels=3), "head_channels=3 must divide the width of stage 2, 8; .* is 2"),
        (dict(neck_widths=(8,)), r"neck_widths=\(8,\) must be two positive whole numbers"),
        (dict(drop_path=1.0), "drop_path=1.0 must be"),
        (dict(registers=4), "'registers' is not one of its options"),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("efficientvit_b0", **SMALL | options)


def test_bad_calls_are_refused():
    m = zoo.abstract("efficientvit_b0", **SMALL | dict(num_classes=None))
    with pytest.raises(ValueError, match="the model has no head"):
        m(images())
    with pytest.raises(IndexError, match="EfficientViT: there is no block 7; the blocks are 0 to 6"):
        m.features(images(), blocks=(0, 7))
