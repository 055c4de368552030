"""Swin transformers of both versions against timm: logits, the map after each stage, and gradients; one test a file."""

import jax
import numpy as np
import pytest

from equivit import logical, pretrained
from tests.parity.arrays import Comparison, files, images, load, state

FILES = files("adaptive", "swin*.npz")
# Of the largest entry, which is at least 1 for logits and 5 for maps: below 2e-5 and 5e-4 as such.  The stored arrays
# are in float32; in float64 timm's own are up to 4e-6 and 1.7e-4 away, in version 2, whose random cosine logits reach
# 100 and whose norms divide branches of few channels.
LOGITS, MAPS = 8e-6, 5e-5
GRADIENTS = 2e-4  # norms, of themselves
# In this sum over all logits nearly everything cancels: the stored float32 norm, 0.017495, is 1.7e-3 away from the
# norm in float64, 0.017525, and ours 1.9e-3.
INEXACT = {("swinv2_geom256", "layers.1.blocks.1.attn.logit_scale"): 2e-3}


def hints(path) -> dict:
    """The hints that the file lacks."""
    if "rect" not in path.stem:
        return {}
    return dict(image_size=(64, 128)) | (dict(window_size=4) if "v2" in path.stem else {})


@jax.jit
def everything(model, x, cotangent):
    """Logits, maps, and the model with the gradient of sum(logits * cotangent) in place of each parameter."""

    def loss(arrays, x):
        m = logical.put(model, arrays)
        features = m.features(x, blocks=tuple(range(m.config.depth)), norm=False)
        normed = m.norm(features.patches.values)
        logits = m.head(normed.mean((1, 2)))  # as `pooled` has it; a pass of its own would take as long to compile
        maps = {"norm": normed, "patch_embed": m.patch_norm(m.patch_embed(x))}
        return (logits * cotangent).sum(), (logits, maps, [features.blocks[i] for i in range(m.config.depth)])

    (by_parameter, by_image), seen = jax.grad(loss, (0, 1), has_aux=True)(logical.take(model), x)
    return *seen, logical.put(model, by_parameter), by_image


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_swin(path, record_property):
    data = load(path)
    model = pretrained.load("timm", state(data), **hints(path))
    logits, found, blocks, slopes, by_image = everything(model, images(data), data["input/cotangent"])
    first = np.cumsum((0, *model.config.depths))
    for stage in range(len(model.config.depths)):
        found[f"stage{stage}_block0"] = blocks[first[stage]].patches.values
        found[f"stage{stage}"] = blocks[first[stage + 1] - 1].patches.values
    comparison = Comparison(data)
    comparison.array("output/logits", logits, LOGITS)
    for name, array in found.items():
        if f"output/{name}" in data:
            comparison.array(f"output/{name}", np.reshape(array, data[f"output/{name}"].shape), MAPS)
    by_image = np.transpose(by_image, (0, 3, 1, 2))
    if "grad/image" in data:
        comparison.array("grad/image", by_image, GRADIENTS)
    slopes = pretrained.state_dict("timm", slopes) | {"image": by_image}
    norms = {key.removeprefix("gradnorm/"): float(value) for key, value in data.items() if key.startswith("gradnorm/")}
    assert norms.keys() == slopes.keys()
    for name, norm in norms.items():
        allowed = INEXACT.get((path.stem, name), GRADIENTS)
        assert abs(np.linalg.norm(slopes[name]) - norm) < allowed * norm, name
    comparison.finish(record_property, "swin")
