"""SAR on a Jumbo model against the public code, batch by batch: one test a file.

In "nokeep" no image of the third batch passes the filter; in "reset" the average entropy ends below the threshold.  All
three blocks of these models are adapted, as the public rule, which names blocks 9 to 11, has it.
"""

import re

import jax
import numpy as np
import pytest

from equivit import logical, pretrained
from equivit.evaluation import adaptation
from equivit.evaluation.adaptation import REFERENCE_BATCH, Sar
from tests.parity.arrays import TOLERANCE, Comparison, files, images, load, state

RATES = {"sar_jumbo_nokeep": 0.02, "sar_jumbo_partial": 0.02, "sar_jumbo_reset": 0.05}  # of their batches
FILES = files("jumbo", "sar_jumbo_*.npz")


def run(path, **options):
    """The stored values, and for each batch the step's results and all logical tensors after it."""
    data = load(path)
    model = pretrained.load("jumbo", state(data), num_heads=3)
    current, steps = adaptation.start(model), []
    for t in range(sum(re.fullmatch(r"input/batch_\d+", key) is not None for key in data)):
        x = images(data, f"input/batch_{t}")
        settings = Sar(lr=RATES[path.stem] * REFERENCE_BATCH / len(x), **options)
        current, logits, info = adaptation.step(settings, model, current, x)
        steps.append((current, logits, info, logical.to_logical(logical.put(model, current.parameters))))
    return data, steps


def ours(name: str) -> str:
    """Our name of an adapted tensor."""
    return name.replace(".weight", ".scale")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_official(path, record_property):
    data, steps = run(path, official=True)
    comparison = Comparison(data)
    for t, (current, logits, info, tensors) in enumerate(steps):
        comparison.array(f"output/logits_{t}", logits)
        comparison.array(f"output/entropy_{t}", info["entropy"])
        comparison.array(f"output/kept_{t}", info["kept"])
        comparison.array(f"output/ema_{t}", np.where(np.isnan(current.entropy), -1, current.entropy))
        adapted = [key for key in data if key.startswith(f"output/adapted_{t}/")]
        for key in adapted:
            comparison.array(key, tensors[ours(key.rpartition("/")[2])])
    comparison.finish(record_property, "sar")
    names = {ours(key.rpartition("/")[2]) for key in adapted}
    before = logical.to_logical(pretrained.load("jumbo", state(data), num_heads=3))
    assert {name for name, tensor in tensors.items() if (tensor != before[name]).any()} <= names
    assert len(names) == 18


def test_the_default_differs_where_nothing_is_kept():
    path = next(path for path in FILES if path.stem == "sar_jumbo_nokeep")
    data, steps = run(path)
    second, third = (jax.tree.map(np.asarray, steps[t][3]) for t in (1, 2))
    assert all((third[name] == second[name]).all() for name in second)
    stored = {ours(key.rpartition("/")[2]): value for key, value in data.items() if key.startswith("output/adapted_2/")}
    moved = max(np.abs(stored[name] - second[name]).max() / np.abs(stored[name]).max() for name in stored)
    assert moved > 100 * TOLERANCE
