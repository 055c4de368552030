"""The linear map of a field: irrep by irrep, and a bias of the invariant component alone, with all its derivatives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels.isotypic_linear import add_to_first, linear, product
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


PRODUCTS = {  # the shapes of x and of the weight, and the product by the book
    "one row": ((3, 7), (7, 4), jnp.matmul),
    "images": ((2, 3, 5, 7), (7, 4), jnp.matmul),
    "a matrix for each row": ((4, 5, 7), (4, 7, 3), jnp.matmul),
    "a matrix for each row, images": ((4, 2, 5, 7), (4, 7, 3), lambda x, w: jnp.einsum("ibnc,icd->ibnd", x, w)),
}
products = pytest.mark.parametrize(("x", "weight", "by_the_book"), PRODUCTS.values(), ids=PRODUCTS)


@products
def test_values_and_derivatives_are_those_of_a_product(x, weight, by_the_book):
    x, weight = draw([x, weight], "float32", scale=1)

    def loss(product, x, weight):
        return jnp.sum(jnp.sin(product(x, weight)))

    def all_of(product, x, weight):
        forward = jax.jvp(product, (x, weight), (jnp.cos(x), jnp.cos(weight)))
        gradient = jax.grad(functools.partial(loss, product), (0, 1))
        by_column = jax.vmap(gradient, (None, -1))(x, weight[..., None, :])
        return forward, gradient(x, weight), by_column, jax.hessian(functools.partial(loss, product), 1)(x, weight)

    found, known = (jax.jit(functools.partial(all_of, p))(x, weight) for p in (product, by_the_book))
    chex.assert_trees_all_close(found, known, rtol=1e-5, atol=1e-5)  # up to 30 rows are summed in another order


@products
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_cpu_sums_the_gradient_of_a_weight_over_one_axis_and_others_join_none(platform, x, weight, by_the_book):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, weight))
    gradient = jax.jit(jax.grad(lambda weight, x: jnp.square(product(x, weight)).sum()))
    text = jax.export.export(gradient, platforms=[platform])(weight, x).mlir_module()
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    first = len(weight.shape) - 2
    summed = list(range(first, len(x.shape) - 1))
    axes = [first] if platform == "cpu" else summed
    assert len(found) == 2, found  # x is not differentiated
    assert sum(f"contracting_dims = {axes} x {axes}" in line for line in found) == 1, found
    assert platform == "cpu" or "stablehlo.reshape" not in text


def test_the_backward_pass_begins_from_what_a_product_needs():
    """Else a scan over blocks would write what the other platforms need, too."""
    x, weight = jnp.ones((4, 3, 5, 7)), jnp.ones((4, 7, 2))

    def kept(product):
        _, pull = jax.vjp(jax.jit(lambda x, weight: product(jnp.tanh(x), weight)), x, weight)
        return sorted(leaf.shape for leaf in jax.tree.leaves(pull))

    assert kept(product) == kept(PRODUCTS["a matrix for each row, images"][-1])


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
