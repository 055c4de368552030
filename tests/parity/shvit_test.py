"""SHViT against timm: logits and the map of each stage, blocks by themselves, and the model with folded batch norms."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.models.inference import fold
from equivit.models.shvit.attention import GroupNorm, SingleHeadAttention
from equivit.models.shvit.merging import ConvMerging
from equivit.pretrained import mapping, shvit
from tests.parity.arrays import Comparison, below, blocks, files, fill, images, load, part, run, state

FUSED = "shvit_narrow_fused"
FILES = {path.stem: path for path in files("efficient", "shvit*.npz")}
# Of the largest entry: the roundings of float32, which torch's own differ from float64 by 7e-6 with; folded, by 2e-5.
TOLERANCE, FOLDED = 1e-5, 2e-5


@jax.jit
def outputs(model, x):
    """The model's outputs under the names of the file."""
    ends = [stop - 1 for stop in np.cumsum(model.config.depths).tolist()]
    features = model.features(x, blocks=tuple(ends))
    maps = {f"stage{i}": features.blocks[end].patches.values for i, end in enumerate(ends)}
    pooled = features.patches.values.mean((1, 2))
    for unit in model.patch_embed:
        x = unit(x)
    maps = {name: values.transpose(0, 3, 1, 2) for name, values in ({"stem": x} | maps).items()}
    return maps | {"pre_logits": pooled, "logits": model.head(pooled)}  # calling the model would be another pass


@functools.cache
def model(stem):
    return pretrained.load("timm", state(load(FILES[stem])))


@pytest.mark.parametrize("stem", [stem for stem in FILES if stem != FUSED])
def test_shvit(stem, record_property):
    data = load(FILES[stem])
    comparison = Comparison(data)
    for name, array in outputs(model(stem), images(data)).items():
        comparison.array(f"output/{name}", array, TOLERANCE)
    comparison.finish(record_property, "efficient")
    back = pretrained.state_dict("timm", model(stem))
    assert back.keys() == state(data).keys()
    for name, array in state(data).items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)


@pytest.mark.parametrize("stem", [stem for stem in FILES if stem == FUSED])
def test_folded_as_timm_folds_it(stem, record_property):
    """Logits, and each tensor: kernels of residual convolutions with x in their centre, the head with its norm."""
    data, narrow = load(FILES[stem]), load(FILES["shvit_narrow"])
    m = jax.jit(fold)(model("shvit_narrow"))
    comparison = Comparison(data)
    comparison.array("output/logits", outputs(m, images(narrow))["logits"], FOLDED)
    comparison.finish(record_property, "efficient")
    theirs = state(data)
    ours = mapping.write(folded_table(m.config), logical.to_logical(m), "folded")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6 * np.abs(array).max(), err_msg=name)


def folded_table(config):
    """The names of timm's folded model: of a convolution its own without `.c`, or `.m.c` where there was a residual."""
    pairs = []
    for pair in shvit.table(config, "timm").pairs:
        (theirs,), (ours,) = pair.theirs, pair.ours
        if theirs.endswith(".c.weight"):
            theirs, ours = theirs.removesuffix(".c.weight"), ours.removesuffix(".kernel")
            if ours.endswith((".conv.conv.conv", "conv1.conv.conv", "conv2.conv.conv")):
                theirs = theirs.removesuffix(".m")
            pairs += mapping.pairs([f"{ours}.kernel", f"{ours}.bias"], {ours: theirs})
        elif theirs.startswith("head.l."):
            pairs.append(dataclasses.replace(pair, theirs=(f"head.{theirs[7:]}",), ours=(f"head.{ours[12:]}",)))
        elif ".bn." not in theirs:
            pairs.append(pair)
    return mapping.Table(pairs)


# The parts of a whole file's table, whose names are the same below a block.
TABLE = shvit.table(shvit.SHViTConfig((8, 8), (1, 1), (0, 4)), "timm").pairs
MODULES = {
    "shsa": (SingleHeadAttention, (24, 5), "stages.1.blocks.0.mixer.m.", "stages.1.blocks.0.attention."),
    "patch_merging": (ConvMerging, (12, 18), "stages.1.downsample.2.", "stages.1.downsampling.merge."),
}


@pytest.mark.parametrize(("path", "name"), blocks("efficient", *MODULES))
def test_blocks(path, name, record_property):
    data = part(load(path), name)
    comparison = Comparison(data)
    module, x = block(name, data), images(data, f"input/{name}")
    comparison.array(f"output/{name}", nchw(run(module, x)), TOLERANCE)
    for what, y in wrong(name, module, x).items():
        with pytest.raises(AssertionError, match="deviates"):
            comparison.array(f"output/{name}", nchw(y), 1e-2)
            pytest.fail(f"{what} makes no difference")
    comparison.finish(record_property, "efficient")


def block(name, data):
    kind, widths, theirs, ours = MODULES[name]
    pairs = below(TABLE, theirs, ours)
    return fill(lambda: kind(*widths, rngs=nnx.Rngs(0)), data, pairs, pretrained.STORED)


def wrong(name, module, x):
    """Mistakes that a port could make, as the right module sees them."""
    if name == "patch_merging":  # an even map padded at its end alone, as "SAME" does: seen from the other side
        kernel = module.depthwise.conv.kernel
        module.depthwise.conv.kernel = type(kernel)(kernel[...][:, ::-1])
        return {"padding at the end": run(module, x[:, :, ::-1])[:, :, ::-1]}
    attention = nnx.clone(module)
    attention.norm.scale.set_value(attention.norm.scale[...] * 0)
    positions = nnx.clone(module)
    positions.qkv.conv.kernel.set_value(positions.qkv.conv.kernel[...][..., ::-1])
    return {"no normalised channels": run(attention, x), "values first": run(positions, x)}


def nchw(y):
    return np.moveaxis(np.asarray(y), -1, 1)


def test_the_norm_of_maps_is_no_layer_norm():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32) + np.arange(4, dtype=np.float32)
    module = GroupNorm(4)
    module.scale.set_value(np.arange(1, 5, dtype=np.float32))
    rows = x.reshape(2, -1).astype(np.float64)
    expected = (x - rows.mean(1)[:, None, None, None]) / np.sqrt(rows.var(1) + 1e-5)[:, None, None, None]
    np.testing.assert_allclose(run(module, x), expected * np.arange(1, 5), rtol=0, atol=1e-5)
