"""Properties that staged backbones and BiXT share; the file of each backbone tests what is its own."""

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
from equivit.layers.dropout import dropout
from equivit.models import saved, zoo
from equivit.models.inference import fold
from equivit.training.optimizers import layer_factor
from tests.models.backbones import BACKBONES, Backbone, images, model, near, run, tensors


def several(backbones):
    return pytest.mark.parametrize("backbone", backbones, ids=lambda backbone: backbone.name)


every = several(BACKBONES.values())
convolutional = several([b for b in BACKBONES.values() if b.convolved])
RUNS = [(backbone, size) for backbone in BACKBONES.values() for size in backbone.sizes]


def arrays(backbone, size, batch, **options):
    """The model and images, in the type that it is compared in."""
    m, x = model(backbone.name, **options), images(size, batch)
    if not backbone.exact:
        return m, x
    return jax.tree.map(lambda a: np.asarray(a, np.float64), (m, x))


@pytest.mark.parametrize(("backbone", "size"), RUNS, ids=lambda v: v.name if isinstance(v, Backbone) else str(v))
def test_features_of_all_blocks(backbone, size):
    """Every pixel is read that no stride leaves out, and no image reads another; for non-square images."""
    options, unread = backbone.variants.get(size, {}), backbone.unread.get(size)
    m, x = arrays(backbone, size, 5, **options)
    last = (-1, -1) if unread is None else (unread[0], unread[1] - 1)
    pixels = [(0, 0), (0, size[1] // 2), last] + [unread] * (unread is not None)
    with jax.enable_x64(backbone.exact):
        logits, features = jax.device_get(run(m, x))
        check_features(backbone, size, features, options.get("class_token", True))
        near(m.head(backbone.head_input(m, features)), logits, 2e-5)
        moved = np.zeros(len(x))
        for step in (30, -30):  # an activation may be 0 after one of them
            changed = np.array(x)
            for i, pixel in enumerate(pixels):
                changed[i, *pixel] += step
            moved = np.maximum(moved, np.abs(run(m, changed)[0] - logits).max(1))
    assert moved[:3].min() > 1e-4 * np.abs(logits).max() and not moved[3:].any()


def check_features(backbone, size, features, class_token):
    """The shapes, strides and offsets of all blocks, and that the last one gives the last map."""
    batch, index = len(features.registers), 0
    for stage, (number, width, stride) in enumerate(backbone.stages):
        for _ in range(number):
            at, index = features.blocks[index], index + 1
            chex.assert_shape(at.patches.values, (batch, *backbone.sizes[size][stage], width))
            chex.assert_shape(at.registers, (batch, backbone.registers, width))
            assert at.patches.stride == (stride, stride)
            assert at.patches.offset.shape == (batch, 2) and not np.any(at.patches.offset)
            if stage in backbone.class_stages and class_token:
                chex.assert_shape(at.cls, (batch, width))
            else:
                assert at.cls is None
    assert index == len(features.blocks)
    near(features.blocks[index - 1].patches.values, features.patches.values)


@jax.jit
def both_forms(m, x):
    """Logits and tokens of all blocks, of the model and of its folded form; and the statistics after that."""

    def one_pass(m):
        last, seen = m.trunk(x, capture=tuple(range(m.config.depth)))
        return m.classify(m.pool(last)), last.tokens, [at.tokens for at in seen.values()]

    return one_pass(m), one_pass(fold(m)), logical.to_logical(m, nnx.BatchStat)


@pytest.mark.slow
@convolutional
def test_folding_and_statistics_in_evaluation(backbone):
    m, x = arrays(backbone, backbone.size, 4)
    with jax.enable_x64(backbone.exact):
        whole, form, statistics = both_forms(m, x)
        jax.tree.map(lambda a, b: a.size and near(a, b, 1e-12 if backbone.exact else 2e-5), form, whole)
    chex.assert_trees_all_equal(statistics, logical.to_logical(m, nnx.BatchStat))
    norms = [norms_of(form) for form in (m, jax.eval_shape(fold, m))]
    assert list(map(len, norms)) == [backbone.norms, backbone.unfolded]


def norms_of(m):
    return [part for _, part in nnx.iter_modules(m) if isinstance(part, BatchNorm)]


@jax.jit
@recording()
def trained(m, x, key):
    """The tokens after the first block and the logits in training, and the statistics after that."""
    last, seen = m.trunk(x, capture=(0,), key=key, train=True)
    return seen[0].tokens, m.classify(m.pool(last, train=True), train=True), logical.to_logical(m, nnx.BatchStat)


@pytest.mark.slow
@several([b for b in BACKBONES.values() if b.dropped[0]])
def test_training_drops_branches_and_records_statistics(backbone):
    """The first block, at a rate of 0, drops nothing; statistics move by a tenth, with the unbiased variance."""
    options, rates = backbone.dropped
    m, x = model(backbone.name, **options), images(backbone.size, 4)
    np.testing.assert_allclose(m.config.rates, rates, rtol=1e-6)
    assert model(backbone.name).config.rates is None
    (first, logits, after), (same, others, _) = (jax.device_get(trained(m, x, jax.random.key(i))) for i in range(2))
    if not rates[0]:
        chex.assert_trees_all_equal(first, same)
    assert np.abs(logits - others).max() > 1e-2
    chex.assert_trees_all_equal(logits, trained(m, x, jax.random.key(0))[1])
    before = logical.to_logical(m, nnx.BatchStat)
    assert all(np.abs(before[name] - after[name]).max() > 1e-4 for name in before)
    if backbone.convolved is not None:
        name, convolve = backbone.convolved
        rows = np.asarray(jax.jit(convolve)(m, x))
        rows = rows.reshape(-1, rows.shape[-1])
        near(after[f"{name}.mean"], 0.9 * before[f"{name}.mean"] + 0.1 * rows.mean(0))
        near(after[f"{name}.variance"], 0.9 * before[f"{name}.variance"] + 0.1 * rows.var(0, ddof=1))


def test_dropout_before_the_head():
    m, x, key = model("swin_t", depths=(1,), num_heads=(1,), dropout=0.5), images((16, 24)), jax.random.key(0)

    @jax.jit
    def both(m, x):
        trunk, head = jax.random.split(key)
        return m(x, key=key), m.head(dropout(m.pooled(x, key=trunk), 0.5, head)), m.head(m.pooled(x, key=trunk))

    logits, by_hand, without = both(m, x)
    near(logits, by_hand)
    assert np.abs(without - logits).max() > 1e-2


@every
def test_types_and_batch_axes(backbone):
    """The stream of residuals of mixed precision is float32, in training too; in bfloat16 it is rounded."""
    m, x = model(backbone.name), jax.ShapeDtypeStruct((2, 1, *backbone.size, 3), jnp.float32)
    mixed, low = (jax.eval_shape(lambda m, kind=kind: precision.cast(m, kind), m) for kind in ("mixed", "bfloat16"))
    assert stream(mixed, x) == {"float32"} and stream(low, x) == {"bfloat16"}
    assert jax.eval_shape(recording()(lambda m, x: m(x, train=True)), mixed, x).shape == (2, 1, 5)
    statistics = jax.tree.leaves(nnx.state(mixed, nnx.BatchStat))
    assert {leaf.dtype.name for leaf in statistics} <= {"float32"}


def test_types_where_the_mlp_widens():
    """The shortcuts of MViTv2 that widen are linear maps, whose bfloat16 must not become the stream's."""
    m = precision.cast(model("mvitv2_t", depths=(1, 1), expand_attn=False), "mixed")
    assert stream(m, images((32, 48))) == {"float32"}


def stream(m, x):
    """The types of tokens after all blocks in training."""

    def tokens(m, x):
        features = m.features(x, blocks=tuple(range(m.config.depth)), norm=False, train=True)
        return [(at.patches.values, at.cls) for at in features.blocks.values()]

    return {leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(recording()(tokens), m, x))}


@convolutional
def test_statistics_of_groups_reach_every_norm(backbone):
    m = zoo.abstract(backbone.name, **backbone.small, statistics_groups=2)
    assert [norm.groups for norm in norms_of(m)] == [2] * backbone.norms


# Parameters, of the folded model too, and M multiply-adds of an image of some size, as papers and timm have them.
PUBLISHED = [
    ("swin_t", 28_288_354, None, {224: 4500}, 60),
    ("swinv2_t", 28_347_154, None, {256: 5900}, 60),
    ("cvt_13", 19_997_480, None, {384: 16300}, 60),
    ("cvt_21", 31_622_696, None, {384: 24900}, 60),
    ("mvitv2_t", 24_173_320, None, {224: 4700}, 50),
    ("mobilenetv4_conv_small", 3_774_024, 3_761_480, {224: 186.0}, 0.06),
    ("mobilenetv4_conv_medium", 9_715_512, 9_681_560, {224: 827.6}, 0.06),
    # Beside its convolutions, four norms of 256 channels before attention fold to 4 x 64 + 64 + 64 biases each.
    ("mobilenetv4_hybrid_medium", 11_074_648, 11_038_392 - 4 * (2 * 256 - 384), {224: 966.3}, 0.06),
    ("efficientvit_b0", 3_410_008, 3_407_328, {128: 34.5}, 0.051),
    ("efficientvit_b1", 9_102_024, 9_095_320, {224: 519.2}, 0.051),
    ("shvit_s1", 6_330_808, 6_308_660, {128: 75.1}, 0.051),
    ("shvit_s2", 11_483_072, 11_453_508, {224: 365.4}, 0.051),
    ("shvit_s3", 14_245_273, 14_210_010, {224: 600.6}, 0.051),
    ("bixt_ti_p16", 15_121_192, None, {224: 1672.2}, 0.06),
]


@pytest.mark.parametrize(("name", "number", "folded", "products", "tolerance"), PUBLISHED, ids=lambda v: str(v)[:26])
def test_published_sizes(name, number, folded, products, tolerance):
    m = zoo.abstract(name)
    assert parameters(m) == number and (folded is None or parameters(jax.eval_shape(fold, m)) == folded)
    ((side, expected),) = products.items()
    counted = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32))
    macs = counted["linear"].macs + counted["attention"].macs
    assert not counted.notes and macs / 1e6 == pytest.approx(expected, abs=tolerance)
    assert counted.macs == macs or name == "swinv2_t"  # whose bias is computed


@pytest.mark.parametrize(("size", "millions"), [("s", 34.87), ("b", 51.47), ("l", 217.99)])
def test_parameters_of_larger_mvits(size, millions):
    assert parameters(zoo.abstract(f"mvitv2_{size}")) / 1e6 == pytest.approx(millions, abs=0.005)


def parameters(m):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(m, nnx.Param)))


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.startswith("swin") and name[-2:] != "_t"])
def test_other_sizes_can_be_built(name):
    assert zoo.abstract(name).config == zoo.configuration(name)


@every
def test_layers_count_through_the_stages(backbone):
    """Parts before all blocks are layer 0, the start of a stage is a part of its first block, the end is the last."""
    found = {tensor.name: tensor for tensor in tensors(model(backbone.name))}
    last = max(backbone.layers.values())
    assert {tensor.last for tensor in found.values()} == {last}
    for name, layer in backbone.layers.items():
        assert found[name].layers == (layer,), name
        assert found[name].block == (layer - 1 if 0 < layer < last else None)
        assert layer_factor(found[name], 0.5) == 0.5 ** (last - layer)
    assert {name.rpartition("attention.")[2] for name, t in found.items() if not t.decay} == backbone.undecayed


@every
def test_saved_and_loaded(backbone, tmp_path):
    m = model(backbone.name, **backbone.dropped[0])
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    chex.assert_trees_all_equal(again, m)


CHOICES = {
    "swin_t": [
        (dict(num_heads=(1, 2)), r"num_heads=\(1, 2\) and depths=\(2, 2, 1\) must have one entry per stage each"),
        (dict(num_heads=(1, 3, 2)), r"num_heads\[1\]=3 must divide the width of stage 1, 16; .* is 2"),
        (dict(depths=()), r"depths=\(\) must be one or more whole numbers"),
        (dict(depths=(2, 0, 1)), "depths=0 must be a whole number in"),
        (dict(window_size=0), r"window_size=\(0, 0\) must be \(height, width\) in tokens"),
        (dict(version=3), "version=3 is not one of 1, 2"),
        (dict(image_size=(32, 50)), "the width 50 is not divisible by the patch width 4; the nearest are 48 and 52"),
        (dict(windows=7), "'windows' is not one of its options; did you mean window_size"),
    ],
    "cvt_13": [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(kernels=(7, 3, 3)), r"kernels=\(7, 3, 3\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(drop_path=(0.1,)), r"drop_path=\(0.1,\) and depths=\(2, 1\) must have one entry per stage each"),
        (dict(num_heads=(3, 3)), r"num_heads\[0\]=3 must divide the width of stage 0, 8; .* is 2"),
        (dict(depths=(2, 0)), "depths=0 must be a whole number in"),
        (dict(strides=(4, 0)), "strides=0 must be a positive whole number; the nearest is 1"),
        (dict(padding="circle"), "padding='circle' is not one of zeros, circular; the nearest is 'circular'"),
        (dict(activation="relu"), "activation='relu' is not one of quick_gelu, gelu"),
        (
            dict(image_size=(2, 48)),
            "CvT: image_size 2x48: stage 0: the height 2 of a map with padding 2 is smaller "
            "than the kernel, 7; it must be at least 3",
        ),
        (dict(kernels=(7, 13)), "CvT: image_size 32x48: stage 1: the height 8 of a map with padding 1 is smaller"),
        (dict(kernel=(7, 3)), "'kernel' is not one of its options; did you mean kernels"),
    ],
    "mvitv2_t": [
        (dict(num_heads=(1, 2)), r"num_heads=\(1, 2\) and depths=\(1, 2, 1\) must have one entry per stage each"),
        (dict(num_heads=3), r"num_heads\[0\]=3 must divide the width of stage 0, 8; .* is 2"),
        (dict(num_heads=True), "num_heads=True must be a positive whole number, or one or more positive whole numbers"),
        (dict(depths=()), r"depths=\(\) must be one or more whole numbers"),
        (dict(depths=(2, 0, 1)), "depths=0 must be a whole number in"),
        (dict(padding="circle"), "padding='circle' is not one of zeros, circular"),
        (dict(image_size=(0, 8)), r"image_size=\(0, 8\) must be \(height, width\) in pixels"),
        (dict(patch_size=4), "'patch_size' is not one of its options"),
    ],
    "mobilenetv4_hybrid_medium": [
        (dict(stages=("conv 3 s2 8, uib 3 e4 8",)), "'uib 3 e4 8' is not a block; write it like 'uib 3/5 s2 e4 80'"),
        (dict(stages=("conv 4 8",)), "'conv 4 8' is not a block"),
        (dict(stages=("uib 0/0 s2 e4 8",)), "'uib 0/0 s2 e4 8' has no depthwise convolution for its stride"),
        (dict(stages=("mqa 4x64 8",)), "'mqa 4x64 8' must keep its 6 input channels"),
        (dict(stages="conv 1 8"), "stages='conv 1 8' must be one or more strings"),
        (dict(drop_path=1), "drop_path=1 must be in"),
        (dict(registers=4), "'registers' is not one of its options"),
        (dict(stem_width=0), "stem_width=0 must be a positive whole number; the nearest is 1"),
    ],
    "efficientvit_b0": [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) must have 5 entries, of the stem and of 4 stages"),
        (dict(depths=(1, 1, 1, 1)), r"depths=\(1, 1, 1, 1\) must have 5 entries"),
        (dict(head_channels=3), "head_channels=3 must divide the width of stage 2, 8; .* is 2"),
        (dict(neck_widths=(8,)), r"neck_widths=\(8,\) must be two positive whole numbers"),
        (dict(drop_path=1.0), "drop_path=1.0 must be"),
        (dict(registers=4), "'registers' is not one of its options"),
    ],
    "shvit_s1": [
        (dict(widths=(8, 12, 16)), r"widths=\(8, 12, 16\) and depths=\(1, 2\) must have one entry per stage each"),
        (dict(partial_widths=(5,)), r"partial_widths=\(5,\) and depths=\(1, 2\) must have one entry per stage each"),
        (dict(widths=(12, 12)), r"widths=\(12, 12\): the first must be a multiple of 8, .*; the nearest is 16"),
        (dict(partial_widths=(0, 13)), "stage 1 has 12 channels, so 13 cannot attend; the most is 12"),
        (dict(statistics_groups=0), "statistics_groups=0 must be a positive whole number"),
        (dict(registers=4), "'registers' is not one of its options"),
    ],
    "bixt_ti_p16": [
        (dict(num_heads=5), "BiXT: num_heads=5 must divide width=12"),
        (
            dict(kernel=(8, 7)),
            r"kernel=\(8, 7\) must be patch_size=\(4, 4\) or larger by even .*; the nearest to 7 is 8",
        ),
        (dict(kernel=(2, 4)), "the nearest to 2 is 4"),
        (
            dict(image_size=(12, 22)),
            "BiXT: image_size 12x22: the width 22 is not divisible by the patch width 4",
        ),
        (dict(mlp_ratio=0.01), "BiXT: mlp_ratio=0.01 leaves no hidden channel of width=12; 0.083 leaves one"),
        (dict(depth=0), "depth=0 must be a whole number in"),
        (dict(registers=3), "'registers' is not one of its options"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *row) for name, rows in CHOICES.items() for row in rows], ids=str
)
def test_bad_choices_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract(name, **BACKBONES[name].small | options)


@every
def test_bad_calls_are_refused(backbone):
    m, x = zoo.abstract(backbone.name, **backbone.small | dict(num_classes=None)), images(backbone.size)
    family, depth = type(m).__name__, m.config.depth
    with pytest.raises(ValueError, match=f"{family}: the model has no head"):
        m(x)
    with pytest.raises(IndexError, match=f"{family}: there is no block {depth}; the blocks are 0 to {depth - 1}"):
        m.features(x, blocks=(0, depth))
    with pytest.raises(ValueError, match=r"images \(2, .*, 1\) must be \[\*B, H, W, 3\]"):
        m.pooled(x[..., :1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("swin_t", (30, 48), "the height 30 is not divisible by the patch height 4; the nearest are 28"),
        ("cvt_13", (40, 2), "image 40x2: stage 0: the width 2 of a map with padding 2 is smaller than"),
        ("bixt_ti_p16", (10, 20), "the height 10 is not divisible by the patch height 4; the nearest are 8"),
    ],
)
def test_bad_sizes_are_refused(name, size, message):
    m = zoo.abstract(name, **BACKBONES[name].small)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(m.pooled, images(size))


@several([b for b in BACKBONES.values() if hasattr(zoo.configuration(b.name, **b.small), "init")])
def test_xavier_weights_follow_the_widths(backbone):
    """Every map of the blocks, of shortcuts and of merging is uniform in +-sqrt(6 / (inputs + outputs))."""
    depths = dict(depths=backbone.small["depths"][-2:], num_heads=backbone.small.get("num_heads", (1, 1))[:2])
    config = zoo.configuration(backbone.name, **backbone.small | depths | dict(init="xavier_uniform"))
    maps = {name: a for name, a in logical.take(config.build(nnx.Rngs(0))).items() if name.endswith(".weight")}
    assert len(maps) > 8
    for name, weights in maps.items():
        if name == "head.weight":
            continue
        bound, largest = math.sqrt(6 / sum(weights.shape[-2:])), np.abs(weights).max(axis=(-2, -1))
        assert (largest <= bound).all() and (largest > 0.9 * bound).all(), name
