"""Swin transformers of both versions: windows and shifts at any size, stages as scans, and the contracts of models."""

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
from equivit.layers.position import bicubic
from equivit.models import saved, zoo
from equivit.models.swin.window import APART, Windows
from equivit.training.optimizers import layer_factor

# Three stages; maps of 8x12, 4x6 and 2x3 tokens: in the second the height is one window, in the third both sides are.
SMALL = dict(width=8, depths=(2, 2, 1), num_heads=(1, 2, 2), window_size=(4, 4), image_size=(32, 48), num_classes=5)
SMALL |= dict(mlp_ratio=2.0)
NAMES = ("swin_t", "swinv2_t")
ODD = (28, 44)  # maps of 7x11, 4x6 and 2x3 tokens, so that windows and merging fill up with zeros
both = pytest.mark.parametrize("name", NAMES)


@functools.cache
def model(name, **options):
    """The model with every parameter random, drawn by NumPy: scales near 1, matrices of unit gain, biases of 1/2."""
    abstract, random = zoo.abstract(name, **SMALL | options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = 1 + 0.2 * noise if "scale" in tensor.name else 0.5 * noise
        return noise.astype(np.float32)

    tensors = {t.name: draw(t) for table in logical.tensors(abstract).values() for t in table.flat}
    return logical.from_logical(abstract, tensors)


def images(size, batch=2):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, *size, 3)), jnp.float32)


call = jax.jit(lambda model, x: model(x))


@jax.jit
def run(model, x):
    """Logits, and the features of all blocks."""
    return model(x), model.features(x, blocks=tuple(range(model.config.depth)))


def near(a, b, tolerance=1e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


# Parts


def cut_by_hand(x, size, shift):
    """The windows of one map [h, w, C] by indices: token (i, j) of window (a, b) is that at (a p + i + shift) mod h."""
    (h, w, channels), (p, q) = x.shape, size
    windows = np.zeros((math.ceil(h / p), math.ceil(w / q), p, q, channels), x.dtype)
    for a, b, i, j in np.ndindex(*windows.shape[:-1]):
        row, column = a * p + i, b * q + j
        if row < h and column < w:  # beyond, zeros
            windows[a, b, i, j] = x[(row + shift[0]) % h, (column + shift[1]) % w]
    return windows.reshape(-1, p * q, channels)


@pytest.mark.parametrize(
    "grid, size, shift", [((8, 12), (4, 4), (2, 2)), ((7, 11), (4, 3), (2, 1)), ((4, 9), (4, 3), (0, 1))]
)
def test_windows_are_cut_and_joined(grid, size, shift):
    x = np.random.default_rng(0).normal(size=(*grid, 2)).astype(np.float32)
    windows = Windows(grid, size, shift)
    found = windows.cut(jnp.asarray(x).reshape(1, -1, 2))
    np.testing.assert_array_equal(found[0], cut_by_hand(x, size, shift))
    np.testing.assert_array_equal(windows.joined(found)[0], x.reshape(-1, 2))


def test_the_mask_parts_what_the_roll_brought_together():
    """On whole windows: two tokens of a window see each other unless the seam of the map lies between them."""
    windows = Windows((8, 12), (4, 4), (2, 0))
    row = np.broadcast_to(np.arange(8)[:, None, None], (8, 12, 1))
    after = cut_by_hand(row, (4, 4), (2, 0))[..., 0] < 2  # rows 0 and 1 come after row 7
    expected = np.where(after[:, :, None] == after[:, None, :], 0, APART)[:, None]
    assert (expected != 0).any() and (expected == 0).any()
    np.testing.assert_array_equal(windows.mask(), expected)
    assert not np.any(Windows((8, 12), (4, 4)).mask())


# Models


def test_windows_and_shifts_of_stages():
    config = zoo.configuration("swin_t")
    assert [config.window(i) for i in range(4)] == [(7, 7)] * 4
    assert [config.shift(i, (224, 224)) for i in range(4)] == [(3, 3)] * 3 + [(0, 0)]
    assert config.shift(3, (448, 224)) == (3, 0)
    config = zoo.configuration("swin_t", **SMALL)
    assert [config.window(i) for i in range(3)] == [(4, 4), (4, 4), (2, 3)]
    assert [config.shift(i, (32, 48)) for i in range(3)] == [(2, 2), (0, 2), (0, 0)]
    tiny = zoo.configuration("swin_t", image_size=(32, 16))  # maps down to 1 x 0.5: the window keeps a token
    assert [tiny.window(i) for i in range(4)] == [(7, 4), (4, 2), (2, 1), (1, 1)]


@both
@pytest.mark.parametrize("size", [(32, 48), ODD], ids=str)
def test_features_of_all_stages(name, size):
    m, x = model(name), images(size)
    logits, features = run(m, x)
    chex.assert_shape(logits, (2, 5))
    h, w = size[0] // 4, size[1] // 4
    half = [(-(-h // n), -(-w // n)) for n in (1, 2, 4)]
    for index, stage in enumerate((0, 0, 1, 1, 2)):
        at = features.blocks[index].patches
        chex.assert_shape(at.values, (2, *half[stage], 8 * 2**stage))
        assert at.stride == (4 * 2**stage,) * 2 and at.offset.shape == (2, 2) and not np.any(at.offset)
    assert features.cls is None and features.registers.shape == (2, 0, 32)
    near(features.blocks[4].patches.values, features.patches.values)
    weight, bias = np.asarray(m.head.weight[...]), np.asarray(m.head.bias[...])
    near(np.mean(features.patches.values, (1, 2)) @ weight + bias, logits)
    # Every token of the image counts, those at the ends of a map that was filled up too.
    for corner in ((0, 0), (-1, -1)):
        changed = np.array(x)
        changed[:, *corner] += 3
        assert np.abs(run(m, changed)[0] - logits).max() > 1e-3 * np.abs(logits).max()


@both
def test_a_scan_equals_its_blocks_one_by_one(name):
    """Three blocks: two in one step of the scan, and one after it."""
    m, x = model(name, depths=(3, 1), num_heads=(1, 2)), images((32, 48))

    @jax.jit
    def both_ways(m, x):
        first, second = m.stages
        y = m.patch_norm(m.patch_embed(x))
        for i in range(3):
            y = first.blocks[i](y, Layout((8, 12), shift=(2, 2)), phase=i % 2)
        y, grid = second.merge(y, (8, 12))
        return second.blocks[0](y, Layout(grid)), m.trunk(x)[0].tokens

    near(*both_ways(m, x))


def test_stochastic_depth_grows_through_all_stages():
    m, x = model("swin_t", drop_path=(0.0, 0.8)), images((32, 48), batch=4)
    assert m.config.rates.tolist() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8])
    dropped = jax.jit(lambda m, x, key: m.features(x, blocks=(0, 3), key=key))
    one, two = (dropped(m, x, jax.random.key(i)) for i in range(2))
    chex.assert_trees_all_equal(one.blocks[0], two.blocks[0])  # the first block drops nothing
    assert np.abs(np.subtract(one.blocks[3].patches.values, two.blocks[3].patches.values)).max() > 1e-2
    chex.assert_trees_all_equal(one, dropped(m, x, jax.random.key(0)))


@both
def test_mixed_precision_keeps_the_stream(name):
    """Merging ends with a linear map without bias, whose bfloat16 must not become the stream's."""
    m, x = model(name), images((32, 48))
    mixed = precision.cast(m, "mixed")
    stream = jax.eval_shape(lambda m, x: m.features(x, blocks=(0, 2, 4), norm=False), mixed, x)
    assert {f.patches.values.dtype for f in stream.blocks.values()} == {jnp.dtype("float32")}
    stream = jax.eval_shape(lambda m, x: m.features(x, blocks=(2,)), precision.cast(m, "bfloat16"), x)
    assert stream.blocks[2].patches.values.dtype == jnp.bfloat16
    if name == "swinv2_t":  # whose cosines are computed in float32
        near(call(mixed, x), run(m, x)[0], tolerance=0.1)  # 2^-8 a rounding


def test_black_image_has_finite_gradients():
    """Queries and keys of length zero are differentiated where an image is black and a model new."""
    m = model("swinv2_t", depths=(1,), num_heads=(2,))
    tensors = {n: np.asarray(t) for n, t in logical.to_logical(m).items()}
    tensors = {n: 0 * t if "qkv" in n or "q_bias" in n else t for n, t in tensors.items()}
    m = logical.from_logical(m, tensors)
    gradients = jax.device_get(jax.jit(jax.grad(lambda m, x: m(x).sum()))(m, jnp.zeros((1, 16, 16, 3))))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@both
def test_new_blocks_of_version_2_are_the_identity(name):
    """The norm after a branch is 0 at first (as in the official code); before a branch it must not be."""

    @jax.jit
    def scales():
        tensors = logical.to_logical(models.create(name, **SMALL))
        return {n: t for n, t in tensors.items() if n.endswith("scale") and "norm" in n}

    found = {n: np.asarray(t) for n, t in scales().items()}
    assert len(found) == 2 * 5 + 4
    assert all((t == (0 if name == "swinv2_t" and ".blocks." in n else 1)).all() for n, t in found.items())


# As any model


@pytest.mark.parametrize(("name", "number"), [("swin_t", 28_288_354), ("swinv2_t", 28_347_154)])
def test_published_sizes(name, number):
    m = zoo.abstract(name)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(m, nnx.Param))) == number
    image = jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32)
    counted = costs.count(lambda m, x: m(x), m, image)
    assert not counted.notes
    # Swin, Table 1 has 4.5 G multiply-adds and SwinV2, Table 4 5.9 G; the rest of ours is the bias of version 2.
    products = (counted["linear"].macs + counted["attention"].macs) / 1e9
    assert products == pytest.approx({"swin_t": 4.5, "swinv2_t": 5.9}[name], abs=0.06)


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.startswith("swin") and name not in NAMES])
def test_other_sizes_can_be_built(name):
    assert zoo.abstract(name).config == zoo.configuration(name)


@both
def test_layers_count_through_the_stages(name):
    """Merging belongs to the first block after it; what is before all blocks is layer 0, norm and head the last."""
    tensors = {t.name: t for table in logical.tensors(zoo.abstract(name, **SMALL)).values() for t in table.flat}
    layers = {n: t.layers for n, t in tensors.items()}
    assert {t.last for t in tensors.values()} == {6}
    assert layers["patch_embed.kernel"] == layers["patch_norm.scale"] == (0,)
    assert layers["stages.0.blocks.1.mlp.fc1.weight"] == (2,)
    assert layers["stages.1.merge.reduction.weight"] == layers["stages.1.merge.norm.scale"] == (3,)
    assert layers["stages.1.blocks.0.attention.proj.bias"] == (3,) and layers["stages.1.blocks.1.norm2.bias"] == (4,)
    assert layers["stages.2.merge.reduction.weight"] == layers["stages.2.blocks.0.attention.qkv.weight"] == (5,)
    assert layers["norm.scale"] == layers["head.weight"] == (6,)
    assert tensors["stages.1.merge.reduction.weight"].block == 2
    assert layer_factor(tensors["stages.1.merge.reduction.weight"], 0.5) == 0.5**3
    free = {n.rpartition("attention.")[2] for n, t in tensors.items() if not t.decay}
    position = {"position.weight1", "position.bias1", "position.weight2", "logit_scale"}
    assert free == ({"position.table"} if name == "swin_t" else position)


@both
def test_saved_and_loaded(name, tmp_path):
    m = model(name)
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


def test_tables_are_resized_with_the_windows():
    m = model("swin_t")
    other, changes = models.remade(m, image_size=(64, 64), window_size=(4, 6), num_classes=3)
    names = [f"stages.{i}.blocks.{j}.attention.position.table" for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    assert changes.resized == tuple(names) and changes.drawn == ("head.bias", "head.weight")
    old, new = logical.to_logical(m), logical.to_logical(other)
    for name, size in zip(names, [(7, 11)] * 4 + [(7, 7)], strict=True):
        rows, columns = (bicubic(before, after) for before, after in zip(old[name].shape, size, strict=False))
        near(new[name], np.einsum("hr,wc,rcd->hwd", rows, columns, old[name]))
    assert jax.eval_shape(lambda m, x: m(x), other, images((64, 64))).shape == (2, 3)


def test_shifts_belong_to_the_image_and_tables_to_the_model():
    """Made for a larger image with the same windows, a model computes what it did for images of that size."""
    m, x = model("swin_t", image_size=(64, 64)), images((64, 128), batch=1)
    larger, changes = models.remade(m, image_size=(64, 128))
    assert not any(changes)
    programs = [str(jax.make_jaxpr(lambda m, x: m(x))(m, x)) for m in (m, larger)]
    assert programs[0] == programs[1]


def test_positions_of_version_2_follow_any_window():
    other, changes = models.remade(model("swinv2_t"), window_size=(8, 3))
    position = jax.eval_shape(lambda m: m.stages[0].blocks[0].attention.position(), other)
    assert not any(changes) and position.shape == (1, 24, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_heads=(1, 2)), r"num_heads=\(1, 2\) and depths=\(2, 2, 1\) must have one entry per stage each"),
        (dict(num_heads=(1, 3, 2)), r"num_heads\[1\]=3 must divide the width of stage 1, 16; .* is 2"),
        (dict(depths=()), r"depths=\(\) must have an entry"),
        (dict(depths=(2, 0, 1)), "depths=0 must be a whole number in"),
        (dict(window_size=0), r"window_size=\(0, 0\) must be \(height, width\) in tokens"),
        (dict(version=3), "version=3 is not one of 1, 2"),
        (dict(image_size=(32, 50)), "the width 50 is not divisible by the patch width 4; the nearest are 48 and 52"),
        (dict(windows=7), "'windows' is not one of its options; did you mean window_size"),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("swin_t", **SMALL | options)


def test_bad_calls_are_refused():
    m = zoo.abstract("swin_t", **SMALL | dict(num_classes=None))
    with pytest.raises(ValueError, match="the model has no head"):
        m(images((32, 48)))
    with pytest.raises(IndexError, match="Swin: there is no block 5; the blocks are 0 to 4"):
        m.features(images((32, 48)), blocks=(0, 5))
    with pytest.raises(ValueError, match="the height 30 is not divisible by the patch height 4; the nearest are 28"):
        jax.eval_shape(m.pooled, images((30, 48)))
