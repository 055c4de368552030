"""MViTv2: shapes of blocks, tables of positions, stages as blocks and scans, and shifts on a torus."""

import jax
import numpy as np
import pytest

from equivit import logical, models
from equivit.layers.grid import Layout
from equivit.models import zoo
from equivit.models.mvit.position import folded
from tests.models.adaptive import ADAPTIVE, check_slope, noise, small
from tests.models.backbones import MVIT, images, model, near, run

ODD = (27, 45)  # maps of 7x12, 4x6 and 2x3 tokens


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
    odd = zoo.configuration("mvitv2_t", **MVIT | dict(image_size=ODD))
    assert [odd.shapes(stage)[0].grid for stage in range(3)] == [(7, 12), (4, 6), (4, 6)]


def test_tables_are_resized_with_the_image():
    """Queries read of an image of another size what they read in the model that was made for it."""
    m = model("mvitv2_t")
    other, changes = models.reconfigure(m, image_size=ODD)
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
    m, x = model("mvitv2_t", depths=(3, 2), expand_attn=False, class_token=False), images((32, 48))
    assert m.stages[0].blocks.lengths == (2, 1) and m.stages[1].blocks.lengths == (1, 1)

    @jax.jit
    def both_ways(m, x):
        first, second = (stage.blocks for stage in m.stages)
        y = m.patch_embed(x).reshape(2, 96, 8)
        for i in range(3):
            y = by_equation(first[i], y, Layout((8, 12)))
        y, _ = second[0]((y, {}), Layout((8, 12)))
        y = by_equation(second[1], y, Layout((4, 6)))
        return m.norm(y).mean(1), m.pooled(x)

    near(*both_ways(m, x))


def rolled(x, *shift):
    return np.roll(x, shift, axis=(1, 2))


def test_circular_padding_follows_shifts_by_the_stride():
    """By 16 pixels, that of the last stage and of keys in all, if nothing reads positions; they have a seam."""
    m, x = model("mvitv2_t", depths=(1, 1, 1), class_token=False, padding="circular"), images((32, 48))
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


def test_heads_double_with_the_width():
    assert zoo.configuration("mvitv2_l").num_heads == (2, 4, 8, 16)
    assert zoo.configuration("mvitv2_t", num_heads=[1, 2, 2, 4]).num_heads == (1, 2, 2, 4)


# Adaptive


@pytest.mark.parametrize(
    ("parts", "options"),
    [(("pool",), {}), (("token", "pool"), dict(depths=(1,), select="input"))],
    ids=["pool", "token and pool"],
)
def test_some_parts_have_one_function_and_its_gradient(parts, options):
    """For any padding of the other parts' convolutions."""
    check_slope(small("mvitv2_t", adaptive=parts, **options), noise(ADAPTIVE["mvitv2_t"].size, 1))


def test_adapted_weights_are_the_ordinary_ones_but_for_positions():
    ordinary = small("mvitv2_t", adaptive=False)
    adapted, changes = models.reconfigure(ordinary, adaptive=True)
    assert adapted.config == small("mvitv2_t").config and adapted.config.mode("pool") == "circular"
    old, new = logical.to_logical(ordinary), logical.to_logical(adapted)
    assert not changes.drawn and not changes.dropped
    assert set(changes.resized) == {name for name in old if "position" in name} and len(changes.resized) == 4
    for name in old.keys() - set(changes.resized):
        np.testing.assert_array_equal(old[name], new[name])
    name = "stages.1.blocks.0.attention.position.rows"  # distances of 4 places on a line, then around a circle of 8
    around = np.stack([new[name][2 * i] for i in range(4)])
    np.testing.assert_allclose(around, folded(old[name], 1), atol=1e-6)
    np.testing.assert_allclose(new[name][1], (around[0] + around[1]) / 2, atol=1e-6)
    again, changes = models.reconfigure(adapted, image_size=(64, 16))
    again = logical.to_logical(again)
    np.testing.assert_array_equal(again[name][::2], new[name])
    np.testing.assert_allclose(again[name][-1], (new[name][-1] + new[name][0]) / 2, atol=1e-6)
    assert models.adapt(ordinary, adaptive=("token", "pool"), select="input").config.parts == ("token", "pool")


def test_an_ordinary_model_reads_the_positions_of_an_adaptive_one():
    """Around the circle again, each distance has the vector it had."""
    adaptive = small("mvitv2_t")
    ordinary, changes = models.reconfigure(adaptive, adaptive=False)
    old, new = logical.to_logical(adaptive), logical.to_logical(ordinary)
    assert not changes.drawn and not changes.dropped and len(changes.resized) == 4
    shapes = [shape for stage in range(2) for shape in adaptive.config.shapes(stage)]
    for stage, shape in enumerate(shapes):
        finer = min(shape.stride[0], shape.kv_stride[0])
        name = f"stages.{stage}.blocks.0.attention.position.rows"
        np.testing.assert_allclose(folded(new[name], shape.kv_stride[0] // finer), old[name][::finer], atol=1e-6)
