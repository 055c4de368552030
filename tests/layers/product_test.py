"""Products whose gradients are summed in the order that is fast on a platform."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.layers.product import WEIGHTED, matmul, weighted

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(7, 4)).astype(np.float32)


def loss(product, x, weight):
    return jnp.sum(jnp.sin(product(x, weight)))


@pytest.mark.parametrize("batch", [(), (5,), (3, 5), (2, 3, 5)])
def test_values_and_derivatives_are_those_of_a_product(batch):
    x = RNG.normal(size=(*batch, 7)).astype(np.float32)

    def all_of(product, x, weight):
        forward = jax.jvp(product, (x, weight), (jnp.cos(x), jnp.cos(weight)))
        gradient = jax.grad(functools.partial(loss, product), (0, 1))
        by_column = jax.vmap(gradient, (None, 1))(x, weight[:, :, None])
        return forward, gradient(x, weight), by_column, jax.hessian(functools.partial(loss, product), 1)(x, weight)

    found, known = (jax.jit(functools.partial(all_of, p))(x, WEIGHT) for p in (matmul, jnp.matmul))
    chex.assert_trees_all_close(found, known, rtol=1e-5, atol=1e-5)  # up to 30 rows are summed in another order


@pytest.mark.parametrize(
    ("platform", "axes"), [("cpu", "[0] x [0]"), ("tpu", "[0, 1] x [0, 1]"), ("cuda", "[0, 1] x [0, 1]")]
)
def test_a_cpu_sums_over_one_axis_and_others_over_two(platform, axes):
    gradient = jax.jit(jax.grad(functools.partial(loss, matmul), 1))
    shapes = jax.ShapeDtypeStruct((3, 5, 7), jnp.float32), jax.ShapeDtypeStruct((7, 4), jnp.float32)
    text = jax.export.export(gradient, platforms=[platform])(*shapes).mlir_module()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 2, products  # x is not differentiated: no product stands for its gradient
    assert sum(f"contracting_dims = {axes}" in line for line in products) == 1, products


@pytest.mark.parametrize(("platform", "result"), [("cpu", "3x5x4xf32"), ("tpu", "3x5x4xbf16"), ("cuda", "3x5x4xbf16")])
def test_a_product_in_bfloat16_has_the_result_that_is_fast_and_is_the_same_number(platform, result):
    x, weight = RNG.normal(size=(3, 5, 7)).astype(jnp.bfloat16), WEIGHT.astype(jnp.bfloat16)
    text = jax.export.export(jax.jit(matmul), platforms=[platform])(x, weight).mlir_module()
    (product,) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert product.split("->")[-1].strip().startswith(f"tensor<{result}>"), product
    in_float32 = jnp.matmul(x.astype(np.float32), weight.astype(np.float32), precision="highest")
    found = matmul(x, weight)
    assert found.dtype == jnp.bfloat16
    chex.assert_trees_all_close(found.astype(np.float32), in_float32, rtol=2**-8, atol=1e-6)  # rounded once, at the end


def test_the_backward_pass_begins_from_what_a_product_needs():
    """Else a scan over blocks would write what the other platforms need, too."""
    x = jnp.ones((3, 5, 7))

    def kept(product):
        _, pull = jax.vjp(jax.jit(lambda x, weight: product(jnp.tanh(x), weight)), x, WEIGHT)
        return sorted(leaf.shape for leaf in jax.tree.leaves(pull))

    assert kept(matmul) == kept(jnp.matmul)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_sums_by_weights_and_their_derivatives(batch):
    weights, values = (RNG.normal(size=(*batch, *shape)).astype(np.float32) for shape in ((5, 7), (7, 4)))

    def all_of(product, weights, values):
        forward = jax.jvp(product, (weights, values), (jnp.cos(weights), jnp.cos(values)))
        gradient = jax.grad(functools.partial(loss, product), (0, 1))
        many = jax.vmap(gradient, (None, -1))(weights, jnp.stack([values, 2 * values], -1))
        return (
            forward,
            gradient(weights, values),
            many,
            jax.hessian(functools.partial(loss, product), 1)(weights, values),
        )

    plain = functools.partial(jnp.einsum, WEIGHTED)
    found, known = (jax.jit(functools.partial(all_of, product))(weights, values) for product in (weighted, plain))
    chex.assert_trees_all_close(found, known, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_the_gradient_of_values_has_their_axes(platform):
    """JAX's own has those of the sums first, [2, 3, 4, 7], and is then turned."""
    shapes = [jax.ShapeDtypeStruct((2, 3, *shape), jnp.float32) for shape in ((5, 7), (7, 4))]

    def turned(product):
        gradient = jax.jit(jax.grad(functools.partial(loss, product), 1))
        text = jax.export.export(gradient, platforms=[platform])(*shapes).mlir_module()
        assert text.count("stablehlo.dot_general") == 2
        return text.count("stablehlo.transpose")

    assert [turned(product) for product in (weighted, functools.partial(jnp.einsum, WEIGHTED))] == [0, 1]
