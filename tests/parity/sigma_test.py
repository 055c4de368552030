"""Statistics of attention: moments against two passes in float64, and Sigma of public backbones on patch tokens."""

import jax
import numpy as np
import pytest

from equivit import models
from equivit.depthwise import selection
from equivit.depthwise.selection import Moments
from tests.parity.arrays import Comparison, files, images, load
from tests.parity.backbones_test import FILES, backbone

STATISTICS = files("depthwise", "statistics_*.npz")
OLDER = files("losses", "conv_attention.npz")
SUMS = 1e-4  # as the files ask for; a sum over the pairs of tokens in float32
update = jax.jit(Moments.update)


@pytest.mark.parametrize("path", STATISTICS, ids=lambda path: path.stem)
def test_statistics(path, record_property):
    """By uneven batches, merged in another order."""
    data = load(path)
    grid, attention = tuple(map(int, data["grid"])), data["input/attention"]
    comparison = Comparison({key: x for key, x in data.items() if "projection" not in key and "residual" not in key})
    shards = [Moments.zeros(attention.shape[1:]) for _ in range(3)]
    for k, batch in enumerate((attention[:7], attention[7:14], attention[14:21], attention[21:28], attention[28:])):
        shards[k % 3] = update(shards[k % 3], batch)
    found = shards[2].merge(shards[0]).merge(shards[1])
    deviation = found.deviation()
    comparison.array("output/deviation", deviation)
    comparison.array("output/aligned", selection.aligned(deviation, grid))
    sums = selection.Sigma.from_moments(jax.tree.map(lambda a: a[None], found))
    comparison.array("output/sigma_h", sums.heads[0], SUMS)
    comparison.array("output/sigma_b", sums.blocks[0], SUMS)
    # A float32 keeps two digits of deviations that are 1e-5 of the mean.
    large = update(Moments.zeros(data["input/large_mean"].shape[1:]), data["input/large_mean"])
    comparison.array("output/large_mean_deviation", large.deviation(), 1e-2)
    comparison.finish(record_property, "Sigma")


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_an_earlier_file(path, record_property):
    data = load(path)
    comparison = Comparison({key: data[key] for key in ("output/sigma_sum", "output/sigma_aligned")})
    found = update(Moments.zeros(data["input/attention"].shape[1:]), data["input/attention"])
    comparison.array("output/sigma_sum", selection.Sigma.from_moments(jax.tree.map(lambda a: a[None], found)).heads[0])
    comparison.array("output/sigma_aligned", selection.aligned(found.deviation(), (7, 7)))
    comparison.finish(record_property, "Sigma")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sigma_of_backbones(path, record_property):
    """One pass over the images, in batches of 4 and 2."""
    model, data = backbone(path)
    none = dict(class_token=False, class_position=False, registers=0, mask_token=False, projection=None)
    model = models.reconfigure(model, **none, pool="mean")[0]
    comparison = Comparison({key: x for key, x in data.items() if key.endswith("sigma_h")})
    for key in list(comparison.data):
        x = images(data, f"input/image_{key.split('/')[1]}")
        found = selection.sigma(model, [np.asarray(x[:4]), np.asarray(x[4:])])
        comparison.array(key, found.heads, SUMS)
        np.testing.assert_allclose(found.blocks, data[key].mean(1), rtol=1e-4)
    comparison.finish(record_property, "Sigma")
