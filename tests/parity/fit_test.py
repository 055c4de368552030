"""Taps and output maps fitted to attention, against normal equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.depthwise import equations
from equivit.layers.depthwise import depthwise_conv
from tests.parity.arrays import Comparison, files, load

FILES = files("depthwise", "fit_*.npz")
STATISTICS = files("depthwise", "statistics_*.npz")
OLDER = files("losses", "conv_attention.npz")


def least_squares(values, targets, grid, kernel_size, ridge, num_heads=None):
    """The taps [k, k, C], or with `num_heads` [heads, k, k], with `ridge` on the diagonal."""
    found = equations.of_channels(equations.neighbours(values, grid, kernel_size), targets)
    found = found if num_heads is None else found.by_head(num_heads)
    means = np.trace(np.asarray(found.gram, np.float64), axis1=1, axis2=2) / kernel_size**2
    taps = found.solved(ridge / means).reshape(-1, kernel_size, kernel_size).astype(values.dtype)
    return np.moveaxis(taps, 0, -1) if num_heads is None else taps


def refit_output(features, outputs, ridge):
    """The weight and the bias of the output map, with `ridge` on the diagonal."""
    found = equations.of_map(features, outputs)
    mean = np.trace(np.asarray(found.gram, np.float64)[:-1, :-1]) / features.shape[-1]
    return tuple(part.astype(features.dtype) for part in found.solved(ridge / mean))


def relative_errors(values, target, taps, grid, heads):
    """The relative error of each head."""
    found = depthwise_conv(values, taps, grid)
    squares = [np.square(x).reshape(-1, heads, target.shape[-1] // heads).sum((0, 2)) for x in (found - target, target)]
    return squares[0] / squares[1]


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_least_squares(path, double, record_property):
    data, tolerance = load(path), 1e-6 if double else 1e-3
    grid, size, heads = tuple(map(int, data["grid"])), data["output/taps_channel"].shape[0], int(data["num_heads"])
    with jax.enable_x64(double):
        values, target, output = (jnp.asarray(data[f"input/{name}"], float) for name in ("values", "target", "output"))
        ridge, comparison = float(data["input/ridge"]), Comparison(data)
        by_channel = least_squares(values, target, grid, size, ridge)
        by_head = least_squares(values, target, grid, size, ridge, num_heads=heads)
        spread = np.repeat(np.moveaxis(by_head, 0, -1), values.shape[-1] // heads, -1)
        comparison.array("output/taps_channel", by_channel, tolerance)
        comparison.array("output/taps_head", by_head, tolerance)
        comparison.array(
            "output/relative_error_channel", relative_errors(values, target, by_channel, grid, heads), tolerance
        )
        comparison.array("output/relative_error_head", relative_errors(values, target, spread, grid, heads), tolerance)
        weight, bias = refit_output(depthwise_conv(values, by_channel, grid), output, ridge)
        comparison.array("output/proj_weight", weight, tolerance)
        comparison.array("output/proj_bias", bias, tolerance)
    comparison.finish(record_property, "fits")


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_an_earlier_file(path, record_property):
    """A file of attention and values whose products are the targets."""
    data = load(path)
    comparison = Comparison({key: x for key, x in data.items() if key.startswith("output/k_")})
    attention, by_head, ridge = data["input/attention"], data["input/values"], float(data["input/ridge"])
    target = np.einsum("bhqp,bphd->bqhd", attention, by_head)
    values, target = (jnp.asarray(x.reshape(*x.shape[:2], -1)) for x in (by_head, target))
    found = least_squares(values, target, (7, 7), 3, ridge)
    comparison.array("output/k_ls_channel", found)
    found = least_squares(values, target, (7, 7), 3, ridge, num_heads=attention.shape[1])
    comparison.array("output/k_ls_head", found)
    comparison.array("output/k_mean_projection", equations.projection(attention.mean(0), (7, 7), 3))
    comparison.finish(record_property, "fits")


@pytest.mark.parametrize("path", STATISTICS, ids=lambda path: path.stem)
def test_projection(path, record_property):
    """Also what is left: the variance over images, and what of the mean is no convolution."""
    data = load(path)
    grid, attention = tuple(map(int, data["grid"])), data["input/attention"]
    comparison = Comparison({key: x for key, x in data.items() if "projection" in key or "residual" in key})
    mean, variance = attention.mean(0), attention.var(0)
    for size in (3, 5):
        taps = np.asarray(equations.projection(mean, grid, size))
        comparison.array(f"output/projection_k{size}", taps)
        channels = jnp.moveaxis(taps, 0, -1)
        tokens = np.broadcast_to(np.eye(mean.shape[-1], dtype=np.float32)[..., None], (*mean.shape[1:], len(mean)))
        nearest = np.moveaxis(depthwise_conv(tokens, channels, grid), (0, 1, 2), (2, 1, 0))  # keys, queries, heads
        comparison.array(f"output/residual_variance_k{size}", variance.sum((1, 2)), 2e-5)
        comparison.array(f"output/residual_mean_k{size}", np.square(mean - nearest).sum((1, 2)), 2e-5)
    assert not np.any(equations.projection(mean, grid, 11)[:, 0])  # no two tokens are so far from each other
    np.testing.assert_allclose(equations.projection(mean, grid, 11)[:, 4:7, 4:7], equations.projection(mean, grid, 3))
    comparison.finish(record_property, "fits")
