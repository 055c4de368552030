"""The cost of Sigma, on a tiny model."""

from types import SimpleNamespace

import pytest

from experiments.benchmarks import sigma_cost
from tests.depthwise import attending


def test_the_cost_of_sigma():
    model, images = attending.model(**attending.SMALL), attending.images(2)
    row = sigma_cost.cost(model, images, SimpleNamespace(warmup=0, runs=1))
    assert row["ratio"] > 0 and row["buffers_mb"] == pytest.approx(3 * 4 * (2 * 2 * 15**2 + 1) / 1e6)
