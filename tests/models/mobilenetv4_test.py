"""MobileNetV4: published sizes, maps of any size, statistics, folding, types, and the contracts of models."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, precision, pretrained
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording
from equivit.models import saved, zoo
from equivit.models.folding import fold
from equivit.models.mobilenetv4.inverted_bottleneck import UniversalInvertedBottleneck
from equivit.models.mobilenetv4.model import HYBRID_MEDIUM, Spec, parsed
from equivit.models.segmenter.model import SegmenterConfig
from equivit.pretrained import mapping, mobilenetv4
from equivit.pretrained.format import Hints

# Every kind of block, with and without a residual sum, in one model of few channels.
STAGES = (
    "conv 3 s2 8",
    "fused 3 s2 e2 12, fused 1 e1 12, uib 0/3 e1 12",
    "uib 3/5 s2 e2 16, mqa 2x4 kv2 16, uib 3/0 e1 16",
    "uib 3/0 s2 e1 20, mqa 3x4 20, uib 0/0 e1 20",
    "conv 1 24",
)
SMALL = dict(stages=STAGES, stem_width=6, head_width=10, layer_scale=0.5, num_classes=5)
ODD = (75, 42)
GRIDS = [(19, 11)] + [(10, 6)] * 3 + [(5, 3)] * 3 + [(3, 2)] * 4  # at strides 4, 8, 16 and 32, rounded upwards


def draw(abstract):
    """Every parameter and statistic random: scales and variances near 1, biases and means of 1/2."""
    random = np.random.default_rng(0)

    def values(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            return (noise * math.prod(tensor.shape[:-1]) ** -0.5).astype(np.float32)
        return (np.exp(0.2 * noise) if tensor.name.endswith(("scale", "variance")) else 0.5 * noise).astype(np.float32)

    tensors = {t.name: values(t) for table in logical.tensors(abstract, nnx.Variable).values() for t in table.flat}
    return logical.from_logical(abstract, tensors, nnx.Variable)


@functools.cache
def abstract(**options):
    return zoo.abstract("mobilenetv4_hybrid_medium", **SMALL | options)


@functools.cache
def model(**options):
    return draw(abstract(**options))


def images(size=ODD, batch=4):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, *size, 3)), jnp.float32)


@jax.jit
def run(model, x):
    """Logits, features, logits of the folded model, and the statistics after that."""
    features = model.features(x, blocks=tuple(range(11)))
    return model(x), features, fold(model)(x), logical.to_logical(model, nnx.BatchStat)


def near(a, b, tolerance=2e-5):
    """Equal up to rounding, relative to the largest entry."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def test_maps_of_all_blocks():
    """For an odd, non-square image, each pixel of which is read."""
    m, x = model(), images()
    logits, features, _, statistics = run(m, x)
    for index, (grid, width, stride) in enumerate(
        zip(GRIDS, (*m.config.inputs[1:], 24), m.config.strides, strict=True)
    ):
        at = features.blocks[index]
        chex.assert_shape(at.patches.values, (4, *grid, width))
        assert at.patches.stride == (stride, stride) and at.cls is None and at.registers.shape == (4, 0, width)
        assert at.patches.offset.shape == (4, 2) and not np.any(at.patches.offset)
    chex.assert_trees_all_equal(features.blocks[10].patches.values, features.patches.values)
    pooled, neck = np.mean(features.patches.values, (1, 2)), m.neck
    factor, shift = neck.norm.affine()
    wide = np.maximum(factor * (pooled @ neck.conv.kernel[...][0, 0]) + shift, 0)
    near(wide @ np.asarray(m.head.weight[...]) + np.asarray(m.head.bias[...]), logits)
    changed = np.array(x)
    for i, pixel in enumerate(((0, 0), (74, 41), (0, 41))):
        changed[i, *pixel] += 100
    moved = np.abs(run(m, changed)[0] - logits).max(1)
    assert moved[:3].min() > 1e-3 and not moved[3]  # and no image sees another
    chex.assert_trees_all_equal(statistics, logical.to_logical(m, nnx.BatchStat))


def test_folding():
    """All norms but the one before keys that are convolved."""
    m, form = abstract(), jax.eval_shape(fold, abstract())
    logits, _, folded, _ = run(model(), images())
    near(folded, logits)
    kept = [name for table in logical.names(form, nnx.BatchStat).values() for name in table.flat]
    assert kept == ["stages.2.1.norm.mean", "stages.2.1.norm.variance"]
    assert len(logical.take(m, nnx.BatchStat)) == 2 * 27


@jax.jit
@recording()
def training(model, x, key):
    """The last map in training, the map of the stem before its norm, and the statistics after that."""
    last = model.trunk(x, key=key, train=True)[0].tokens
    model.neck(last.mean((1, 2), keepdims=True), train=True)
    return last, model.stem.conv(x), logical.to_logical(model, nnx.BatchStat)


def test_training_moves_all_statistics_and_drops_paths():
    """By a tenth, with the unbiased variance; the norm before the head sees one entry per image."""
    m, x = model(drop_path=0.6), images()
    (last, stem, after), (other, *_) = (jax.device_get(training(m, x, jax.random.key(i))) for i in range(2))
    before = logical.to_logical(m, nnx.BatchStat)
    assert before.keys() == after.keys()
    assert all(np.abs(before[name] - after[name]).max() > 1e-3 for name in before)
    neck = last.mean((1, 2)) @ np.asarray(m.neck.conv.kernel[...][0, 0])
    for name, rows in (("stem", stem.reshape(-1, 6)), ("neck", neck)):
        near(after[f"{name}.norm.mean"], 0.9 * before[f"{name}.norm.mean"] + 0.1 * rows.mean(0))
        near(after[f"{name}.norm.variance"], 0.9 * before[f"{name}.norm.variance"] + 0.1 * rows.var(0, ddof=1))
    assert np.abs(last - other).max() > 1e-2
    np.testing.assert_allclose(m.config.rates, np.arange(11) * 0.6 / 11, rtol=1e-6)
    assert model().config.rates is None


def test_a_branch_is_dropped_for_a_whole_image():
    block = jax.eval_shape(lambda: UniversalInvertedBottleneck(4, 4, hidden=4, start=3, rngs=nnx.Rngs(0)))
    block, x = draw(block), np.random.default_rng(2).normal(size=(16, 3, 2, 4)).astype(np.float32)
    whole, halved = jax.jit(lambda b, x: (b(x), b(x, rate=0.5, key=jax.random.key(3))))(block, x)
    changes = np.array([np.abs(halved - other).max((1, 2, 3)) for other in (x, 2 * whole - x)])
    assert changes.min(0).max() < 1e-5 and 0 < (changes[0] < 1e-5).sum() < 16


def test_statistics_of_groups_reach_every_norm():
    found = [part for _, part in nnx.iter_modules(abstract(statistics_groups=2)) if isinstance(part, BatchNorm)]
    assert len(found) == 27 and {norm.groups for norm in found} == {2}


def test_mixed_precision():
    """Maps, which are the stream of residuals, and statistics stay in float32."""
    cast = precision.cast(model(), "mixed")
    run = recording()(functools.partial(type(cast).features, blocks=tuple(range(11)), train=True))
    maps = [at.patches.values.dtype.name for at in jax.eval_shape(run, cast, images((32, 32))).blocks.values()]
    assert maps == ["float32"] * 11
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(cast, nnx.BatchStat))} == {"float32"}


@pytest.mark.parametrize(
    ("name", "number", "folded", "at_128", "at_224"),
    [
        ("conv_small", 3_774_024, 3_761_480, 62.4, 186.0),
        ("conv_medium", 9_715_512, 9_681_560, 271.9, 827.6),
        # Beside its convolutions, four norms of 256 channels before attention fold to 4 x 64 + 64 + 64 biases each.
        ("hybrid_medium", 11_074_648, 11_038_392 - 4 * (2 * 256 - 384), 311.8, 966.3),
    ],
)
def test_published_sizes(name, number, folded, at_128, at_224):
    """Parameters; M multiply-adds at two sizes, in timm; and names and shapes tell which model it is."""
    m = zoo.abstract(f"mobilenetv4_{name}")
    for form, expected in ((m, number), (jax.eval_shape(fold, m), folded)):
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(form, nnx.Param))) == expected
    for size, expected in ((128, at_128), (224, at_224)):
        counted = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
        assert not counted.notes and counted.macs == counted["linear"].macs + counted["attention"].macs
        assert counted.macs / 1e6 == pytest.approx(expected, abs=0.06)
    zeros = {
        t.name: np.broadcast_to(np.float32(0), t.shape)
        for table in logical.tensors(m, pretrained.STORED).values()
        for t in table.flat
    }
    weights = mapping.write(mobilenetv4.table(m.config, "timm"), zeros, name)
    found, flavour = mobilenetv4.infer(weights, Hints())
    assert flavour == "timm" and found.blocks == m.config.blocks
    assert dataclasses.replace(found, stages=m.config.stages) == m.config


def test_tables_are_read_as_they_are_written():
    stage = parsed("2x uib 3/0 s2 e6 160, conv 3 32,fused 5 e4 48")
    fused = Spec("fused", 48, kernel=5, expansion=4)
    assert stage == (*[Spec("uib", 160, start=3, stride=2, expansion=6)] * 2, Spec("conv", 32, kernel=3), fused)
    assert parsed("conv 11 8") == (Spec("conv", 8, kernel=11),)
    assert parsed("mqa 4x64 kv2 160") == (Spec("mqa", 160, heads=4, channels=64, kv_stride=2),)
    for stage in HYBRID_MEDIUM:
        assert parsed(", ".join(map(str, parsed(stage)))) == parsed(stage)


def test_layers_count_through_the_stages():
    layers = {t.name: t.layers for table in logical.tensors(abstract()).values() for t in table.flat}
    assert layers["stem.conv.kernel"] == (0,) and layers["stages.0.0.conv.norm.scale"] == (1,)
    assert layers["stages.2.1.attention.key_conv.conv.kernel"] == (6,) and layers["stages.4.0.conv.norm.bias"] == (11,)
    assert layers["neck.conv.kernel"] == layers["head.weight"] == (12,)


def test_saved_and_loaded(tmp_path):
    saved.save(tmp_path, model())
    again = saved.load(tmp_path)
    assert again.config == model().config
    chex.assert_trees_all_equal(again, model())


def test_as_a_backbone():
    """A pyramid has one map for each stride from 4 to 32; the 1x1 convolution after the last belongs to it."""
    config = SegmenterConfig(zoo.configuration("mobilenetv4_conv_small", num_classes=None), 5, width=8)
    assert config.backbone.depths == (2, 2, 6, 7) and config.backbone.widths == (32, 64, 96, 960)
    assert config.ends == (1, 3, 9, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stages=("conv 3 s2 8, uib 3 e4 8",)), "'uib 3 e4 8' is no block; write one as 'uib 3/5 s2 e4 80'"),
        (dict(stages=("conv 4 8",)), "'conv 4 8' is no block"),
        (dict(stages=("uib 0/0 s2 e4 8",)), "'uib 0/0 s2 e4 8' has no depthwise convolution for its stride"),
        (dict(stages=("mqa 4x64 8",)), "'mqa 4x64 8' must keep the 6 channels that it is given"),
        (dict(stages="conv 1 8"), "stages='conv 1 8' must be one or more strings"),
        (dict(drop_path=1), "drop_path=1 must be in"),
        (dict(registers=4), "'registers' is not one of its options"),
        (dict(stem_width=0), "stem_width=0 must be a positive whole number; the nearest is 1"),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.configuration("mobilenetv4_conv_small", **SMALL | options)


def test_bad_calls_are_refused():
    m = abstract(num_classes=None)
    with pytest.raises(ValueError, match="the model has no head"):
        m(images())
    with pytest.raises(IndexError, match="MobileNetV4: there is no block 11; the blocks are 0 to 10"):
        m.features(images(), blocks=(0, 11))
    with pytest.raises(ValueError, match=r"images \(4, 75, 42, 1\) must be \[\*B, H, W, 3\]"):
        m.pooled(images()[..., :1])
    with pytest.raises(ValueError, match="timm: a MobileNetV4 with the blocks of none that is known"):
        pretrained.load("timm", pretrained.state_dict("timm", model()))
