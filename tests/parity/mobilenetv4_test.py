"""MobileNetV4 against timm: every output of three narrow models, their files written back, and blocks one by one."""

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.layers.dense import LayerScale
from equivit.models.mobilenetv4 import model as mobilenetv4
from equivit.models.mobilenetv4.attention import MobileAttention
from equivit.models.mobilenetv4.model import MobileNetV4Config, parsed
from equivit.pretrained import mapping
from equivit.pretrained import mobilenetv4 as format
from tests.parity.arrays import Comparison, below, blocks, files, load, part, run, state

FILES = files("efficient", "mnv4_*.npz")
# Of the largest entry.  PyTorch's own outputs are up to 7e-6 away from those of float64, and logits, which are small
# sums of large terms, up to 1e-5 from ours.
MAPS, LOGITS = 1e-5, 2e-5
# The blocks of the file as a table has them, of 24 channels but for the fused one; False without layer scale.
SPECS = {
    "uib_extradw_s2": ("uib 3/5 s2 e4 32", False),
    "uib_extradw_s1_ls": ("uib 5/3 e2 24", True),
    "uib_ib": ("uib 0/5 e3 24", False),
    "uib_convnext": ("uib 3/0 e4 24", False),
    "uib_ffn": ("uib 0/0 e2 24", False),
    "edge_residual": ("fused 3 s2 e4 12", False),
    "mqa": ("mqa 2x8 24", True),
    "mqa_kv2": ("mqa 4x8 kv2 24", True),
}


def maps(array) -> np.ndarray:
    """Channels last to channels first."""
    return np.moveaxis(np.asarray(array), -1, 1)


@jax.jit
def outputs(model, x):
    """By the names of the file; as `pooled` and a call have them, in one pass."""
    ends = np.cumsum([len(stage) for stage in model.config.blocks]) - 1
    features = model.features(x, blocks=tuple(ends.tolist()))
    pooled = model.neck(features.patches.values.mean((1, 2), keepdims=True))[:, 0, 0]
    stages = {f"stage{i}": features.blocks[int(end)].patches.values for i, end in enumerate(ends)}
    return {"logits": model.head(pooled), "pre_logits": pooled, "stem": model.stem(x), **stages}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mobilenetv4(path, record_property):
    data = load(path)
    model, comparison = pretrained.load("timm", state(data)), Comparison(data)
    for name, array in outputs(model, np.moveaxis(data["input/image"], 1, -1)).items():
        comparison.array(f"output/{name}", maps(array), LOGITS if "logits" in name else MAPS)
    comparison.finish(record_property, "mobilenetv4")
    written = pretrained.state_dict("timm", model)
    assert written.keys() == state(data).keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, data[f"param/{name}"], err_msg=name)


def block(name, data):
    """A block with the parameters of the file, and its input."""
    (spec,), scaled = parsed(SPECS[name][0]), SPECS[name][1]
    x = np.moveaxis(data[f"input/{name}"], 1, -1)
    config = MobileNetV4Config(stages=(f"conv 1 {x.shape[-1]}", str(spec)), layer_scale=0.1 if scaled else None)
    abstract = jax.eval_shape(lambda: mobilenetv4.made(config, x.shape[-1], spec, nnx.Rngs(0)))
    table = below(format.table(config, "timm").pairs, "blocks.1.0.", "stages.1.0.")
    shapes = {t.name: t.shape for ts in logical.tensors(abstract, nnx.Variable).values() for t in ts.flat}
    tensors = mapping.read(mapping.Table(table), state(data), shapes, name)
    return logical.from_logical(abstract, tensors, nnx.Variable), x


@pytest.mark.parametrize(("path", "name"), blocks("efficient", *SPECS))
def test_blocks(path, name, record_property):
    """And attention after its norm is folded, which at a stride of keys it keeps."""
    data = part(load(path), name)
    layer, x = block(name, data)
    comparison = Comparison(data)
    comparison.array(f"output/{name}", maps(run(layer, x)), MAPS)
    if isinstance(layer, MobileAttention):
        assert isinstance(layer.scale, LayerScale) and (layer.folded().norm is None) == (name == "mqa")
        comparison.array(f"output/{name}", maps(run(layer.folded(), x)), MAPS)
    comparison.finish(record_property, "mobilenetv4")


class OneSided(nnx.Module):
    """A convolution whose padding "SAME" puts more zeros after an even map than before it, as TensorFlow's does."""

    def __init__(self, conv):
        self.kernel, self.stride, self.groups = conv.kernel, conv.stride, conv.groups

    def __call__(self, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        options = dict(dimension_numbers=numbers, feature_group_count=self.groups)
        return jax.lax.conv_general_dilated(x, self.kernel[...], self.stride, "SAME", **options)


@pytest.mark.parametrize(("path", "name"), blocks("efficient", "uib_extradw_s2"))
def test_another_padding_is_seen(path, name):
    """On the map of 7x6 entries the columns come out otherwise."""
    data = part(load(path), name)
    layer, x = block(name, data)
    layer.mid.conv = OneSided(layer.mid.conv)
    theirs = data[f"output/{name}"]
    assert np.abs(maps(run(layer, x)) - theirs).max() > 1e-2 * np.abs(theirs).max()
