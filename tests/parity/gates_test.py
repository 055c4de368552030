"""Relaxed choices of subsets, their gradients, and temperatures, against a version in float64."""

import functools

import jax
import numpy as np
import pytest

from equivit.depthwise import gates
from tests.parity.arrays import Comparison, files, load

FILES = files("depthwise", "gating_*.npz") + files("losses", "gumbel_topk.npz")
# The other file's names, in the words of gating_*.
WORDS = {
    "input/w": "input/weights",
    "input/k": "input/number",
    "input/tau0": "input/start",
    "input/tau1": "input/end",
    "input/cooldown_steps": "input/steps",
    "output/tau_schedule": "output/temperature",
    "output/hard_topk": "output/top_k",
}
# Where one draw decides between two, its gradient is a difference of logarithms times 1 / temperature.
GRADIENTS = {"1000": 1e-6, "1": 1e-6, "0.1": 5e-5, "0.001": 5e-4}


@functools.partial(jax.jit, static_argnums=1)
def gates_and_gradient(weights, number, temperature, uniform, cotangent):
    value, back = jax.vjp(lambda w: gates.relaxed_top_k(w, number, temperature, uniform), weights)
    return value, back(cotangent)[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_gates(path, record_property):
    data = load(path)
    data = {WORDS.get(k, k.replace("put/p_", "put/gates_").replace("output/grad_", "grad/")): data[k] for k in data}
    given = {key.removeprefix("input/"): value for key, value in data.items()}
    weights, number, comparison = given["weights"], int(given["number"]), Comparison(data)
    for tau, tolerance in GRADIENTS.items():
        found = gates_and_gradient(weights, number, float(tau), given["uniform"], given["cotangent"])
        comparison.array(f"output/gates_tau{tau}", found[0])
        comparison.array(f"grad/tau{tau}", found[1], tolerance)
        np.testing.assert_allclose(found[0].sum(), number, rtol=1e-5)
    steps = np.arange(len(data["output/temperature"]))
    schedule = jax.vmap(lambda t: gates.temperature(t, given["start"], given["end"], given["steps"]))
    comparison.array("output/temperature", schedule(steps))
    comparison.array("output/top_k", gates.hard_top_k(weights, number))
    comparison.finish(record_property, "gates")
