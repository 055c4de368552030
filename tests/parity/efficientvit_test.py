"""EfficientViT of MIT against timm: logits and the map of each stage, and its blocks by themselves."""

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import pretrained
from equivit.models.efficientvit.attention import LinearAttention
from equivit.models.efficientvit.model import STAGES
from equivit.models.efficientvit.separable_conv import InvertedBottleneck
from equivit.pretrained import efficientvit, mapping
from tests.parity.arrays import Comparison, below, blocks, files, fill, images, load, part, run, state

FILES = files("efficient", "efficientvit*.npz")
TOLERANCE = 1e-5  # of the largest entry: roundings of float32; torch's own differ from float64 by up to 7e-6


@jax.jit
def outputs(model, x):
    """The model's outputs under the names of the file."""
    ends = np.cumsum([model.config.blocks(stage) for stage in range(STAGES)]) - 1
    features = model.features(x, blocks=tuple(ends.tolist()))
    maps = {f"stage{i}": features.blocks[end].patches.values for i, end in enumerate(ends)}
    pooled, maps["stem"] = model.neck(features.patches.values), model.stem(x)
    maps = {name: values.transpose(0, 3, 1, 2) for name, values in maps.items()}
    return maps | {"pre_logits": pooled, "logits": model.head(pooled)}  # calling the model would be another pass


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_efficientvit(path, record_property):
    data = load(path)
    model, comparison = pretrained.load("timm", state(data)), Comparison(data)
    for name, array in outputs(model, images(data)).items():
        comparison.array(f"output/{name}", array, TOLERANCE)
    comparison.finish(record_property, "efficient")
    back = pretrained.state_dict("timm", model)
    assert back.keys() == state(data).keys()
    for name, array in state(data).items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


# The parts of a whole file's table, whose names are the same below a block.
TABLE = efficientvit.table(efficientvit.EfficientViTConfig((8, 8, 8, 16, 16), (1, 1, 1, 1, 1), (8, 8)), "timm").pairs
SCALES = {"lite_mla": (5,), "lite_mla_two_scales": (3, 5)}


@pytest.mark.parametrize(("path", "name"), blocks("efficient", *SCALES))
def test_linear_attention(path, name, record_property):
    data, scales = part(load(path), name), SCALES[name]
    pairs = below(TABLE, "stages.2.blocks.1.context_module.main.", "stages.2.1.attention.")
    for i in range(1, len(scales)):
        for j, kind in enumerate(("depthwise", "pointwise")):
            pairs += mapping.pairs([f"{kind}.{i}.kernel"], {f"{kind}.{i}": f"aggreg.{i}.{j}"})
    options = dict(head_channels=8, scales=scales)
    module = fill(lambda: LinearAttention(24, **options, rngs=nnx.Rngs(0)), data, pairs, pretrained.STORED)
    x, comparison = images(data, f"input/{name}"), Comparison(data)
    comparison.array(f"output/{name}", nchw(run(module, x)), TOLERANCE)
    # The order of a ViT: (q | k | v) x heads x channels.
    kernel = module.qkv.kernel[...]
    module.qkv.kernel.set_value(kernel.reshape(*kernel.shape[:3], 3, 3, 8).swapaxes(3, 4).reshape(kernel.shape))
    with pytest.raises(AssertionError, match="deviates"):
        comparison.array(f"output/{name}", nchw(run(module, x)), 1e-2)
    comparison.finish(record_property, "efficient")


@pytest.mark.parametrize(("path", "name"), blocks("efficient", "evit_mbconv"))
def test_inverted_bottleneck(path, name, record_property):
    data = part(load(path), name)
    pairs = below(TABLE, "stages.2.blocks.1.local_module.main.", "stages.2.1.local.")
    options = dict(stride=2, norm=False)
    module = fill(lambda: InvertedBottleneck(24, 24, **options, rngs=nnx.Rngs(0)), data, pairs, pretrained.STORED)
    x, comparison = images(data, f"input/{name}"), Comparison(data)
    comparison.array(f"output/{name}", nchw(run(module, x)), TOLERANCE)
    # The even side padded at its end alone, as "SAME" does: that is this module seen from the other side.
    module.depthwise.conv.kernel.set_value(module.depthwise.conv.kernel[...][:, ::-1])
    with pytest.raises(AssertionError, match="deviates"):
        comparison.array(f"output/{name}", nchw(run(module, x[:, :, ::-1])[:, :, ::-1]), 1e-2)
    comparison.finish(record_property, "efficient")


def nchw(y):
    return np.moveaxis(np.asarray(y), -1, 1)
