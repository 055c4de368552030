"""BiXT against its official code: all outputs of two models, both kinds of cross-attention, files there and back."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.layers.dense import LayerNorm, Mlp
from equivit.models.bixt.attention import CrossAttention, CrossBlock
from equivit.models.bixt.model import INIT
from equivit.pretrained import bixt, mapping
from tests.parity.arrays import Comparison, blocks, files, fill, images, load, state

# Of the largest entry.  Both sides compute in float32, in different orders; float64 is up to 1e-6 away.
TOLERANCE = 3e-6
HINTS = {
    "bixt_narrow": dict(num_heads=3),
    "bixt_rect_half_stride": dict(num_heads=4, image_size=(32, 48)),
}


@jax.jit
def outputs(model, x):
    """The model's outputs under the names of the file."""
    (_, patches), _ = model.embed(x)
    features = model.features(x, blocks=tuple(range(model.config.depth)))
    pooled = model.norm(features.registers.mean(-2))  # as `pooled` has it; calling the model would be another pass
    found = {"patch_tokens": patches, "pre_logits": pooled, "logits": model.head(pooled)}
    for i, block in features.blocks.items():
        found[f"stage{i}_latents"] = block.registers
        found[f"stage{i}_tokens"] = jax.lax.collapse(block.patches.values, 1, 3)
    return found


@pytest.mark.parametrize("path", files("efficient", "bixt*.npz"), ids=lambda path: path.stem)
def test_bixt(path, record_property):
    data = load(path)
    model = pretrained.load("bixt", state(data), **HINTS[path.stem])
    found = jax.device_get(outputs(model, images(data)))
    last = model.config.depth - 1
    np.testing.assert_array_equal(found.pop(f"stage{last}_tokens"), found[f"stage{last - 1}_tokens"])
    comparison = Comparison(data)
    for name, array in found.items():
        comparison.array(f"output/{name}", array, TOLERANCE)
    comparison.finish(record_property, "bixt")
    back = pretrained.state_dict("bixt", model)
    assert back.keys() == state(data).keys()
    for name, tensor in state(data).items():
        rounding = 1e-6 if name == bixt.CODE_NAME else 0  # computed again, theirs in float32
        np.testing.assert_allclose(back[name], tensor, rtol=0, atol=rounding, err_msg=name)


def cross_block(both: bool) -> CrossBlock:
    rngs, width = nnx.Rngs(0), 24
    norm, mlp = functools.partial(LayerNorm, width), functools.partial(Mlp, width, 4 * width, rngs=rngs)
    return CrossBlock(
        norm1_latents=norm(),
        norm1_tokens=norm(),
        attention=CrossAttention(width, 4, both=both, init=INIT, rngs=rngs),
        norm2_latents=norm(),
        mlp_latents=mlp(),
        norm2_tokens=norm() if both else None,
        mlp_tokens=mlp() if both else None,
    )


@jax.jit
def run(block, latents, tokens):
    return block(latents, tokens)


@pytest.mark.parametrize(("path", "name"), blocks("efficient", "bixt_cross", "bixt_cross_onesided"))
def test_cross_attention(path, name, record_property):
    data = {key: array for key, array in load(path).items() if key.split("/")[1].startswith((f"{name}.", f"{name}_"))}
    data = {key: array for key, array in data.items() if name != "bixt_cross" or "onesided" not in key}
    both = f"output/{name}_1" in data
    rows = {ours: f"{name}.{theirs}" for ours, theirs in (bixt.CROSS_BLOCK if both else bixt.LAST_BLOCK).items()}
    names = jax.eval_shape(lambda: logical.to_logical(cross_block(both)))
    block = fill(functools.partial(cross_block, both), data, mapping.pairs(names, rows))
    latents, tokens = run(block, data[f"input/{name}_0"], data[f"input/{name}_1"])
    comparison = Comparison(data)
    comparison.array(f"output/{name}_0", latents, TOLERANCE)
    if both:
        comparison.array(f"output/{name}_1", tokens, TOLERANCE)
    else:
        np.testing.assert_array_equal(tokens, data[f"input/{name}_1"])
    comparison.finish(record_property, "bixt")
