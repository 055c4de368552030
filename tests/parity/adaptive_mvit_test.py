"""A-MViTv2 against brute force, in float64 by the paper's definitions: no official code of it is public.

The file holds the tables of positions around the torus; all other weights, and the image, are the ordinary model's.
"""

import jax
import numpy as np
import pytest

from equivit import logical, models, pretrained
from tests.parity.arrays import Comparison, files, images, load, state

# A gap is a small difference of two energies, relative to these, and so is its rounding.
GAP = 2e-6


@jax.jit
def everything(model, x):
    """Logits, the last map before the norm, and all choices; one pass, which is compiled once."""
    last, _ = model.trunk(x)
    return model.head(model.norm(last.tokens).mean(-2)), last.tokens, last.choices


def tables(data):
    """By logical name."""
    found = {}
    for key, table in state(data).items():
        block, name = key.split("/")
        stage, number = (part.lstrip("stageblock") for part in block.split("_"))
        axis = {"rpe_adapt_h": "rows", "rpe_adapt_w": "columns"}[name]
        found[f"stages.{stage}.blocks.{number}.attention.position.{axis}"] = table
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", files("adaptive", "oracle_e2e_amvitv2.npz"), ids=lambda path: path.stem)
def test_mvit(path, record_property):
    data, ordinary = load(path), load(path.with_name("mvitv2_geom224.npz"))
    model = models.adapt(pretrained.load("timm", state(ordinary)), anchor=False)
    tensors, around = logical.to_logical(model), tables(data)
    assert around.keys() == {name for name in tensors if "position" in name}
    model = logical.from_logical(model, tensors | around)
    logits, last, chosen = everything(model, images(ordinary))
    comparison = Comparison(data)
    comparison.array("output/logits", logits)
    comparison.array("output/last", last)
    assert {key.removeprefix("index/") for key in data if key.startswith("index/")} == chosen.keys()
    for name, (index, gap) in chosen.items():
        comparison.array(f"index/{name}", index, 0)
        np.testing.assert_allclose(gap, data[f"gap/{name}"], rtol=0, atol=GAP)
    comparison.finish(record_property, "adaptive models")
