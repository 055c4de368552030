"""Which products of a TPU kernel are turned, and that turned ones are the others' transposes."""

import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.tpu import products as tpu_products
from equivit.kernels.tpu.products import Part
from tests.kernels.comparison import draw


@pytest.mark.parametrize(
    "tokens, channels, expected",
    [
        pytest.param(256, 160, [(0, 128, True), (128, 128, True)], id="160 rows instead of 256"),
        pytest.param(272, 160, [(0, 128, True), (128, 128, True), (256, 16, False)], id="few are left"),
        pytest.param(240, 160, [(0, 128, True), (128, 112, False)], id="too few for a quarter"),
        pytest.param(256, 208, [(0, 256, False)], id="saves less than a quarter"),
        pytest.param(208, 128, [(0, 208, False)], id="saves nothing"),
        pytest.param(208, 24, [(0, 208, False)], id="vector units are busier"),
        pytest.param(16, 160, [(0, 16, False)], id="one short part"),
    ],
)
def test_parts(tokens, channels, expected):
    assert tpu_products.parts(tokens, [(channels, 4), (2 * channels, 4)]) == tuple(Part(*part) for part in expected)


def test_every_token_is_in_one_part():
    for tokens in range(1, 400):
        for channels in (16, 129, 144, 160, 200, 320):
            parts = tpu_products.parts(tokens, [(channels, 1)])
            np.testing.assert_array_equal(np.concatenate([np.arange(tokens)[p.rows] for p in parts]), np.arange(tokens))
            assert all(p.size <= 128 for p in parts if p.turned)


def test_turned_products_are_the_transposes():
    x, matrix = draw([(5, 7), (3, 7)], "float32")
    turned, straight = (tpu_products.dot(x, matrix, turned) for turned in (True, False))
    np.testing.assert_allclose(straight, np.asarray(x) @ np.asarray(matrix).T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(turned, straight.T, rtol=1e-6, atol=1e-6)
    assert turned.dtype == straight.dtype == jnp.float32
