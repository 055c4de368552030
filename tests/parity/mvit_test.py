"""MViTv2 against timm: logits, tokens after each stage and its first attention, and gradients; one test a file."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import logical, pretrained
from equivit.layers.grid import Layout
from tests.parity.arrays import Comparison, files, images, load, state

FILES = files("adaptive", "mvitv2*.npz")
# Of the largest entry, which is at least 1.2 for logits and 5 for tokens.  The stored arrays are in float32; in float64
# timm's own are up to 1.2e-6 and 1.1e-5 away.
LOGITS, TOKENS = 8e-6, 1e-5
GRADIENTS = 1e-5  # norms, of themselves
ZERO = 1e-5  # norms of what no logit depends on; the next ones are above 1e-2


def weights(data) -> dict[str, np.ndarray]:
    """The official state dict.  The short file has the first two stages alone, to which a norm belongs here."""
    found = state(data)
    width = len(found["stages.1.blocks.0.norm2.bias"])
    return {"norm.weight": np.ones(width, "f"), "norm.bias": np.zeros(width, "f")} | found


def tokens(features):
    """With the class token first, as timm has them."""
    maps = features.patches.values
    parts = [] if features.cls is None else [features.cls[:, None]]
    return jnp.concatenate([*parts, maps.reshape(len(maps), -1, maps.shape[-1])], axis=1)


@jax.jit
def forward(model, x):
    """The pooled tokens, and the tokens at the places of the files."""
    config, found = model.config, {}
    last = np.cumsum(config.depths) - 1
    features = model.features(x, blocks=tuple(last.tolist()), norm=False)
    at = model.embed(x)
    before, grid = at.tokens, at.layout.grid
    found["patch_embed"] = before[:, config.prefix :]
    for number, stage in enumerate(model.stages):
        block = stage.blocks[0]
        found[f"stage{number}_block0_attn"] = block.attention(block.norm1(before), Layout(grid, config.prefix))
        after = features.blocks[int(last[number])]
        found[f"stage{number}"], grid = tokens(after), after.patches.values.shape[1:3]
        before = found[f"stage{number}"]
    found["norm"] = model.norm(tokens(features))
    # As `pooled` has it; a pass of its own would take as long to compile.
    return found["norm"][:, 0] if config.class_token else found["norm"].mean(1), found


@jax.jit
def everything(model, x, cotangent):
    """Logits, tokens, and the model with the gradient of sum(logits * cotangent) in place of each parameter."""

    def loss(arrays, x):
        m = logical.put(model, arrays)
        pooled, found = forward(m, x)
        logits = m.head(pooled)
        return (logits * cotangent).sum(), (logits, found)

    (by_parameter, by_image), seen = jax.grad(loss, (0, 1), has_aux=True)(logical.take(model), x)
    return *seen, logical.put(model, by_parameter), by_image


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mvit(path, record_property):
    data = load(path)
    model, comparison = pretrained.load("timm", weights(data)), Comparison(data)
    if "output/logits" in data:
        logits, found, slopes, by_image = everything(model, images(data), data["input/cotangent"])
        comparison.array("output/logits", logits, LOGITS)
        compare_gradients(comparison, slopes, np.transpose(by_image, (0, 3, 1, 2)))
    else:
        _, found = forward(model, images(data))
    for name, array in found.items():
        if f"output/{name}" in data:
            comparison.array(f"output/{name}", array, TOKENS)
    comparison.finish(record_property, "mvit")


def compare_gradients(comparison, slopes, by_image):
    data = comparison.data
    if "grad/image" in data:
        comparison.array("grad/image", by_image, GRADIENTS)
    slopes = pretrained.state_dict("timm", slopes) | {"image": by_image}
    norms = {key.removeprefix("gradnorm/"): float(value) for key, value in data.items() if key.startswith("gradnorm/")}
    assert norms.keys() == slopes.keys()
    found = {name: float(np.linalg.norm(slopes[name])) for name in norms}
    none = {name for name, norm in norms.items() if norm < ZERO}
    # What all keys share does not change a softmax; the last queries of a map are not read by a class token.
    assert all(re.search(r"norm_k.bias|3.blocks.1.attn.(rel_pos|pool_q)", name) for name in none)
    assert max(found[name] for name in none) < ZERO
    worst = max(abs(found[name] - norm) / norm for name, norm in norms.items() if name not in none)
    assert worst < GRADIENTS, worst
