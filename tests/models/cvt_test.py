"""CvT: maps of any size, stages as scans, statistics, padding around the torus, and the contracts of models."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, models, precision
from equivit.layers import dense
from equivit.layers.batch_stats import recording
from equivit.layers.grid import Layout
from equivit.models import saved, zoo
from equivit.testing import assert_shift_equivariant

# Two stages; maps of 8x12 and 4x6 tokens, whose keys are 4x6 and 2x3.
SMALL = dict(widths=(8, 12), depths=(2, 1), num_heads=(2, 3), kernels=(7, 3), strides=(4, 2), paddings=(2, 1))
SMALL |= dict(image_size=(32, 48), num_classes=5, mlp_ratio=2.0)
ODD = (29, 46)  # maps of 7x11 and 4x6 tokens, whose keys are 4x6 and 2x3; the last column of pixels is not read


@functools.cache
def model(**options):
    """The model with every parameter and statistic random, by NumPy: scales and variances near 1, biases of 1/2."""
    abstract, random = zoo.abstract("cvt_13", **SMALL | options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = np.exp(0.2 * noise) if tensor.name.endswith(("scale", "variance")) else 0.5 * noise
        return noise.astype(np.float32)

    tensors = {t.name: draw(t) for table in logical.tensors(abstract, nnx.Variable).values() for t in table.flat}
    return logical.from_logical(abstract, tensors, nnx.Variable)


def images(size, batch=2):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, *size, 3)), jnp.float32)


@jax.jit
def run(model, x):
    """Logits, the features with those at the end of each stage, and the statistics after that."""
    return model(x), model.features(x, blocks=(1, 2)), logical.to_logical(model, nnx.BatchStat)


def near(a, b, tolerance=1e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(("size", "class_token"), [((32, 48), True), (ODD, False)], ids=str)
def test_features_of_all_stages(size, class_token):
    m, x = model(class_token=class_token), images(size)
    logits, features, _ = run(m, x)
    chex.assert_shape(logits, (2, 5))
    h, w = size[0] // 4, size[1] // 4
    for index, grid, width, stride in ((1, (h, w), 8, 4), (2, (-(-h // 2), -(-w // 2)), 12, 8)):
        at = features.blocks[index]
        chex.assert_shape(at.patches.values, (2, *grid, width))
        assert at.patches.stride == (stride, stride)
        assert at.patches.offset.shape == (2, 2) and not np.any(at.patches.offset)
        assert (at.cls is not None) == (class_token and index == 2)
    assert features.registers.shape == (2, 0, 12)
    near(features.blocks[2].patches.values, features.patches.values)
    read = features.cls if class_token else np.mean(features.patches.values, (1, 2))
    near(read @ np.asarray(m.head.weight[...]) + np.asarray(m.head.bias[...]), logits)
    for pixel, is_read in (((0, 0), True), ((28, 44), True), ((28, 45), size != ODD)):
        changed = np.array(x)
        changed[:, *pixel] += 3
        assert (np.abs(run(m, changed)[0] - logits).max() > 1e-4) == is_read


def test_a_scan_equals_its_blocks_one_by_one():
    """In training, where each block moves its statistics, those of the map alone; otherwise `run` has to leave them."""
    m, x = model(), images((32, 48))

    @jax.jit
    @recording()
    def both_ways(m, x):
        first, second = m.stages
        y, statistics = first.tokens(m.patch_embed(x).reshape(2, 96, 8)), {}
        for i in range(2):
            y = (block := first.blocks[i])(y, Layout((8, 12)), train=True)
            statistics |= {f"stages.0.blocks.{i}.{n}": t for n, t in logical.to_logical(block, nnx.BatchStat).items()}
        y = second.tokens(second.embed(y.reshape(2, 8, 12, 8)).reshape(2, 24, 12))
        block = second.blocks[0]
        keys = block.attention.conv_k.conv(block.norm1(y)[:, 1:].reshape(2, 4, 6, 12))
        y = block(y, Layout((4, 6), prefix=1), train=True)
        statistics |= {f"stages.1.blocks.0.{n}": t for n, t in logical.to_logical(block, nnx.BatchStat).items()}
        tokens = m.trunk(x, train=True)[0].tokens
        return (y, statistics), (tokens, logical.to_logical(m, nnx.BatchStat)), keys

    (tokens, statistics), again, keys = jax.device_get(both_ways(m, x))
    chex.assert_trees_all_close((tokens, statistics), again, rtol=1e-5, atol=1e-5)
    before = logical.to_logical(m, nnx.BatchStat)
    assert len(before) == 3 * 2 * 3 and all(np.abs(before[n] - statistics[n]).max() > 1e-3 for n in before)
    name, rows = "stages.1.blocks.0.attention.conv_k.norm", keys.reshape(-1, 12)
    near(statistics[f"{name}.mean"], 0.9 * before[f"{name}.mean"] + 0.1 * rows.mean(0))
    near(statistics[f"{name}.variance"], 0.9 * before[f"{name}.variance"] + 0.1 * rows.var(0, ddof=1))
    chex.assert_trees_all_equal(jax.device_get(run(m, x)[2]), before)


def test_stochastic_depth_grows_in_each_stage():
    rates = zoo.configuration("cvt_13", drop_path=(0.0, 0.0, 0.1)).rates
    np.testing.assert_allclose(rates, [0, 0, 0, *np.linspace(0, 0.1, 10)], rtol=1e-6)
    assert zoo.configuration("cvt_13", drop_path=0.2).rates.tolist() == pytest.approx([0.2] * 13)
    assert zoo.configuration("cvt_13", drop_path=(0.0, 0.0, 0.0)).rates is None
    m, x = model(drop_path=(0.5, 0.0)), images((32, 48), batch=4)
    dropped = jax.jit(lambda m, x, key: m.features(x, blocks=(0, 1), key=key))
    one, two = (dropped(m, x, jax.random.key(i)) for i in range(2))
    chex.assert_trees_all_equal(one.blocks[0], two.blocks[0])  # the first block drops nothing
    assert np.abs(np.subtract(one.blocks[1].patches.values, two.blocks[1].patches.values)).max() > 1e-2
    chex.assert_trees_all_equal(one, dropped(m, x, jax.random.key(0)))


def test_circular_padding_follows_shifts_by_whole_strides():
    """By 16 pixels: 8 between tokens of the last stage, of which keys take every second one."""
    zeros, x, shifts = model(), images((32, 48)), [(16, 0), (0, 16), (-16, 32)]
    circular, changes = models.remade(zeros, padding="circular")
    assert not any(changes)
    for output in ("invariant", "grid"):

        def fn(m, x, output=output):
            logits, features, _ = run(m, x)
            return logits if output == "invariant" else features.patches

        assert_shift_equivariant(functools.partial(fn, circular), x, shifts=shifts, output=output)
        with pytest.raises(AssertionError, match=r"shift \(8, 0\)"):
            assert_shift_equivariant(functools.partial(fn, circular), x, shifts=[(8, 0)], output=output, tol=1e-2)
        with pytest.raises(AssertionError, match=r"shift \(16, 0\)"):
            assert_shift_equivariant(functools.partial(fn, zeros), x, shifts=shifts, output=output, tol=1e-2)


def test_shapes_do_not_depend_on_the_padding():
    """For the smallest height there is, of one row of tokens, and a width of an odd number of columns in each stage."""
    x = jax.ShapeDtypeStruct((2, 3, 3, 37, 3), jnp.float32)
    both = [zoo.abstract("cvt_13", **SMALL, padding=padding) for padding in ("zeros", "circular")]
    zeros, circular = (jax.eval_shape(run, m, x) for m in both)
    chex.assert_trees_all_equal_shapes_and_dtypes(zeros, circular)
    assert zeros[0].shape == (2, 3, 5)
    grids = tuple(zeros[1].blocks[index].patches.values.shape[2:4] for index in (1, 2))
    assert grids == both[0].config.grids((3, 37)) == ((1, 9), (1, 5))


def test_mixed_precision_keeps_the_stream():
    m, x = model(), images((32, 48))
    mixed = precision.cast(m, "mixed")
    trained = recording()(lambda m, x: m.features(x, blocks=(0, 1, 2), norm=False, train=True))
    stream = jax.eval_shape(trained, mixed, x)
    assert {f.patches.values.dtype for f in stream.blocks.values()} == {stream.cls.dtype} == {jnp.dtype("float32")}
    stream = jax.eval_shape(lambda m, x: m.features(x, blocks=(1,)), precision.cast(m, "bfloat16"), x)
    assert stream.blocks[1].patches.values.dtype == stream.cls.dtype == jnp.bfloat16


def test_quick_gelu():
    x = np.linspace(-5, 5, 101, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(dense.quick_gelu)(x), x / (1 + np.exp(-1.702 * x)), rtol=0, atol=1e-6)


# As any model


@pytest.mark.parametrize(("name", "number", "products"), [("cvt_13", 19_997_480, 16.3), ("cvt_21", 31_622_696, 24.9)])
def test_published_sizes(name, number, products):
    """With the G multiply-adds of CvT, Table 3, for images of 384 pixels."""
    m = zoo.abstract(name, image_size=(384, 384))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(m, nnx.Param))) == number
    counted = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32))
    assert not counted.notes
    assert (counted["linear"].macs + counted["attention"].macs) / 1e9 == pytest.approx(products, abs=0.06)


def test_layers_count_through_the_stages():
    """The start of a stage belongs to its first block; parts before all blocks are layer 0, norm and head the last."""
    tables = logical.tensors(zoo.abstract("cvt_13", **SMALL)).values()
    tensors = {t.name: t for table in tables for t in table.flat}
    layers = {n: t.layers for n, t in tensors.items()}
    assert {t.last for t in tensors.values()} == {4}
    assert layers["patch_embed.conv.kernel"] == layers["patch_embed.norm.scale"] == (0,)
    assert layers["stages.0.blocks.1.attention.conv_v.conv.kernel"] == (2,)
    assert layers["stages.1.embed.conv.bias"] == layers["stages.1.class_token"] == (3,)
    assert layers["stages.1.blocks.0.attention.conv_q.norm.scale"] == layers["stages.1.blocks.0.mlp.fc1.bias"] == (3,)
    assert layers["norm.scale"] == layers["head.weight"] == (4,)
    assert [n for n, t in tensors.items() if not t.decay] == ["stages.1.class_token"]


def test_saved_and_loaded(tmp_path):
    m = model(drop_path=(0.1, 0.0))
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(kernels=(7, 3, 3)), r"kernels=\(7, 3, 3\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(drop_path=(0.1,)), r"drop_path=\(0.1,\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(num_heads=(3, 3)), r"num_heads\[0\]=3 must divide the width of stage 0, 8; .* is 2"),
        (dict(depths=(2, 0)), "depths=0 must be a whole number in"),
        (dict(strides=(4, 0)), "strides=0 must be a positive whole number; the nearest is 1"),
        (dict(padding="circle"), "padding='circle' is not one of zeros, circular; the nearest is 'circular'"),
        (dict(activation="relu"), "activation='relu' is not one of quick_gelu, gelu"),
        (dict(image_size=(2, 48)), "CvT: image_size 2x48: stage 0: the height 2 of a map with padding 2 is smaller "
         "than the kernel, 7; it must be at least 3"),
        (dict(kernels=(7, 13)), "CvT: image_size 32x48: stage 1: the height 8 of a map with padding 1 is smaller"),
        (dict(kernel=(7, 3)), "'kernel' is not one of its options; did you mean kernels"),
    ],
)  # fmt: skip
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("cvt_13", **SMALL | options)


def test_bad_calls_are_refused():
    m = zoo.abstract("cvt_13", **SMALL | dict(num_classes=None))
    with pytest.raises(ValueError, match="the model has no head"):
        m(images((32, 48)))
    with pytest.raises(IndexError, match="CvT: there is no block 3; the blocks are 0 to 2"):
        m.features(images((32, 48)), blocks=(0, 3))
    with pytest.raises(ValueError, match="image 40x2: stage 0: the width 2 of a map with padding 2 is smaller than"):
        jax.eval_shape(m.pooled, images((40, 2)))
