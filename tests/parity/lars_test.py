"""LARS against four steps of MAE's own."""

import jax.numpy as jnp
import numpy as np

from equivit.objectives.objective import Rule
from tests.parity.arrays import FIXTURES, Comparison, load
from tests.training.optimizers_test import make, run, unstacked

OPTIONS = dict(name="lars", lr=6.4, momentum=0.9, weight_decay=0.0, clip=None)


def steps(data, **options):
    params = {name: jnp.asarray(data[f"input/{name}0"]) for name in "wb"}
    gradients = [{name: jnp.asarray(data[f"input/g{name}{t}"]) for name in "wb"} for t in range(4)]
    problem = unstacked(params, lambda tensor: Rule(decay=len(tensor.shape) > 1))
    return run(make(problem, params, **{**OPTIONS, **options}), params, gradients)


def test_official(record_property):
    data = load(FIXTURES / "jumbo" / "mae_lars.npz")
    comparison = Comparison(data)
    for t, params in enumerate(steps(data), 1):
        for name, ours in params.items():
            comparison.array(f"output/{name}{t}", ours)
    comparison.finish(record_property, "lars")
    assert comparison.largest < 5e-7  # four steps in float32: a few roundings of 6e-8


def test_another_optimiser_is_caught():
    data = load(FIXTURES / "jumbo" / "mae_lars.npz")
    sgd = steps(data, name="sgd")[0]
    assert np.abs(sgd["w"] - data["output/w1"]).max() > 1e-2 * np.abs(data["output/w1"]).max()
    np.testing.assert_allclose(sgd["b"], data["output/b1"], rtol=1e-6)  # a vector gets no trust ratio
