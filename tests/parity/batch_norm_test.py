"""Batch norm in training against PyTorch: three steps, of maps and of vectors."""

import numpy as np
import pytest

from equivit.layers.batch_norm import BatchNorm
from tests.parity.arrays import Comparison, files, load, state

STEPS = 3
TOLERANCE = 1e-6  # of the largest entry: the two sum in other orders


@pytest.mark.parametrize("path", files("efficient", "batchnorm_train.npz"), ids=lambda path: path.stem)
def test_three_steps(path, record_property):
    """Normalised by the biased variance, recorded with the unbiased one, which differ by a third in four vectors."""
    data = load(path)
    comparison, parameters = Comparison(data), state(data)
    for name, width in (("bn2d", 5), ("bn1d", 6)):
        layer = BatchNorm(width)
        for theirs, ours in (
            ("weight", "scale"),
            ("bias", "bias"),
            ("running_mean", "mean"),
            ("running_var", "variance"),
        ):
            getattr(layer, ours).set_value(parameters[f"{name}.{theirs}"])
        for step in range(STEPS):
            x = np.moveaxis(data[f"input/{name}_x{step}"], 1, -1)
            comparison.array(f"output/{name}_y{step}", np.moveaxis(layer(x, train=True), -1, 1), TOLERANCE)
            comparison.array(f"output/{name}_running_mean{step}", layer.mean[...], TOLERANCE)
            comparison.array(f"output/{name}_running_var{step}", layer.variance[...], TOLERANCE)
    comparison.finish(record_property, "efficient")
