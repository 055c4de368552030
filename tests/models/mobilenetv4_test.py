"""MobileNetV4: tables of blocks, statistics of its neck, folding, and what its files and pyramids say."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.models.inference import fold
from equivit.models.mobilenetv4.inverted_bottleneck import UniversalInvertedBottleneck
from equivit.models.mobilenetv4.model import HYBRID_MEDIUM, Spec, parsed
from equivit.models.segmenter.model import SegmenterConfig
from equivit.models.staged import Map
from equivit.pretrained import mapping, mobilenetv4
from tests.drawing import normal
from tests.models.backbones import MOBILENETV4, model, near, randomised, tensors

NAME = "mobilenetv4_hybrid_medium"


def test_norms_before_convolved_keys_stay():
    """Zeros are padded after such a norm, so folding leaves it; all others fold."""
    form = jax.eval_shape(fold, zoo.abstract(NAME, **MOBILENETV4))
    kept = [name for table in logical.names(form, nnx.BatchStat).values() for name in table.flat]
    assert kept == ["stages.2.1.norm.mean", "stages.2.1.norm.variance"]


def test_the_norm_of_the_neck_sees_one_entry_per_image():
    m, x = model(NAME), normal(4, 3, 2, 24)

    @jax.jit
    @recording()
    def after(m, x):
        m.pool(Map.of_images(x), train=True)
        return logical.to_logical(m.neck, nnx.BatchStat)

    before, after = (jax.device_get(logical.to_logical(m.neck, nnx.BatchStat)), after(m, x))
    rows = np.mean(x, (1, 2)) @ np.asarray(m.neck.conv.kernel[...][0, 0])
    near(after["norm.mean"], 0.9 * before["norm.mean"] + 0.1 * rows.mean(0))
    near(after["norm.variance"], 0.9 * before["norm.variance"] + 0.1 * rows.var(0, ddof=1))


def test_a_branch_is_dropped_for_a_whole_image():
    block = jax.eval_shape(lambda: UniversalInvertedBottleneck(4, 4, hidden=4, start=3, rngs=nnx.Rngs(0)))
    block, x = randomised(block), np.random.default_rng(2).normal(size=(16, 3, 2, 4)).astype(np.float32)
    whole, halved = jax.jit(lambda b, x: (b(x), b(x, rate=0.5, key=jax.random.key(3))))(block, x)
    changes = np.array([np.abs(halved - other).max((1, 2, 3)) for other in (x, 2 * whole - x)])
    assert changes.min(0).max() < 1e-5 and 0 < (changes[0] < 1e-5).sum() < 16


@pytest.mark.parametrize("name", ["conv_small", "conv_medium", "hybrid_medium"])
def test_names_and_shapes_of_a_file_tell_which_model_it_is(name):
    m = zoo.abstract(f"mobilenetv4_{name}")
    zeros = {t.name: np.broadcast_to(np.float32(0), t.shape) for t in tensors(m, pretrained.STORED)}
    weights = mapping.write(mobilenetv4.table(m.config, "timm"), zeros, name)
    found, flavour = mobilenetv4.FORMAT.infer(weights)
    assert flavour == "timm" and found.blocks == m.config.blocks
    assert dataclasses.replace(found, stages=m.config.stages) == m.config


def test_files_of_other_tables_are_refused():
    with pytest.raises(ValueError, match="timm: a MobileNetV4 with the blocks of none that is known"):
        pretrained.load("timm", pretrained.state_dict("timm", model(NAME)))


def test_tables_are_read_as_they_are_written():
    stage = parsed("2x uib 3/0 s2 e6 160, conv 3 32,fused 5 e4 48")
    fused = Spec("fused", 48, kernel=5, expansion=4)
    assert stage == (*[Spec("uib", 160, start=3, stride=2, expansion=6)] * 2, Spec("conv", 32, kernel=3), fused)
    assert parsed("conv 11 8") == (Spec("conv", 8, kernel=11),)
    assert parsed("mqa 4x64 kv2 160") == (Spec("mqa", 160, heads=4, channels=64, kv_stride=2),)
    for stage in HYBRID_MEDIUM:
        assert parsed(", ".join(map(str, parsed(stage)))) == parsed(stage)


def test_as_a_backbone():
    """A pyramid has one map for each stride from 4 to 32; the 1x1 convolution after the last belongs to it."""
    config = SegmenterConfig(zoo.configuration("mobilenetv4_conv_small", num_classes=None), 5, width=8)
    assert config.backbone.depths == (2, 2, 6, 7) and config.backbone.widths == (32, 64, 96, 960)
    assert config.ends == (1, 3, 9, 16)
