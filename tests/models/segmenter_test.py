"""Segmentation models: parameters, every decoder under shifts and turns, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, testing
from equivit.layers import resizing
from equivit.layers.batch_stats import recording
from equivit.models import saved, zoo
from equivit.models.segmenter import decoders as segmentation_decoders
from equivit.models.segmenter.model import SegmenterConfig
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

SIZE, CLASSES = (32, 16), 5
SHIFTS = [(1, 0), (0, 1), (3, 5), (7, 2), (13, 9)]
WINDOWS = dict(width=8, depths=(1, 1), num_heads=(1, 2), window_size=(2, 2), patch_size=2)
BACKBONES = {
    "swin_t": WINDOWS,
    "swinv2_t": WINDOWS,
    "cvt_13": dict(widths=(8, 16), depths=(1, 1), num_heads=(1, 2), kernels=(3, 3), strides=(2, 2), paddings=(1, 1)),
    "mvitv2_t": dict(width=8, depths=(1, 1)),
    "vit_ti16": dict(width=16, depth=1, num_heads=2, patch_size=8),
    "octic_vit_ti16": dict(width=32, depth=1, num_heads=2, patch_size=4, family="D8"),
    "flip_vit_ti16": dict(width=32, depth=1, num_heads=2, patch_size=4, family="D2"),
}
run = jax.jit(lambda m, x: m(x))


def configured(name, *, size=SIZE, backbone=None, **options):
    backbone = zoo.configuration(name, image_size=size, num_classes=None, **{**BACKBONES[name], **(backbone or {})})
    return SegmenterConfig(backbone, CLASSES, **{"width": 8, **options})


def model(config, dtype=np.float32):
    """All parameters and statistics random; variances are positive."""
    rng = np.random.default_rng(0)

    def draw(tensor):
        values = rng.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            return values * np.prod(tensor.shape[:-1]) ** -0.5
        return np.exp(0.2 * values) if tensor.name.endswith(("scale", "variance")) else 0.5 * values

    abstract = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    tables = logical.tensors(abstract, nnx.Variable).values()
    tensors = {tensor.name: draw(tensor).astype(dtype) for table in tables for tensor in table.flat}
    made = logical.from_logical(abstract, tensors, nnx.Variable)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), made)


def images(size=SIZE, dtype=np.float64):
    return np.random.default_rng(1).normal(size=(2, *size, 3)).astype(dtype)


def test_the_standard_upernet_has_the_official_number_of_parameters():
    def parameters(**options):
        config = SegmenterConfig(zoo.configuration("swin_t", num_classes=None), 150, **options)
        module = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))

    assert parameters() == 59_941_862
    assert parameters(auxiliary=False) == 59_941_862 - 923_798


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_t", dict(upsampling="interpolate")),
        ("swinv2_t", dict(upsampling="unpool")),
        ("cvt_13", dict(upsampling="interpolate")),
        ("mvitv2_t", dict(upsampling="unpool")),
        ("vit_ti16", dict(decoder="convolutions")),
    ],
)
def test_logits_move_with_the_image(name, options):
    """In float64, without an anchor: the decoder itself follows what the backbone chose."""
    with jax.enable_x64(True):
        # Of one channel: the patches of the ViT are a sum of 64 products for each.
        backbone = dict(adaptive=True, anchor=False, in_channels=1)
        config = configured(name, backbone=backbone, equivariant=True, **options)
        m, x = model(config, np.float64), images()[..., :1]
        y = np.asarray(run(m, x))
        assert y.shape == (2, *SIZE, CLASSES) and np.ptp(y, axis=(1, 2)).min() > 1e-3 * np.abs(y).max()
        assert testing.assert_shift_equivariant(lambda x: run(m, x), x, shifts=SHIFTS, output="image") < 1e-10


WIDE = dict(expand_attn=False, depths=(2, 1))  # its stages widen in their last MLP, as in MViTv2-L


@pytest.mark.parametrize(("name", "backbone"), [*((name, {}) for name in BACKBONES), ("mvitv2_t", WIDE)])
def test_a_configuration_knows_the_widths_of_its_maps(name, backbone):
    config = configured(name, backbone=backbone, decoder="linear")
    maps = jax.eval_shape(
        lambda: config.build(nnx.Rngs(0)).features(images(dtype=np.float32), blocks=config.ends[:-1]).grids
    )
    assert tuple(grid.values.shape[-1] for grid in maps) == config.backbone.map_widths


def test_upernet_reads_an_mvit_that_widens_in_its_mlps():
    logits, second = jax.eval_shape(
        lambda: configured("mvitv2_t", backbone=WIDE).build(nnx.Rngs(0)).both(images(dtype=np.float32))
    )
    assert logits.shape == second.shape == (2, *SIZE, CLASSES)
    assert zoo.configuration("mvitv2_l").map_widths == (288, 576, 1152, 1152)


def test_a_decoder_that_forgets_where_maps_lie_is_caught():
    m = model(configured("swin_t", backbone=dict(adaptive=True, anchor=False), equivariant=True))
    grids = jax.jit(lambda m, x: m.backbone.features(x, blocks=(0,)))
    resized = functools.partial(segmentation_decoders.resized, upsampling="interpolate")
    join = jax.jit(lambda coarse, fine: dataclasses.replace(fine, values=resized(coarse, fine)))

    def joined(x, forgetful):
        found = grids(m, x)
        fine, coarse = found.blocks[0].patches, found.patches
        return join(dataclasses.replace(coarse, offset=fine.offset) if forgetful else coarse, fine)

    x = images(dtype=np.float32)
    testing.assert_shift_equivariant(lambda x: joined(x, False), x, shifts=SHIFTS, output="grid")
    with pytest.raises(AssertionError, match="shift"):
        testing.assert_shift_equivariant(lambda x: joined(x, True), x, shifts=SHIFTS, output="grid")


def test_labels_of_every_pixel_are_equal_in_float32():
    """With the anchor a shifted image gives the same bits, elsewhere; with two batch axes."""
    m = model(configured("swin_t", backbone=dict(adaptive=True), equivariant=True))
    x = images(dtype=np.float32)
    labels = jax.jit(lambda m, x: (m.label_maps(x), m.label_maps(x[:, None])))  # in one program, what is equal is once
    upright, more = map(np.asarray, labels(m, x))
    assert upright.dtype == np.int32 and len(np.unique(upright)) > 1
    for shift in SHIFTS:
        np.testing.assert_array_equal(labels(m, np.roll(x, shift, (1, 2)))[0], np.roll(upright, shift, (1, 2)))
    np.testing.assert_array_equal(more[:, 0], upright)


def test_logits_may_stay_on_the_grid_of_the_decoder():
    """Resized they are the logits of pixels; those of the auxiliary head come to the same grid."""
    m, x = model(configured("swin_t")), images(dtype=np.float32)[:, None]  # two batch axes

    @jax.jit
    def both(m, x):
        own = nnx.clone(m)
        own.config = dataclasses.replace(m.config, own_size=True)
        return own.both(x), m.both(x)

    (small, second), (large, _) = both(m, x)
    assert small.shape == second.shape == (2, 1, 16, 8, CLASSES)
    np.testing.assert_allclose(jax.jit(resizing.bilinear, static_argnums=1)(small, SIZE), large, atol=1e-5)


@pytest.mark.parametrize(("size", "own"), [((336, 336), (192, 192)), ((336, 448), (192, 256))])
def test_the_decoder_of_depthwise_attention(size, own):
    """Section A.2.1: its sizes; by Table A.1 it has 284.4 M parameters less a backbone of 279.3 M, about 5.1 M."""
    backbone = zoo.configuration("dinov2_vit_l14", image_size=size, num_classes=None)
    config = SegmenterConfig(backbone, 81, decoder="convolutions", width=256, own_size=True)
    whole = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, *size, 3), np.float32)
    assert jax.eval_shape(lambda m, x: m(x), whole, x).shape == (1, *own, 81)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(whole.decoder, nnx.Param)))
    assert abs(count / 1e6 - 5.1) < 0.2  # the paper has no widths


@pytest.mark.parametrize("decoder", ["linear", "convolutions"])
def test_a_decoder_reads_the_mean_of_maps_after_the_final_norm(decoder):
    """Without blocks it reads the last map alone, by the same parameters."""
    several = configured("vit_ti16", backbone=dict(depth=4), decoder=decoder, blocks=(0, 2))
    m, x = model(several), images(dtype=np.float32)

    @jax.jit
    def expected(m, x):
        raw = m.backbone.features(x, blocks=(0, 2), norm=False)
        normed = [m.backbone.readout.norm(grid.values) for grid in raw.grids]
        mean = dataclasses.replace(raw.patches, values=sum(normed) / 3)
        return resizing.bilinear(m.decoder([mean]).values, SIZE)

    wanted = expected(m, x)
    np.testing.assert_allclose(run(m, x), wanted, atol=1e-5 * np.abs(wanted).max())
    m.config = dataclasses.replace(several, blocks=())
    assert np.abs(run(m, x) - wanted).max() > 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize("decoder", ["linear", "octic"])
def test_a_fully_octic_model_turns_with_the_image(decoder):
    """All eight elements, and as it is adaptive, shifts too."""
    size = (24, 24)
    with jax.enable_x64(True):
        config = configured(
            "octic_vit_ti16", size=size, backbone=dict(adaptive=True), decoder=decoder, equivariant=True
        )
        m, x = model(config, np.float64), images(size)
        upright = np.asarray(run(m, x))
        for element in OCTIC.elements:
            turned = run(m, fields.act_on_image(element, x))
            expected = fields.act_on_image(element, upright)
            np.testing.assert_allclose(turned, expected, rtol=0, atol=1e-10 * np.abs(upright).max())
        testing.assert_shift_equivariant(lambda x: run(m, x), x, shifts=SHIFTS, output="image")


def test_a_flip_model_mirrors_with_the_image():
    with jax.enable_x64(True):
        m, x = model(configured("flip_vit_ti16", decoder="octic"), np.float64), images()
        upright = np.asarray(run(m, x))
        np.testing.assert_allclose(run(m, x[:, :, ::-1]), upright[:, :, ::-1], atol=1e-10 * np.abs(upright).max())


def test_saved_and_loaded(tmp_path):
    m = model(configured("swin_t"))
    saved.save(tmp_path, m)
    again = saved.load(tmp_path)
    assert again.config == m.config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(m))


def test_training_gives_two_kinds_of_logits_and_statistics():
    m, x = model(configured("swin_t")), images(dtype=np.float32)

    @jax.jit
    @recording()
    def step(m, x, key):
        return m.both(x, key=key, train=True), nnx.state(m, nnx.BatchStat)

    (main, auxiliary), statistics = step(m, x, jax.random.key(0))
    assert main.shape == auxiliary.shape == (2, *SIZE, CLASSES) and main.dtype == jnp.float32
    before = jax.tree.leaves(nnx.state(m, nnx.BatchStat))
    assert all(not np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(statistics), strict=True))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_ti16", {}, "decoder='upernet' joins the maps of stages, and a ViT has one map; take 'linear' or"),
        ("vit_ti16", dict(decoder="octic"), "decoder='octic' takes fields, and the last blocks of this ViT have none"),
        ("swin_t", dict(equivariant=True), r"needs an adaptive backbone, and this Swin has parts=\(\); create it with"),
        ("swin_t", dict(backbone=dict(adaptive=True)), "equivariant=False would leave the label maps displaced; set"),
        ("swin_t", dict(backbone=dict(adaptive=("token",))), "equivariant=False would leave the label maps displaced"),
        ("vit_ti16", dict(decoder="convolutions", width=6), "must be a multiple of 4; the nearest are 4 and 8"),
        (
            "swin_t",
            dict(backbone=dict(adaptive=True), equivariant=True, own_size=True),
            "own_size=True leaves the logits on a grid .* set own_size=False with equivariant=True",
        ),
        ("swin_t", dict(blocks=(0,), decoder="linear"), r"blocks=\(0,\) are maps of a ViT"),
        ("vit_ti16", dict(blocks=(0,), decoder="linear"), r"blocks=\(0,\) must ascend and lie below 0, the last block"),
        ("vit_ti16", dict(blocks=(1, 0), decoder="linear", backbone=dict(depth=4)), r"blocks=\(1, 0\) must ascend"),
        ("swin_t", dict(decoder="unet"), "decoder='unet' is not one of upernet, linear, convolutions, octic"),
    ],
)
def test_what_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        configured(name, **options)


def test_a_backbone_with_a_head_is_refused():
    with pytest.raises(ValueError, match="the backbone has a projection to 512 entries, which nothing would train"):
        SegmenterConfig(zoo.configuration("clip_vit_b16"), CLASSES)
    with pytest.raises(ValueError, match="the backbone has a head for 1000 classes, which nothing would train"):
        SegmenterConfig(zoo.configuration("swin_t"), CLASSES)
