"""The linear map of a field: irrep by irrep, and a bias of the invariant component alone, with all its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from equivit.kernels.isotypic_linear import add_to_first, linear
from tests.kernels.comparison import draw


@pytest.mark.parametrize("irreps, planes, bias", [(4, True, True), (4, True, False), (2, False, True)])
def test_every_row_has_its_matrix(irreps, planes, bias):
    shapes = [(irreps, 3, 5, 6), (2, 3, 5, 12)][: 1 + planes]
    weights = [(irreps, 6, 7), (12, 14)][: 1 + planes]
    field, matrices, (b,) = draw(shapes, "float32"), draw(weights, "float32", seed=1), draw([(7,)], "float32", seed=2)
    y = linear(tuple(field), (tuple(matrices), b if bias else None))
    for i in range(irreps):
        expected = np.asarray(field[0][i]) @ np.asarray(matrices[0][i]) + (np.asarray(b) if bias and i == 0 else 0)
        np.testing.assert_allclose(y[0][i], expected, rtol=1e-5, atol=1e-5)  # sums of 6 products
    for row in range(2 * planes):
        np.testing.assert_allclose(y[1][row], np.asarray(field[1][row]) @ matrices[1], rtol=1e-5, atol=1e-5)


def test_gradients_of_the_bias_are_sums_over_the_first_component_in_its_own_type():
    """Rounded to bfloat16, the sum of 1001 ones is 1000."""
    lines, bias = jnp.ones((4, 7, 11, 13, 5), jnp.bfloat16), jnp.zeros(5)
    y, pullback = jax.vjp(add_to_first, lines, bias)
    rows = jnp.arange(1.0, 5)[:, None, None, None, None]
    d_lines, d_bias = pullback(jnp.broadcast_to(rows, y.shape).astype(y.dtype))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_lines, jnp.broadcast_to(rows, y.shape))
    np.testing.assert_array_equal(d_bias, np.full(5, 1001, np.float32))


def test_derivatives_agree_with_each_other_and_with_differences():
    (lines,), (bias,) = draw([(4, 3, 5, 6)], "float32"), draw([(6,)], "float32", seed=1)
    check_grads(add_to_first, (lines, bias), order=2, atol=1e-2, rtol=1e-2)  # as differences allow


def test_it_takes_batch_axes_of_either_argument():
    lines, bias = draw([(3, 4, 5, 6), (3, 6)], "float32")
    both = jax.vmap(add_to_first)(lines, bias)
    np.testing.assert_array_equal(both, jnp.stack([add_to_first(*pair) for pair in zip(lines, bias, strict=True)]))
    np.testing.assert_array_equal(jax.vmap(add_to_first, (None, 0))(lines[0], bias)[1], add_to_first(lines[0], bias[1]))
