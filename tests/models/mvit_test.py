"""MViTv2: any image size, stages as blocks and scans, shifts on a torus, and the contracts of models."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, models, precision
from equivit.layers.grid import Layout
from equivit.models import saved, zoo
from equivit.training.optimizers import layer_factor

# Maps of 8x12, 4x6 and 2x3 tokens, after a class token; 4 blocks.
SMALL = dict(width=8, depths=(1, 2, 1), image_size=(32, 48), num_classes=5, mlp_ratio=2.0, class_token=True)
ODD = (27, 45)  # maps of 7x12, 4x6 and 2x3 tokens


@functools.cache
def model(**options):
    """The model with every parameter random, drawn by NumPy: scales near 1, matrices of unit gain, others of 1/2."""
    abstract, random = zoo.abstract("mvitv2_t", **SMALL | options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1 and "position" not in tensor.name:
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = 1 + 0.2 * noise if "scale" in tensor.name else 0.5 * noise
        return noise.astype(np.float32)

    return logical.from_logical(abstract, {tensor.name: draw(tensor) for tensor in tensors(abstract)})


def tensors(module):
    return [tensor for table in logical.tensors(module).values() for tensor in table.flat]


def images(size, batch=2):
    return np.random.default_rng(1).normal(size=(batch, *size, 3)).astype(np.float32)


@jax.jit
def run(model, x):
    """Logits, and the features of all blocks."""
    return model(x), model.features(x, blocks=tuple(range(model.config.depth)))


def near(a, b, tolerance=1e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def near_not(a, b):
    assert np.abs(np.subtract(a, b)).max() > 1e-2 * np.abs(b).max()


def test_shapes_of_blocks():
    """The strides, maps and tables of MViTv2-T; a table has 2 n - 1 distances for n places."""
    config = zoo.configuration("mvitv2_t")
    blocks = [shape for stage in range(4) for shape in config.shapes(stage)]
    assert [b.stride[0] for b in blocks] == [1, 2, 1, 2, 1, 1, 1, 1, 2, 1]
    assert [b.kv_stride[0] for b in blocks] == [4, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert [2 * b.grid[0] - 1 for b in blocks] == [111, 55, 55, 55, 27, 27, 27, 27, 27, 13]
    assert [b.before for b in blocks] == [96, 96, 192, 192, *[384] * 5, 768]
    assert all(b.width == b.after == 96 * b.num_heads for b in blocks)
    # MViTv2-L widens in the MLP, one block earlier.
    large = [zoo.configuration("mvitv2_l").shapes(stage) for stage in range(4)]
    assert all(b.before == b.width == 144 * 2**stage for stage in range(4) for b in large[stage])
    assert [[b.after // 144 for b in stage][-2:] for stage in large] == [[1, 2], [2, 4], [4, 8], [8, 8]]
    odd = zoo.configuration("mvitv2_t", **SMALL | dict(image_size=ODD))
    assert [odd.shapes(stage)[0].grid for stage in range(3)] == [(7, 12), (4, 6), (4, 6)]


def test_features_of_all_stages():
    """For images whose sizes no stride divides."""
    m, x = model(), images(ODD)
    logits, features = run(m, x)
    chex.assert_shape(logits, (2, 5))
    assert jax.eval_shape(m, x[:, None]).shape == (2, 1, 5)
    for index, stage in enumerate((0, 1, 1, 2)):
        at, (h, w) = features.blocks[index], (-(-n // (4 * 2**stage)) for n in ODD)
        chex.assert_shape(at.patches.values, (2, h, w, 8 * 2**stage))
        chex.assert_shape(at.cls, (2, 8 * 2**stage))
        assert at.patches.stride == (4 * 2**stage,) * 2
        assert at.patches.offset.shape == (2, 2) and not np.any(at.patches.offset)
    assert features.registers.shape == (2, 0, 32)
    near(features.blocks[3].patches.values, features.patches.values)
    near(np.asarray(features.cls) @ np.asarray(m.head.weight[...]) + np.asarray(m.head.bias[...]), logits)
    for corner in ((0, 0), (-1, -1)):  # every pixel counts
        changed = np.array(x)
        changed[:, *corner] += 30
        near_not(run(m, changed)[1].patches.values, features.patches.values)


def test_tables_are_resized_with_the_image():
    """Queries read of an image of another size what they read in the model that was made for it."""
    m = model()
    other, changes = models.remade(m, image_size=ODD)
    names = tuple(f"stages.0.blocks.0.attention.position.{axis}" for axis in ("columns", "rows"))
    assert changes == (names, (), ())  # the maps of later stages have the same size
    tables = logical.to_logical(other)
    assert [tables[name].shape for name in names] == [(23, 8), (13, 8)]
    q = np.random.default_rng(2).normal(size=(2, 1, 84, 8)).astype(np.float32)
    read = jax.jit(lambda m, q: m.stages[0].blocks[0].attention.position(q, (7, 12), (2, 3)))
    near(read(other, q), read(m, q), 1e-6)


def by_equation(block, x, layout):
    """The block by its parts, where it is not strided."""
    y = block.norm1(x)
    x = x + block.attention(y, layout)
    y = block.norm2(x)
    return (x if block.mlp_shortcut is None else block.mlp_shortcut(y)) + block.mlp(y)


def test_a_scan_equals_its_blocks_one_by_one():
    """With the other place of widening: a scan of two blocks, one that widens, a strided one and one more."""
    m, x = model(depths=(3, 2), expand_attn=False, class_token=False), images((32, 48))
    assert m.stages[0].blocks.lengths == (2, 1) and m.stages[1].blocks.lengths == (1, 1)

    @jax.jit
    def both_ways(m, x):
        first, second = (stage.blocks for stage in m.stages)
        y = m.patch_embed(x).reshape(2, 96, 8)
        for i in range(3):
            y = by_equation(first[i], y, Layout((8, 12)))
        y, _ = second[0](y, Layout((8, 12)))
        y = by_equation(second[1], y, Layout((4, 6)))
        return m.norm(y).mean(1), m.pooled(x)

    near(*both_ways(m, x))


def test_stochastic_depth_grows_through_all_stages():
    m, x = model(depths=(1, 3), drop_path=(0.0, 0.75)), images((16, 24), batch=4)
    assert m.config.rates.tolist() == pytest.approx([0.0, 0.25, 0.5, 0.75])
    dropped = jax.jit(lambda m, x, key: m.features(x, blocks=(0,), key=key))
    one, two = (dropped(m, x, jax.random.key(i)) for i in range(2))
    chex.assert_trees_all_equal(one.blocks[0], two.blocks[0])  # the first block drops nothing
    near_not(one.patches.values, two.patches.values)
    chex.assert_trees_all_equal(one, dropped(m, x, jax.random.key(0)))


def rolled(x, *shift):
    return np.roll(x, shift, axis=(1, 2))


def test_circular_padding_follows_shifts_by_the_stride():
    """By 16 pixels, that of the last stage and of keys in all, if nothing reads positions; they have a seam."""
    m, x = model(depths=(1, 1, 1), class_token=False, padding="circular"), images((32, 48))
    none = {n: 0 * t if "position" in n else t for n, t in logical.to_logical(m).items()}
    bare = logical.from_logical(m, none)
    (logits, there), (moved, then) = run(bare, x), run(bare, rolled(x, 16, -16))
    assert there.cls is None
    near(moved, logits)
    for index in range(3):
        pixels = 16 // there.blocks[index].patches.stride[0]
        near(then.blocks[index].patches.values, rolled(there.blocks[index].patches.values, pixels, -pixels))
    near_not(run(bare, rolled(x, 0, 8))[0], logits)
    near_not(run(m, rolled(x, 16, -16))[0], run(m, x)[0])


def test_mixed_precision_keeps_the_stream():
    """Shortcuts that widen are linear maps, whose bfloat16 must not become the stream's."""
    x = images((32, 48))

    def types(m, precision_, blocks):
        features = jax.eval_shape(lambda m, x: m.features(x, blocks=blocks), precision.cast(m, precision_), x)
        return {leaf.dtype.name for f in features.blocks.values() for leaf in (f.patches.values, f.cls)}

    assert types(model(), "mixed", (0, 1, 3)) == {"float32"}
    assert types(model(depths=(1, 1), expand_attn=False), "mixed", (0, 1)) == {"float32"}
    assert types(model(), "bfloat16", (0, 3)) == {"bfloat16"}


# As any model


@pytest.mark.parametrize(("name", "millions"), [("t", 24.17), ("s", 34.87), ("b", 51.47), ("l", 217.99)])
def test_published_sizes(name, millions):
    m = zoo.abstract(f"mvitv2_{name}")
    number = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(m, nnx.Param)))
    assert number / 1e6 == pytest.approx(millions, abs=0.005)
    if name == "t":
        assert number == 24_173_320
        counted = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32))
        assert not counted.notes
        assert counted.macs / 1e9 == pytest.approx(4.7, abs=0.05)


def test_layers_count_through_the_stages():
    """A block that runs by itself counts as any; what is before all blocks is layer 0, norm and head the last."""
    found = {t.name: t for t in tensors(zoo.abstract("mvitv2_t", **SMALL))}
    layers = {name: t.layers for name, t in found.items()}
    assert {t.last for t in found.values()} == {5}
    assert layers["patch_embed.kernel"] == layers["class_token"] == (0,)
    assert layers["stages.0.blocks.0.mlp.fc1.weight"] == (1,)
    assert layers["stages.1.blocks.0.shortcut.weight"] == layers["stages.1.blocks.0.attention.qkv.weight"] == (2,)
    assert layers["stages.1.blocks.1.attention.pool_q.kernel"] == (3,)
    assert layers["stages.2.blocks.0.attention.position.rows"] == (4,)
    assert layers["norm.scale"] == layers["head.weight"] == (5,)
    assert layer_factor(found["stages.1.blocks.0.shortcut.weight"], 0.5) == 0.5**3
    assert {n.rpartition("attention.")[2] for n, t in found.items() if not t.decay} == {
        "class_token",
        "position.rows",
        "position.columns",
    }


def test_saved_and_loaded(tmp_path):
    m = model()
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


def test_heads_double_with_the_width():
    assert zoo.configuration("mvitv2_l").num_heads == (2, 4, 8, 16)
    assert zoo.configuration("mvitv2_t", num_heads=[1, 2, 2, 4]).num_heads == (1, 2, 2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_heads=(1, 2)), r"num_heads=\(1, 2\) and depths=\(1, 2, 1\) must have one entry per stage each"),
        (dict(num_heads=3), r"num_heads\[0\]=3 must divide the width of stage 0, 8; .* is 2"),
        (dict(num_heads=True), "num_heads=True must be a positive whole number, or one or more positive whole numbers"),
        (dict(depths=()), r"depths=\(\) must have an entry"),
        (dict(depths=(2, 0, 1)), "depths=0 must be a whole number in"),
        (dict(padding="circle"), "padding='circle' is not one of zeros, circular"),
        (dict(image_size=(0, 8)), r"image_size=\(0, 8\) must be \(height, width\) in pixels"),
        (dict(patch_size=4), "'patch_size' is not one of its options"),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("mvitv2_t", **SMALL | options)


def test_bad_calls_are_refused():
    m = zoo.abstract("mvitv2_t", **SMALL | dict(num_classes=None))
    with pytest.raises(ValueError, match="the model has no head"):
        m(images((32, 48)))
    with pytest.raises(IndexError, match="MViT: there is no block 4; the blocks are 0 to 3"):
        m.features(images((32, 48)), blocks=(0, 4))
    with pytest.raises(ValueError, match=r"images \(2, 32, 48, 3\) must be \[\*B, H, W, 1\]"):
        zoo.abstract("mvitv2_t", **SMALL | dict(in_channels=1))(images((32, 48)))
