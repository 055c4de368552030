"""SHViT: maps of any size, statistics and stochastic depth in training, folding, and the contracts of models."""

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
from equivit.layers.stochastic_depth import drop_path
from equivit.models import saved, zoo
from equivit.models.inference import fold
from equivit.models.shvit.merging import squeezed

SMALL = dict(widths=(8, 12), depths=(1, 2), partial_widths=(0, 5), qk_width=4, image_size=(49, 80), num_classes=5)
SIZE = (49, 80)  # maps of 4x5 and 2x3


@functools.cache
def model(**options):
    """The model with every parameter and statistic random, by NumPy: scales and variances near 1, biases of 1/2."""
    abstract, random = zoo.abstract("shvit_s1", **SMALL | options), np.random.default_rng(0)

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
    """Logits, and the features of all blocks, of the model and of its folded form."""

    def outputs(m):
        features = m.features(x, blocks=tuple(range(model.config.depth)))
        return m.head(features.patches.values.mean((1, 2))), features  # as `pooled` has it, without another pass

    return [outputs(m) for m in (model, fold(model))]


@jax.jit
@recording()
def trained(model, x, key):
    """Logits in training, the convolution before the first batch norm, and the statistics after that."""
    first = model.patch_embed[0].conv(x)
    return model(x, key=key, train=True), first, logical.to_logical(model, nnx.BatchStat)


def near(a, b, tolerance=1e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_features_of_all_blocks_and_of_the_folded_model():
    m, x = model(), images()
    (logits, features), (folded_logits, folded) = run(m, x)
    assert logits.shape == (2, 5)
    for index, (grid, width, stride) in enumerate([((4, 5), 8, 16), ((2, 3), 12, 32), ((2, 3), 12, 32)]):
        at = features.blocks[index]
        chex.assert_shape(at.patches.values, (2, *grid, width))
        assert at.patches.stride == (stride, stride) and at.cls is None
        assert at.patches.offset.shape == (2, 2) and not np.any(at.patches.offset)
        near(folded.blocks[index].patches.values, at.patches.values)
    assert features.registers.shape == (2, 0, 12)
    near(features.blocks[2].patches.values, features.patches.values)
    near(folded_logits, logits)
    forms = (m, jax.eval_shape(fold, m))
    norms = [sum(isinstance(part, BatchNorm) for _, part in nnx.iter_modules(form)) for form in forms]
    assert norms == [4 + 3 + 9 + 5 + 1, 0]  # those of a run of two blocks are one


def test_training_records_statistics_and_drops_branches():
    m, x = model(drop_path=(0.0, 0.5)), images(batch=4)
    before = logical.to_logical(m, nnx.BatchStat)
    (one, first, after), (two, _, _) = (trained(m, x, jax.random.key(i)) for i in range(2))
    assert len(before) == 2 * (4 + 3 + 9 + 2 * 5 + 1)
    assert all(np.abs(before[name] - after[name]).max() > 1e-4 for name in before)
    rows = np.asarray(first).reshape(-1, 1)
    near(after["patch_embed.0.norm.mean"], 0.9 * before["patch_embed.0.norm.mean"] + 0.1 * rows.mean(0))
    near(after["patch_embed.0.norm.variance"], 0.9 * before["patch_embed.0.norm.variance"] + 0.1 * rows.var(0, ddof=1))
    assert np.abs(one - two).max() > 1e-2
    chex.assert_trees_all_equal(one, trained(m, x, jax.random.key(0))[0])
    with pytest.raises(ValueError, match="records running statistics, which a traced function loses"):
        jax.eval_shape(lambda m, x: m(x, train=True), m, x)


def test_a_draw_of_stochastic_depth_covers_a_whole_map():
    y = np.asarray(drop_path(jnp.ones((32, 2, 3, 1)), 0.5, jax.random.key(0), axes=3)).reshape(32, -1)
    assert set(y[:, 0]) == {0, 2} and (y == y[:, :1]).all()


def test_types():
    """The stream of mixed precision is float32, in training too; in bfloat16 it is rounded."""
    x, m = jax.ShapeDtypeStruct((2, 1, *SIZE, 3), jnp.float32), model()
    fn = recording()(lambda m, x: m.features(x, blocks=(0, 1, 2), train=True))
    for name, dtype in (("mixed", "float32"), ("bfloat16", "bfloat16")):
        features = jax.eval_shape(fn, precision.cast(m, name), x)
        assert {f.patches.values.dtype for f in features.blocks.values()} == {jnp.dtype(dtype)}
        assert features.patches.values.shape == (2, 1, 2, 3, 12)
    form = jax.eval_shape(fold, m).stages[1].blocks.runs[0]
    kernels = (form.conv.conv.conv.kernel, form.mlp.fc1.conv.kernel)
    assert [k.get_metadata().get("product", False) for k in kernels] == [False, True]


def test_all_norms_have_the_groups():
    parts = nnx.iter_modules(zoo.abstract("shvit_s1", **SMALL, statistics_groups=4))
    assert {part.groups for _, part in parts if isinstance(part, BatchNorm)} == {4}


# As any model


@pytest.mark.parametrize(
    ("name", "number", "folded", "products"),
    [
        ("shvit_s1", 6_330_808, 6_308_660, {128: 75.1}),
        ("shvit_s2", 11_483_072, 11_453_508, {224: 365.4}),
        ("shvit_s3", 14_245_273, 14_210_010, {128: 189.0, 224: 600.6}),
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


def test_gates_are_multiples_of_8():
    assert [squeezed(width) for width in (8, 48, 512, 896, 1232, 768, 1408)] == [8, 16, 128, 224, 312, 192, 352]


def test_layers_count_through_the_stages():
    """The layers before a stage belong to its first block."""
    tables = logical.tensors(zoo.abstract("shvit_s1", **SMALL)).values()
    layers = {t.name: t.layers for table in tables for t in table.flat}
    assert layers["patch_embed.3.conv.kernel"] == (0,)
    assert layers["stages.0.blocks.0.conv.conv.norm.scale"] == (1,)
    assert layers["stages.1.downsampling.merge.gate.fc1.bias"] == (2,)
    assert layers["stages.1.blocks.0.mlp.fc1.conv.kernel"] == (2,)
    assert layers["stages.1.blocks.1.attention.qkv.conv.kernel"] == (3,)
    assert layers["head.norm.scale"] == layers["head.linear.weight"] == (4,)


def test_residual_branches_begin_as_nothing():
    """The official start: of branches the last norm's scale is 0, but not of the convolutions between stages."""

    @jax.jit
    def start():
        tensors = logical.to_logical(zoo.create("shvit_s1", **SMALL))
        return {name: tensor for name, tensor in tensors.items() if name.endswith("norm.scale")}

    scales = jax.device_get(start())
    zero = {n for n, scale in scales.items() if not np.any(scale)}
    ends = (".conv.conv.norm.scale", ".proj.norm.scale", ".fc2.norm.scale")
    assert zero == {n for n in scales if "blocks" in n and n.endswith(ends)} | {
        f"stages.1.downsampling.mlp{i}.fc2.norm.scale" for i in (1, 2)
    }
    assert all(np.all(scales[n] == 1) for n in scales.keys() - zero)


def test_saved_and_loaded(tmp_path):
    m = model(drop_path=(0.0, 0.5))
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) and depths=\(1, 2\) must have one entry per stage each"),
        (dict(partial_widths=(5,)), r"partial_widths=\(5,\) and depths=\(1, 2\) must have one entry per stage each"),
        (dict(widths=(12, 12)), r"widths=\(12, 12\): the first must be a multiple of 8, .*; the nearest is 16"),
        (dict(partial_widths=(0, 13)), "of the 12 channels of stage 1 no 13 can attend; the most is 12"),
        (dict(statistics_groups=0), "statistics_groups=0 must be a positive whole number"),
        (dict(registers=4), "'registers' is not one of its options"),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("shvit_s1", **SMALL | options)


def test_bad_calls_are_refused():
    m = zoo.abstract("shvit_s1", **SMALL | dict(num_classes=None))
    with pytest.raises(ValueError, match="the model has no head"):
        m(images())
    with pytest.raises(IndexError, match="SHViT: there is no block 3; the blocks are 0 to 2"):
        m.features(images(), blocks=(0, 3))
    with pytest.raises(ValueError, match=r"must be \[\*B, H, W, 3\]"):
        m.features(images()[..., :1])
